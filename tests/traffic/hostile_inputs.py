# SPDX-License-Identifier: Apache-2.0
"""Small valid inputs of the verbs on elements; each call makes new inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

import kvcore
from kvcore import functional, ops

SHAPE = (4, 2, 1, 8)  # pages, page_size, heads, dim


def array(*shape: int, dtype: Any = np.float32) -> Any:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def batch(dtype: Any = np.float32) -> kvcore.PagedBatch:
    table, lengths = np.array([[2, 0], [1, 3]], np.uint32), np.array([1, 2], np.uint32)
    return kvcore.PagedBatch(array(*SHAPE, dtype=dtype), array(*SHAPE, dtype=dtype), table, lengths)


def step() -> dict[str, Any]:
    return {"row_offsets": np.array([0, 2, 3], np.uint32), "threads": 1, "stream": None}


def params(**rest: Any) -> kvcore.KVCacheParams:
    return kvcore.KVCacheParams("float32", 1, 4, 2, page_size=4, **rest)


def cache() -> functional.PagedKVCache:
    lengths = np.array([2, 0], np.int32)
    table = np.array([[3, -1], [-1, -1]], np.int32)
    return functional.PagedKVCache(array(*SHAPE), array(*SHAPE), table, lengths)


def fetched() -> Any:
    manager = kvcore.PagedKVCacheManager(params(), 4, 64, num_pages=8)
    manager.claim("a")
    return manager, manager.fetch([kvcore.TextGenerationContext("a", [1, 2, 3])], 3)


def slots() -> Any:
    manager = kvcore.ContinuousBatchingKVCacheManager(params(), 4, 16, 2, ["cpu"])
    manager.claim(2)
    return manager


def view() -> Any:
    lengths, table = np.array([1], np.uint32), np.array([2], np.uint32)
    return {
        "blocks": array(4, 2, 2, 4, 1, 3),
        "cache_lengths": lengths,
        "lookup_table": table,
        "max_seq_length": 1,
        "max_cache_length": 2,
        "scales": None,
        "kv_params": None,
        "guard": None,
    }


def layer() -> Any:
    return kvcore.ContinuousBatchingKVCacheCollection(**view()).get_key_cache(0)


def layouts() -> dict[str, Any]:
    sizes = {"pages": 4, "layers": 2, "page_size": 2, "heads": 1, "head_dim": 8, "dtype": "int8"}
    source = ops.PoolLayout.allocate("page_first", **sizes)  # type: ignore[arg-type]
    return {"source": source, "destination": ops.PoolLayout.allocate("max", **sizes)}  # type: ignore[arg-type]


def attends() -> dict[str, Any]:
    rule = {"scale": 0.5, "causal": True, "window": 3, "chunk": 2, "soft_cap": 2.0}
    arguments = {"inputs": batch(), "layer": 0, "q": array(3, 2, 8), "out": array(3, 2, 8)}
    rest = {"sinks": array(2), "v_head_dim": 8, "return_lse": False, "threads": 1}
    return arguments | rule | rest | {"row_offsets": step()["row_offsets"]}


def config() -> dict[str, Any]:
    return {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "dtype": "float32",
    }
