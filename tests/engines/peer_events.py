# SPDX-License-Identifier: Apache-2.0
"""Messages of cache events as other engines declare them: only fields, types and defaults.

`FIELDS` lists the fields of each class. The runners of the engines' own sources compare this list
with the installed classes, so a new field fails a check.
"""

from __future__ import annotations

from typing import Any

import msgspec

#: vLLM 0.33.0, ``vllm.distributed.kv_events``; vLLM's block pool publishes these hashes.
VllmHash = bytes | int


class VllmStored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """vLLM's BlockStored."""

    block_hashes: list[VllmHash]
    parent_block_hash: VllmHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class VllmRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    """vLLM's BlockRemoved."""

    block_hashes: list[VllmHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class VllmCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True):
    """vLLM's AllBlocksCleared."""


class VllmBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """vLLM's KVEventBatch."""

    ts: float
    events: list[VllmStored | VllmRemoved | VllmCleared]
    data_parallel_rank: int | None = None


class SglangStored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    """BlockStored of SGLang 0.5.23, ``sglang.srt.disaggregation.kv_events``."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class SglangRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    """SGLang's BlockRemoved."""

    block_hashes: list[int]
    medium: str | None = None


class SglangCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True):
    """SGLang's AllBlocksCleared."""


class SglangBatch(msgspec.Struct, array_like=True):
    """SGLang's KVEventBatch."""

    ts: float
    events: list[SglangStored | SglangRemoved | SglangCleared]
    attn_dp_rank: int | None = None


#: The batch class of each engine; its events are in its second field.
BATCHES: dict[str, Any] = {"vllm": VllmBatch, "sglang": SglangBatch}
#: The classes of each engine by their names in that engine.
KINDS: dict[str, dict[str, Any]] = {
    "vllm": {
        "KVEventBatch": VllmBatch,
        "BlockStored": VllmStored,
        "BlockRemoved": VllmRemoved,
        "AllBlocksCleared": VllmCleared,
    },
    "sglang": {
        "KVEventBatch": SglangBatch,
        "BlockStored": SglangStored,
        "BlockRemoved": SglangRemoved,
        "AllBlocksCleared": SglangCleared,
    },
}


def fields_of(kind: Any) -> list[tuple[str, bool]]:
    """Return the fields of a message in order: the names, and whether a field is optional."""
    return [(each.name, not each.required) for each in msgspec.structs.fields(kind)]


def differing(engine: str, module: Any) -> list[str]:
    """Return the classes of an engine's module whose fields differ from the fields listed here."""
    return [
        name
        for name, ours in KINDS[engine].items()
        if fields_of(getattr(module, name)) != fields_of(ours)
        or bool(getattr(module, name).__struct_config__.array_like)
        is not bool(ours.__struct_config__.array_like)
    ]
