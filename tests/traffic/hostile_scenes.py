# SPDX-License-Identifier: Apache-2.0
"""One call of every public verb on elements, with valid arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import kvcore
from hostile_groups import GROUP_SCENES
from hostile_inputs import (
    SHAPE,
    array,
    attends,
    batch,
    cache,
    config,
    fetched,
    layer,
    layouts,
    params,
    slots,
    step,
    view,
)
from kvcore import functional, ops
from kvcore.sizing import estimated_memory_size, infer_optimal_batch_size

Scene = tuple[Callable[..., object], dict[str, Any]]

TOKENS = {"k": array(3, 1, 8), "v": array(3, 1, 8)}

SCENES: dict[str, Callable[[], Scene]] = {
    "append": lambda: (
        ops.append,
        {"inputs": batch(), "layer": 0, "scale": None} | TOKENS | step(),
    ),
    "append scaled": lambda: (
        ops.append,
        {"inputs": batch(np.int8), "layer": 0, "scale": 0.5} | TOKENS | step(),
    ),
    "scatter": lambda: (
        ops.scatter,
        {"inputs": batch(), "layer": 0, "scale": None} | TOKENS | step(),
    ),
    "gather": lambda: (
        ops.gather,
        {
            "inputs": batch(),
            "layer": 0,
            "lengths": np.array([1, 2], np.uint32),
            "dtype": None,
            "out": (array(3, 1, 8), array(3, 1, 8)),
            "stream": None,
            "threads": 1,
        },
    ),
    "build_slots": lambda: (
        ops.build_slots,
        {
            "inputs": batch(),
            "row_offsets": step()["row_offsets"],
            "out": np.zeros(3, np.int64),
            "stream": None,
        },
    ),
    "append_slots": lambda: (
        ops.append_slots,
        {"inputs": batch(), "layer": 0, "slots": np.array([0, 1, -1]), "stream": None, "threads": 1}
        | TOKENS,
    ),
    "advance_lengths": lambda: (
        ops.advance_lengths,
        {
            "lengths": np.array([1, 2], np.uint32),
            "row_offsets": step()["row_offsets"],
            "active": np.array([True, False]),
            "out": np.zeros(2, np.uint32),
            "stream": None,
        },
    ),
    "compact_table": lambda: (
        ops.compact_table,
        {
            "lookup_table": np.array([[0, 1], [2, 3]], np.uint32),
            "cache_lengths": np.array([1, 2], np.uint32),
            "kept": np.array([1], np.uint32),
            "row_offsets": np.array([0, 1, 2], np.uint32),
            "stream": None,
            "threads": 1,
        },
    ),
    "attention": lambda: (ops.attention, attends()),
    "attention with logarithms": lambda: (
        ops.attention,
        attends() | {"return_lse": True, "out": (array(3, 2, 8), array(3, 2))},
    ),
    "cascade_attention": lambda: (
        ops.cascade_attention,
        attends() | {"shared": [kvcore.SharedPrefix((0,), 1, 0)], "replica": 0},
    ),
    "merge_states": lambda: (
        ops.merge_states,
        {
            "o_a": array(2, 4),
            "lse_a": array(2),
            "o_b": array(2, 4),
            "lse_b": array(2),
            "out": (array(2, 4), array(2)),
            "stream": None,
            "threads": 1,
        },
    ),
    "copy_pages": lambda: (
        ops.copy_pages,
        {"blocks": (array(*SHAPE), array(*SHAPE)), "pairs": [(0, 1)], "stream": None, "threads": 1},
    ),
    "fill_pages": lambda: (
        ops.fill_pages,
        {"blocks": array(*SHAPE), "ids": [0, 1], "byte": 3, "stream": None, "threads": 1},
    ),
    "zero_pages": lambda: (
        ops.zero_pages,
        {"blocks": (array(*SHAPE), array(*SHAPE)), "ids": [0, 1], "stream": None, "threads": 1},
    ),
    "checksum": lambda: (
        ops.checksum,
        {"blocks": array(*SHAPE), "ids": [0, 1], "stream": None, "threads": 1},
    ),
    "copy_partial": lambda: (
        ops.copy_partial,
        {"blocks": array(4, 2, 2, 2, 1, 3), "copies": [(0, 1, 1)], "stream": None, "threads": 1},
    ),
    "transfer": lambda: (
        ops.transfer,
        {
            "source_ids": [0],
            "destination_ids": [1],
            "layers": None,
            "max_blocks": 0,
            "stream": None,
            "threads": 1,
        }
        | layouts(),
    ),
    "quantize": lambda: (
        ops.quantize,
        {
            "x": array(2, 8),
            "dtype": "int8",
            "granularity": 8,
            "out": (np.zeros((2, 8), np.int8), array(2, 1)),
            "stream": None,
            "threads": 1,
        },
    ),
    "dequantize": lambda: (
        ops.dequantize,
        {
            "values": np.zeros((2, 8), np.int8),
            "scales": array(2, 1),
            "dtype": "float32",
            "out": array(2, 8),
            "stream": None,
            "threads": 1,
        },
    ),
    "PoolLayout": lambda: (
        ops.PoolLayout,
        {"arrays": array(4, 2, 2, 2, 1, 3), "layout": "max"},
    ),
    "PoolLayout.allocate": lambda: (
        ops.PoolLayout.allocate,
        {
            "layout": "max",
            "pages": 2,
            "layers": 1,
            "page_size": 2,
            "heads": 1,
            "head_dim": 2,
            "v_head_dim": None,
            "dtype": "int8",
            "device": "cpu",
        },
    ),
    "PagedBatch": lambda: (
        kvcore.PagedBatch,
        {
            "key_pool": array(*SHAPE, dtype=np.int8),
            "value_pool": array(*SHAPE, dtype=np.int8),
            "lookup_table": np.array([[1]], np.uint32),
            "cache_lengths": np.array([1], np.uint32),
            "layout": "NHD",
            "key_scales": 0.5,
            "value_scales": 0.5,
        },
    ),
    "init_paged_kv_cache": lambda: (
        functional.init_paged_kv_cache,
        {
            "num_blocks": 2,
            "block_size": 2,
            "num_kv_heads": 1,
            "head_dim": 2,
            "batch_size": 1,
            "max_blocks_per_seq": 2,
            "dtype": "float32",
        },
    ),
    "allocate_blocks": lambda: (
        functional.allocate_blocks,
        {
            "cache": cache(),
            "sequence_idx": 1,
            "num_new_tokens": 1,
            "free_block_ids": [1, 2],
            "donate": True,
        },
    ),
    "append_kv": lambda: (
        functional.append_kv,
        {
            "cache": cache(),
            "sequence_idx": 1,
            "keys_new": array(0, 1, 8),
            "values_new": array(0, 1, 8),
            "donate": True,
        },
    ),
    "gather_kv": lambda: (functional.gather_kv, {"cache": cache(), "sequence_idx": 0}),
    "ContinuousBatchingKVCacheCollection": lambda: (
        kvcore.ContinuousBatchingKVCacheCollection,
        view(),
    ),
    "PagedKVCacheCollection": lambda: (
        kvcore.PagedKVCacheCollection,
        {"inputs": fetched()[1][0], "kv_params": None, "guard": None},
    ),
    "FetchContinuousBatchingKVCacheCollection": lambda: (
        kvcore.FetchContinuousBatchingKVCacheCollection,
        {"kv_params": params()},
    ),
    "fetch of a collection": lambda: (
        kvcore.FetchContinuousBatchingKVCacheCollection(params()),
        dict(
            zip(
                ("blocks", "cache_lengths", "lookup_table", "is_cache_empty"),
                slots().fetch([0, 1])[0],
                strict=True,
            )
        )
        | {"new_tokens": [1, 2]},
    ),
    "get_key_cache": lambda: (
        kvcore.ContinuousBatchingKVCacheCollection(**view()).get_key_cache,
        {"layer_idx": 0},
    ),
    "load": lambda: (layer().load, {"bs": 0, "head": 0, "tok": 0, "dim": 0}),
    "store": lambda: (layer().store, {"bs": 0, "head": 0, "tok": 0, "dim": 0, "value": 1.0}),
    "cache_length": lambda: (layer().cache_length, {"batch_idx": 0}),
    "increment_cache_lengths": lambda: (
        fetched()[0].increment_cache_lengths,
        {
            "kv_cache_inputs": fetched()[1],
            "prev_model_inputs": np.array([0, 3], np.uint32),
        },
    ),
    "increment of slots": lambda: (
        slots().increment_cache_lengths,
        {
            "kv_cache_inputs": slots().fetch([0, 1]),
            "prev_model_inputs": np.array([0, 3, 4], np.uint32),
        },
    ),
    "KVCacheParams": lambda: (
        kvcore.KVCacheParams,
        {
            "dtype": "float32",
            "n_kv_heads": 1,
            "head_dim": 4,
            "num_layers": 2,
            "page_size": 4,
            "enable_prefix_caching": True,
            "enable_kvcache_swapping_to_host": True,
            "host_kvcache_swap_space_gb": 1.0,
            "n_devices": 1,
            "data_parallel_degree": 1,
            "is_mla": False,
            "kv_scale_granularity": None,
            "v_head_dim": None,
            "cache_strategy": "paged",
        },
    ),
    "from_hf_config": lambda: (
        kvcore.KVCacheParams.from_hf_config,
        {"config": config(), "dtype": "float32", "page_size": 4},
    ),
    "a config": lambda: (lambda **fields: kvcore.KVCacheParams.from_hf_config(fields), config()),
    "estimated_memory_size": lambda: (
        kvcore.PagedKVCacheManager.estimated_memory_size,
        {
            "params": params(),
            "max_batch_size": 4,
            "max_seq_len": 8,
            "num_layers": 2,
            "available_cache_memory": 10_000,
            "devices": ("cpu",),
        },
    ),
    "max_supported_sequence_length": lambda: (
        kvcore.PagedKVCacheManager.max_supported_sequence_length,
        {"params": params(), "num_layers": 2, "memory_available": 10_000},
    ),
    "infer_optimal_batch_size": lambda: (
        kvcore.PagedKVCacheManager.infer_optimal_batch_size,
        {
            "params": params(),
            "max_seq_len": 8,
            "num_layers": 2,
            "available_cache_memory": 10_000,
            "devices": ("cpu",),
        },
    ),
    "sizing": lambda: (
        estimated_memory_size,
        {"params": params(), "max_batch_size": 4, "max_seq_len": 8, "memory": 10_000},
    ),
    "sizing of batches": lambda: (
        infer_optimal_batch_size,
        {"params": params(), "max_seq_len": 8, "memory": 10_000},
    ),
    "ContinuousBatchingKVCacheManager": lambda: (
        kvcore.ContinuousBatchingKVCacheManager,
        {
            "params": params(),
            "max_cache_batch_size": 2,
            "max_seq_len": 4,
            "num_layers": 2,
            "devices": ["cpu"],
        },
    ),
    "memory of slots": lambda: (
        kvcore.ContinuousBatchingKVCacheManager.estimated_memory_size,
        {
            "params": params(),
            "max_cache_batch_size": 2,
            "max_seq_len": 4,
            "num_layers": 2,
            "devices": ["cpu"],
        },
    ),
    "block_shape": lambda: (slots().block_shape, {"n_sequences": 2}),
    "claim": lambda: (slots().claim, {"batch_size": 1}),
    "external_claim": lambda: (slots().external_claim, {"seq_ids": [2, 3]}),
    "contains": lambda: (slots().contains, {"seq_id": 0}),
    "release": lambda: (slots().release, {"seq_id": 0}),
    "fetch": lambda: (slots().fetch, {"seq_ids": [0, 1]}),
    "fetch_collection": lambda: (
        slots().fetch_collection,
        {"seq_ids": [0, 1], "new_tokens": [1, 2]},
    ),
    "step": lambda: (slots().step, {"valid_lengths": [1, 2], "seq_ids": [0, 1]}),
    "input_symbols": lambda: (slots().input_symbols, {"devices": ["cpu"], "num_layers": 2}),
    "a pool of the caller's": lambda: (
        lambda blocks: kvcore.PagedKVCacheManager(params(), 4, 64, num_pages=4, blocks=[blocks]),
        {"blocks": array(4, 2, 2, 4, 1, 4)},
    ),
    "a pair of the caller's": lambda: (
        lambda blocks: kvcore.PagedKVCacheManager(
            params(v_head_dim=2), 4, 64, num_pages=4, blocks=[blocks]
        ),
        {"blocks": (array(4, 1, 2, 4, 1, 4), array(4, 1, 2, 4, 1, 2))},
    ),
}

SCENES |= GROUP_SCENES
