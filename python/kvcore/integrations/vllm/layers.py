# SPDX-License-Identifier: Apache-2.0
"""Groups of vLLM's layers as groups of kvcore's: one layer represents each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvcore import KVCacheParams
from kvcore.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow

KEEP_ALL = (FullAttentionSpec, MLAAttentionSpec)
#: Descriptions of layers that kvcore does not serve, by the name of vLLM's class.
NAMES = {
    "MambaSpec": "layers with a recurrent state",
    "CrossAttentionSpec": "layers that attend to an encoder",
    "EncoderOnlyAttentionSpec": "layers of an encoder",
    "SinkFullAttentionSpec": "layers with sink tokens of their own",
    "HiddenStateCacheSpec": "layers that keep hidden states",
    "UniformTypeKVCacheSpecs": "layers of several sizes in one group",
    "CircularBufferSpec": "layers with a circular buffer",
}
#: The most groups with a window or chunk that kvcore takes.
MOST_WINDOWS = 7


def unserved_layers(specs: Sequence[Any]) -> str | None:
    """Return the first feature of a model's groups that kvcore cannot serve; None if it can."""
    for spec in specs:
        if type(spec) in (SlidingWindowSpec, SlidingWindowMLASpec):
            if spec.extra_retained_tokens or getattr(spec, "bounded_replay", False):
                return "windows that keep more than they read"
        elif type(spec) not in (*KEEP_ALL, ChunkedLocalAttentionSpec):
            return f"{NAMES.get(type(spec).__name__, 'other layers')} ({type(spec).__name__})"
    if len({spec.block_size for spec in specs}) > 1:
        return "groups of different block sizes"
    if sum(type(spec) not in KEEP_ALL for spec in specs) > MOST_WINDOWS:
        return f"more than {MOST_WINDOWS} groups with windows"
    return None


def params_of(specs: Sequence[Any], enable_caching: bool) -> KVCacheParams:
    """Return the parameters of a pool that has only page ids; its bundles are these groups."""
    groups = tuple(group_of(layer, spec) for layer, spec in enumerate(specs))
    is_plain = len(specs) == 1 and isinstance(groups[0], FullAttention)
    return KVCacheParams(
        "float16",
        1,
        1,
        len(specs),
        specs[0].block_size,
        enable_prefix_caching=enable_caching,
        groups=None if is_plain else groups,
    )


def group_of(layer: int, spec: Any) -> AttentionGroup:
    """Return the group of a layer with this specification."""
    if isinstance(spec, SlidingWindowSpec):
        return SlidingWindow([layer], spec.sliding_window)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return ChunkedLocal([layer], spec.attention_chunk_size)
    return FullAttention([layer])
