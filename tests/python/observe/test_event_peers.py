# SPDX-License-Identifier: Apache-2.0
"""vLLM and SGLang read a publisher's events, and kvcore reads the events of vLLM and SGLang."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import require

msgspec = require("msgspec")

from event_mirror import manager_of, run  # noqa: E402
from kvcore.events import (  # noqa: E402
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    decode_batch,
    encode_batch,
    wire_event,
)
from kvcore.routing import PrefixIndex  # noqa: E402
from peer_events import BATCHES, KINDS, SglangBatch, VllmBatch  # noqa: E402

ENGINES = sorted(BATCHES)


def told() -> KVEventBatch:
    """Return all events of a manager: pages with and without names, evictions, a reset."""
    manager = manager_of(num_pages=4)
    run(manager, [1, 2, 3, 4, 5], extra_key="lora", cache_salt="tenant")
    run(manager, [1, 2, 3, 4, 5, 6, 7])
    run(manager, [8, 9, 10, 11, 12, 13, 14])
    taken = manager.take_events()
    manager.reset_prefix_cache()
    events = [wire_event(event) for event in [*taken, *manager.take_events()]]
    kinds = {type(event) for event in events}
    assert kinds == {BlockStored, BlockRemoved, AllBlocksCleared}
    return KVEventBatch(1.5, events, 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_sent_by_default_is_read_by_engines(engine: str) -> None:
    batch = told()
    read = msgspec.msgpack.decode(encode_batch(batch), type=BATCHES[engine])
    assert read.ts == batch.ts
    assert len(read.events) == len(batch.events)
    for theirs, ours in zip(read.events, batch.events, strict=True):
        assert isinstance(theirs, KINDS[engine][type(ours).__name__])
        known = set(theirs.__struct_fields__) & set(type(ours).__struct_fields__)
        assert known or isinstance(ours, AllBlocksCleared)
        for name in known - {"extra_keys"}:
            assert getattr(theirs, name) == getattr(ours, name)


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_refuse_the_array_form(engine: str) -> None:
    """This is why the array form is not the default."""
    payload = encode_batch(told(), "array")
    with pytest.raises(msgspec.ValidationError, match="Expected `object`, got `array`"):
        msgspec.msgpack.decode(payload, type=BATCHES[engine])


def test_whole_keys_are_read_by_vllm() -> None:
    batch = KVEventBatch(0.0, [BlockRemoved([b"k" * 32], "GPU")], 0)
    read = msgspec.msgpack.decode(encode_batch(batch), type=VllmBatch)
    assert read.events[0].block_hashes == [b"k" * 32]


def sent_by(engine: str) -> Any:
    """Return an engine's batch with every kind of event and all fields of this engine."""
    kinds = KINDS[engine]
    stored: dict[str, Any] = {"session_id": "s", "lora_id": None, "medium": "GPU"}
    if engine == "vllm":
        stored |= {"lora_name": None, "kv_cache_spec_kind": "full_attention", "locality": "LOCAL"}
    else:
        stored |= {"cache_salt": "tenant"}
    events = [
        kinds["BlockStored"]([7, 2**64 - 1], None, [1, 2, 3, 4], 2, **stored),
        kinds["BlockRemoved"]([7], "GPU"),
        kinds["AllBlocksCleared"](),
    ]
    return BATCHES[engine](2.5, events, 3)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_engines_send_is_read(engine: str) -> None:
    read = decode_batch(msgspec.msgpack.encode(sent_by(engine)))
    stored, removed, cleared = read.events
    assert (read.ts, read.data_parallel_rank) == (2.5, 3)
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.token_ids) == ([7, 2**64 - 1], [1, 2, 3, 4])
    assert (stored.block_size, stored.medium) == (2, "GPU")
    assert removed == BlockRemoved([7], "GPU")
    assert cleared == AllBlocksCleared()


def test_an_index_follows_the_media_and_hashes_of_sglang() -> None:
    """SGLang's hashes have a sign, and its host memory has its own name."""
    stored = KINDS["sglang"]["BlockStored"]
    events = [
        stored([-1], None, [1, 2], 2, None, "GPU"),
        stored([-2], -1, [3, 4], 2, None, "CPU_PINNED"),
        stored([-3], -2, [5, 6], 2, None, "DISK"),
        stored([-4], -3, [7, 8], 2, None, "EXTERNAL"),
    ]
    index = PrefixIndex(["w"])
    index.apply("w", decode_batch(msgspec.msgpack.encode(SglangBatch(0.0, events))))
    keys = [2**64 - n for n in range(1, 5)]
    assert index.match(keys).tolist() == [4]
    assert index.match(keys, media=["GPU"]).tolist() == [1]
    assert index.match(keys, media=["GPU", "CPU"]).tolist() == [2]
