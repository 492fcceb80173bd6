# SPDX-License-Identifier: Apache-2.0
"""Requests that are written token by token, for tests that move them between managers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from builders import in_groups
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext, ops
from kvcore.ops.batch import layer_pools
from same_arrays import assert_same

PROMPT = [(7 * i + 3) % 11 for i in range(18)]


def moving_params(**options: Any) -> KVCacheParams:
    """Return parameters: two layers of two heads, four float32 wide, in pages of 4."""
    fields: dict[str, Any] = {"dtype": "float32", "n_kv_heads": 2, "head_dim": 4, "num_layers": 2}
    fields |= {"page_size": 4, "enable_prefix_caching": True}
    return KVCacheParams(**(fields | options))


def moving_manager(
    params: KVCacheParams | None = None, num_pages: int = 32, **options: Any
) -> PagedKVCacheManager:
    params = params or moving_params()
    fields: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 200, "num_pages": num_pages}
    fields |= {"devices": ["cpu"] * params.n_devices, "enable_runtime_checks": True}
    return PagedKVCacheManager(params, **in_groups(fields | options))


def content(layer: int, part: int, tokens: Any, heads: int, width: int) -> Any:
    """Return the values of tokens at their positions: small integers, exact in every dtype."""
    at = np.arange(len(tokens))
    row = (np.asarray(tokens) * 3 + at * 5 + layer * 7 + part * 2) % 13
    return (row[:, None, None] + np.arange(heads)[:, None] - np.arange(width) % 3).astype(
        np.float32
    )


def write_chunk(manager: PagedKVCacheManager, context: TextGenerationContext, token: int) -> None:
    """Fetch, write a model's K and V, and commit."""
    inputs = manager.fetch([context])
    params, begin = manager.params, context.start_idx
    tp = params.tensor_parallel_degree
    heads = 1 if params.is_mla else params.n_kv_heads
    first = manager.get_replica(context) * tp
    for shard, each in enumerate(inputs[first : first + tp]):
        own = (
            slice(None) if params.is_mla else slice(shard * heads // tp, (shard + 1) * heads // tp)
        )
        for layer in range(params.num_layers):
            rows = [
                content(layer, part, context.tokens, heads, width)[begin : context.active_idx, own]
                for part, width in enumerate(params.row_widths)
            ]
            is_narrow = params.kv_scale_granularity is not None
            dtype = layer_pools(each, layer).pools[0].dtype
            k, v = [*(r if is_narrow else r.astype(dtype) for r in rows), None][:2]
            ops.append(each, layer, k, v, each.row_offsets)
    context.update(token)
    manager.step([context])


def written_request(
    manager: PagedKVCacheManager, name: Any, tokens: Sequence[int], **options: Any
) -> TextGenerationContext:
    """Claim a request and write its prompt."""
    context = TextGenerationContext(name, tokens, **options)
    manager.claim(name, "auto")
    write_chunk(manager, context, 9)
    return context


def read_rows(manager: PagedKVCacheManager, context: TextGenerationContext) -> list[Any]:
    """Return the rows of a request: float32 per layer and part, with the heads of all devices.

    The manager has one group.
    """
    inputs = manager.fetch([context])
    tp = manager.params.tensor_parallel_degree
    first = manager.get_replica(context) * tp
    own = inputs[first : first + (1 if manager.params.is_mla else tp)]
    found = []
    for layer in range(manager.params.num_layers):
        gathered = [ops.gather(each, layer, dtype="float32")[:2] for each in own]
        found += [
            np.concatenate(parts, axis=1)
            for parts in zip(*gathered, strict=True)
            if parts[0] is not None
        ]
    return found


def expected_rows(manager: PagedKVCacheManager, context: TextGenerationContext) -> list[Any]:
    params = manager.params
    heads = 1 if params.is_mla else params.n_kv_heads
    return [
        content(layer, part, context.tokens, heads, width)[: context.start_idx]
        for layer in range(params.num_layers)
        for part, width in enumerate(params.row_widths)
    ]


def assert_reads(manager: PagedKVCacheManager, context: TextGenerationContext) -> None:
    """Check that the pages hold the values written for the request in any manager."""
    pairs = zip(read_rows(manager, context), expected_rows(manager, context), strict=True)
    for found, wanted in pairs:
        assert_same(found, wanted)


def exported(params: KVCacheParams | None = None, **options: Any) -> bytes:
    """Return the saved bytes of a request with the test's prompt."""
    manager = moving_manager(params)
    written_request(manager, "r", PROMPT, **options)
    return manager.export_sequence("r")
