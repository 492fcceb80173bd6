# SPDX-License-Identifier: Apache-2.0
"""Requests that do not fit where they are imported, or that other threads change meanwhile."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvcore import (
    AlreadyClaimedError,
    CapacityError,
    PagedKVCacheManager,
    RequestNotFoundError,
    TextGenerationContext,
    moving,
    ops,
)
from kvcore.errors import KVCacheError
from kvcore.groups import FullAttention, SlidingWindow
from kvcore.snapshots import request as importing
from kvcore.snapshots.request import Pools
from moved_requests import (
    PROMPT,
    assert_reads,
    exported,
    moving_manager,
    moving_params,
    write_chunk,
    written_request,
)
from tables import table

# ---- refusals ------------------------------------------------------------------------------------


def state_of(manager: PagedKVCacheManager) -> Any:
    return (manager.num_free_blocks, manager.num_cached_blocks, manager.metrics)


@table(
    ("source", "target", "text"),
    [
        ({}, {"num_layers": 3}, r"layers 2 \(0, 1\), must be 3 \(0, 1, 2\)"),
        ({}, {"n_kv_heads": 4}, "heads and widths of layer 0"),
        ({}, {"head_dim": 8}, "heads and widths of layer 0"),
        ({}, {"is_mla": True}, "heads and widths of layer 0"),
        ({}, {"dtype": "float16"}, "dtype float32, must be float16"),
        ({"dtype": "float16"}, {"dtype": "bfloat16"}, "import never rounds"),
        ({"dtype": "int8"}, {"dtype": "float32"}, "dtype int8, must be float32"),
        (
            {"dtype": "int8", "kv_scale_granularity": 4},
            {"dtype": "int8", "kv_scale_granularity": 2},
            "kv_scale_granularity 4, must be 2",
        ),
        (
            {"dtype": "float8_e4m3fn", "kv_scale_granularity": 4},
            {"dtype": "float32"},
            "dtype float8_e4m3fn, must be float32",
        ),
    ],
)
def test_other_layouts_are_refused(source: Any, target: Any, text: str) -> None:
    data = exported(moving_params(**source))
    manager = moving_manager(moving_params(**target))
    before = state_of(manager)
    context = moving.read_sequence(data).context("r")
    with pytest.raises(ValueError, match=text):
        manager.import_sequence(context, data)
    assert not manager.contains("r")
    assert (context.start_idx, state_of(manager)) == (0, before)


@pytest.mark.parametrize(
    ("tokens", "options", "text"),
    [
        (PROMPT, {}, "has 18 tokens, must have more than the 18"),
        ([*PROMPT[:5], 99, *PROMPT[6:], 1], {}, "token 5 of request 'r' is 99, must be"),
        ([*PROMPT, 1], {"cache_salt": "t"}, "has cache_salt 't', must be None"),
        ([*PROMPT, 1], {"extra_key": ""}, "has extra_key '', must be None"),
        ([*PROMPT, 1], {"extra_keys": [(17, 1, b"x")]}, "has other extra keys"),
    ],
)
def test_other_requests_are_refused(tokens: list[int], options: Any, text: str) -> None:
    data = exported()
    manager = moving_manager()
    before = state_of(manager)
    context = TextGenerationContext("r", tokens, **options)
    with pytest.raises(ValueError, match=text):
        manager.import_sequence(context, data)
    assert not manager.contains("r")
    assert state_of(manager) == before


def test_tokens_behind_the_written_ones_may_be_others() -> None:
    data = exported()
    manager = moving_manager()
    context = TextGenerationContext("r", [*PROMPT, 1, 2, 3], extra_keys=[(18, 1, b"x")])
    assert manager.import_sequence(context, data)
    assert (context.start_idx, context.active_idx) == (18, 21)


def test_the_model_is_compared_where_it_is_asked_for() -> None:
    manager = moving_manager()
    data = exported()
    context = moving.read_sequence(data).context("r")
    with pytest.raises(ValueError, match="model None, must be 'llama'"):
        manager.import_sequence(context, data, model="llama")
    assert manager.import_sequence(context, data)


def test_no_room_is_an_answer_and_too_large_an_error() -> None:
    data = exported()
    manager = moving_manager(num_pages=6)
    other = TextGenerationContext("other", list(range(8)))
    manager.claim("other")
    manager.fetch([other])
    before = state_of(manager)
    context = moving.read_sequence(data).context("r")
    assert manager.import_sequence(context, data) is False
    assert not manager.contains("r")
    assert (context.start_idx, context.active_idx, state_of(manager)) == (0, 19, before)
    manager.release("other")
    assert manager.import_sequence(context, data)
    assert_reads(manager, context)
    small = moving_manager(num_pages=4)
    with pytest.raises(CapacityError, match="more than the whole pool of 4"):
        small.import_sequence(moving.read_sequence(data).context("r"), data)
    assert not small.contains("r")
    short = moving_manager(max_seq_len=18)
    with pytest.raises(CapacityError, match="max_seq_len"):
        short.import_sequence(moving.read_sequence(data).context("r"), data)


def test_claims_as_those_of_others() -> None:
    data = exported()
    manager = moving_manager(moving_params(n_devices=2, data_parallel_degree=2), max_batch_size=2)
    first = moving.read_sequence(data).context("first")
    assert manager.import_sequence(first, data, replica_idx=1)
    assert manager.get_replica(first) == 1
    with pytest.raises(AlreadyClaimedError):
        manager.import_sequence(moving.read_sequence(data).context("first"), data)
    assert_reads(manager, first)
    with pytest.raises(IndexError, match=r"replica_idx is 2, must be 0 \.\. 1"):
        manager.import_sequence(moving.read_sequence(data).context("second"), data, replica_idx=2)
    with pytest.raises(CapacityError, match="replica 1 is full: 1 of 1 sequences are claimed"):
        manager.import_sequence(moving.read_sequence(data).context("second"), data, replica_idx=1)
    second = moving.read_sequence(data).context("second")
    assert manager.import_sequence(second, data)
    assert manager.get_replica(second) == 0


def test_what_has_nothing_to_export() -> None:
    manager = moving_manager()
    with pytest.raises(RequestNotFoundError):
        manager.export_sequence("r")
    manager.claim("r")
    with pytest.raises(ValueError, match="has 0 tokens written, must have at least 1"):
        manager.export_sequence("r")
    context = TextGenerationContext("r", PROMPT)
    manager.fetch([context])
    with pytest.raises(ValueError, match="has 0 tokens written"):
        manager.export_sequence("r")


def test_a_context_that_was_set_back_behind_its_windows() -> None:
    manager = moving_manager(moving_params(groups=(FullAttention([0]), SlidingWindow([1], 3))))
    context = written_request(manager, "r", PROMPT)
    context.start_idx = 9
    with pytest.raises(ValueError, match="windows have freed pages"):
        manager.export_sequence("r")


def test_quotas_bound_what_is_imported() -> None:
    manager = moving_manager(num_pages=16, quotas={"t": (0, 7)})
    data = exported()
    for name, answer in (("first", True), ("second", False)):
        context = TextGenerationContext(name, [*PROMPT, 1], tenant="t")
        assert manager.import_sequence(context, data) is answer
    assert manager.tenant_metrics["t"].held_pages == 5
    assert not manager.contains("second")
    assert manager.import_sequence(TextGenerationContext("third", [*PROMPT, 1]), data)


def test_managers_without_a_pool_say_so() -> None:
    data = exported()
    manager = moving_manager(blocks=None)
    context = TextGenerationContext("r", PROMPT)
    manager.claim("r")
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    with pytest.raises(ValueError, match="so it has no bytes to export"):
        manager.export_sequence("r")
    with pytest.raises(ValueError, match="no bytes to import"):
        manager.import_sequence(moving.read_sequence(data).context("s"), data)
    assert not manager.contains("s")


def test_data_of_another_type() -> None:
    manager = moving_manager()
    wrong: Any
    for wrong in (None, 7, io.StringIO("text")):
        with pytest.raises(TypeError, match="must be bytes, a path, or a file opened in binary"):
            manager.import_sequence(TextGenerationContext("r", PROMPT), wrong)
    with pytest.raises(FileNotFoundError):
        manager.import_sequence(TextGenerationContext("r", PROMPT), "/no/such/file")


def no_copy(*_: Any) -> None:
    raise AssertionError


def test_arguments_of_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    data = exported()
    manager = moving_manager()
    context: Any = written_request(manager, "r", PROMPT)
    monkeypatch.setattr(Pools, "read", no_copy)
    monkeypatch.setattr(importing, "_write", no_copy)
    before = state_of(manager)
    wrong: Any
    for wrong in (5, b"path", io.StringIO(), []):
        with pytest.raises(TypeError, match="must be a path, or a file opened in binary mode"):
            manager.export_sequence("r", wrong)
    for wrong in (5, b"llama", ["llama"]):
        with pytest.raises(TypeError, match="must be a str or None"):
            manager.export_sequence("r", model=wrong)
        with pytest.raises(TypeError, match="must be a str or None"):
            manager.import_sequence(moving.read_sequence(data).context("s"), data, model=wrong)
    for wrong in (None, 7, "s", PROMPT):
        with pytest.raises(TypeError, match="no context: it has no request_id"):
            manager.import_sequence(wrong, data)
    assert state_of(manager) == before
    assert (context.start_idx, manager.contains("s")) == (18, False)


def test_a_context_that_stands_further_on_is_refused_and_stays() -> None:
    data = exported()
    manager = moving_manager()
    before = state_of(manager)
    context = moving.read_sequence(data).context("r")
    context.update(4)
    context.extend([5])
    with pytest.raises(ValueError, match="has start_idx 19, must be 0 to be imported; set it to 0"):
        manager.import_sequence(context, data)
    assert (context.start_idx, context.active_idx, context.end_idx) == (19, 21, 21)
    assert (manager.contains("r"), state_of(manager)) == (False, before)
    context.start_idx = 0
    assert manager.import_sequence(context, data)
    assert_reads(manager, context)


# ---- other threads -------------------------------------------------------------------------------


def between(monkeypatch: pytest.MonkeyPatch, act: Any) -> list[int]:
    """Run `act` once, in the middle of the copy of an export."""
    ran: list[int] = []
    read = Pools.read

    def meddling(self: Pools, *arguments: Any) -> Any:
        found = read(self, *arguments)
        if not ran:
            ran.append(1)
            thread = threading.Thread(target=act)
            thread.start()
            thread.join()
        return found

    monkeypatch.setattr(Pools, "read", meddling)
    return ran


def test_a_release_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = moving_manager()
    written_request(manager, "r", PROMPT)

    def release_and_overwrite() -> None:
        manager.release("r")
        manager.reset_prefix_cache()
        written_request(manager, "other", [5] * 60)

    ran = between(monkeypatch, release_and_overwrite)
    with pytest.raises(RequestNotFoundError):
        manager.export_sequence("r")
    assert ran


def test_another_claim_of_the_same_id_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = moving_manager()
    written_request(manager, "r", PROMPT)

    def claim_anew() -> None:
        manager.release("r")
        manager.reset_prefix_cache()
        written_request(manager, "r", [5] * 18)

    ran = between(monkeypatch, claim_anew)
    data = manager.export_sequence("r")
    assert ran
    saved = moving.read_sequence(data)
    assert saved.tokens.tolist() == [5] * 18 + [9]
    other = moving_manager()
    context = saved.context("r")
    assert other.import_sequence(context, saved)
    assert_reads(other, context)


def test_forks_steps_and_resets_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = moving_manager(moving_params(groups=(FullAttention([0]), SlidingWindow([1], 3))))
    context = written_request(manager, "r", PROMPT)

    def go_on() -> None:
        child = TextGenerationContext("child", [*PROMPT, 4, 4])
        manager.fork("r", child)
        write_chunk(manager, child, 1)
        for token in range(9):
            write_chunk(manager, context, token)
        manager.release("child")
        manager.reset_prefix_cache()

    ran = between(monkeypatch, go_on)
    saved = moving.read_sequence(manager.export_sequence("r"))
    assert ran
    assert saved.written == 27
    other = moving_manager(replace(manager.params, groups=None))
    with pytest.raises(ValueError, match="tokens of layer 1"):
        other.import_sequence(saved.context("r"), saved)
    other = moving_manager(manager.params)
    moved = saved.context("r")
    assert other.import_sequence(moved, saved)
    (inputs,) = other.fetch([moved])
    (own,) = manager.fetch([context])
    for layer in range(2):
        found = ops.batch.layer_pools(inputs, layer)
        wanted = ops.batch.layer_pools(own, layer)
        for position in range(25 if layer else 0, 27):
            at = divmod(position, 4)
            for left, right in zip(found.pools, wanted.pools, strict=True):
                np.testing.assert_array_equal(
                    left[found.lookup_table[0, at[0]], at[1]],
                    right[wanted.lookup_table[0, at[0]], at[1]],
                )


def test_a_request_that_never_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = moving_manager()
    context = written_request(manager, "r", PROMPT)
    read = Pools.read

    def meddling(self: Pools, *arguments: Any) -> Any:
        found = read(self, *arguments)
        write_chunk(manager, context, 3)
        return found

    monkeypatch.setattr(Pools, "read", meddling)
    with pytest.raises(KVCacheError, match="was stepped 16 times during its export"):
        manager.export_sequence("r")


def test_an_import_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    data = exported()
    manager = moving_manager()
    before = state_of(manager)
    context = moving.read_sequence(data).context("r")

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(importing, "_write", fail)
    with pytest.raises(MemoryError):
        manager.import_sequence(context, data)
    assert not manager.contains("r")
    assert (context.start_idx, context.active_idx) == (0, 19)
    assert state_of(manager)[:2] == before[:2]
    monkeypatch.undo()
    assert manager.import_sequence(context, data)
    assert_reads(manager, context)
