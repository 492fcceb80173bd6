# SPDX-License-Identifier: Apache-2.0
"""KVCacheParams: rules and sizes, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import in_groups, make_manager, make_params
from kvcore import KVCacheParams
from kvcore.support.dtypes import NARROW, WIDE
from tables import table


def params(**rest: Any) -> KVCacheParams:
    base: dict[str, Any] = {"dtype": "bfloat16", "n_kv_heads": 8, "head_dim": 128, "num_layers": 32}
    return KVCacheParams(**(base | rest))


def test_defaults() -> None:
    made = params()
    assert made.page_size == 128
    assert not made.enable_prefix_caching
    assert not made.enable_kvcache_swapping_to_host
    assert made.host_kvcache_swap_space_gb is None
    assert (made.n_devices, made.data_parallel_degree, made.tensor_parallel_degree) == (1, 1, 1)
    assert not made.is_mla
    assert (made.kv_scale_granularity, made.v_head_dim) == (None, None)
    assert made.cache_strategy == "paged"


def test_params_are_frozen_and_comparable() -> None:
    made = params()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.page_size = 16  # type: ignore[misc]
    assert made == params()
    assert hash(made) == hash(params())
    assert dataclasses.replace(made, page_size=16).bytes_per_page == made.bytes_per_page // 8


@pytest.mark.parametrize(
    ("dtype", "itemsize"),
    [
        ("float32", 4),
        ("float16", 2),
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("float8_e5m2", 1),
        ("int8", 1),
    ],
)
def test_bytes_follow_the_dtype(dtype: str, itemsize: int) -> None:
    made = params(dtype=dtype)
    assert made.bytes_per_token == 2 * 32 * 8 * 128 * itemsize
    assert made.bytes_per_page == 128 * made.bytes_per_token


@pytest.mark.parametrize(
    ("rest", "per_token"),
    [
        ({}, 131_072),
        ({"n_devices": 4}, 131_072),  # 2 heads on each of 4 devices
        ({"n_devices": 4, "data_parallel_degree": 4}, 131_072),  # each replica has all heads
        ({"n_devices": 8, "data_parallel_degree": 2}, 131_072),
        ({"n_kv_heads": 1, "head_dim": 576, "is_mla": True}, 36_864),
        ({"n_kv_heads": 1, "head_dim": 576, "is_mla": True, "n_devices": 2}, 73_728),  # replicated
        ({"v_head_dim": 64}, 98_304),
        ({"v_head_dim": 192}, 163_840),
        ({"dtype": "int8", "kv_scale_granularity": 128}, 65_536 + 2_048),
        ({"dtype": "float8_e4m3fn", "kv_scale_granularity": 32}, 65_536 + 8_192),
        ({"dtype": "int8"}, 65_536),
        ({"n_kv_heads": 2, "head_dim": 3, "num_layers": 5}, 120),
    ],
)
def test_bytes_per_token(rest: dict[str, Any], per_token: int) -> None:
    made = params(**rest)
    assert made.bytes_per_token == per_token
    assert made.bytes_per_page == 128 * per_token
    assert params(**rest, page_size=7).bytes_per_page == 7 * per_token


@pytest.mark.parametrize(
    ("n_devices", "replicas", "shards", "heads"),
    [(1, 1, 1, 8), (2, 1, 2, 4), (2, 2, 1, 8), (8, 2, 4, 2), (8, 1, 8, 1), (6, 3, 2, 4)],
)
def test_data_and_tensor_parallelism_combine(
    n_devices: int, replicas: int, shards: int, heads: int
) -> None:
    made = params(n_devices=n_devices, data_parallel_degree=replicas)
    assert made.tensor_parallel_degree == shards
    assert made.n_kv_heads_per_device == heads
    assert made.kv_dim == 2


def test_latent_attention_has_one_head_on_every_device() -> None:
    made = params(n_kv_heads=1, head_dim=576, is_mla=True, n_devices=4)
    assert (made.n_kv_heads_per_device, made.kv_dim) == (1, 1)


@table(
    ("rest", "words"),
    [
        ({"page_size": 0}, ["page_size", "0"]),
        ({"page_size": -16}, ["page_size", "-16"]),
        ({"dtype": "float64"}, ["float64"]),
        ({"dtype": "int4"}, ["int4", "int8"]),
        ({"n_kv_heads": 8, "n_devices": 3}, ["8", "3"]),
        ({"n_kv_heads": 2, "n_devices": 4}, ["2", "4"]),
        ({"n_devices": 4, "data_parallel_degree": 3}, ["4", "3"]),
        ({"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 1}, ["prefix"]),
        ({"enable_kvcache_swapping_to_host": True, "enable_prefix_caching": True}, ["space"]),
        ({"kv_scale_granularity": 48, "dtype": "int8"}, ["48", "128"]),
        ({"n_kv_heads": 0}, ["n_kv_heads", "0"]),
        ({"head_dim": 0}, ["head_dim", "0"]),
        ({"num_layers": 0}, ["num_layers", "0"]),
        ({"n_devices": 0}, ["n_devices", "0"]),
        ({"data_parallel_degree": 0}, ["data_parallel_degree", "0"]),
        ({"v_head_dim": 0}, ["v_head_dim", "0"]),
    ],
)
def test_bad_values_are_refused_with_the_numbers(rest: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        params(**rest)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_swapping_with_caching_and_space_is_accepted() -> None:
    made = params(
        enable_prefix_caching=True,
        enable_kvcache_swapping_to_host=True,
        host_kvcache_swap_space_gb=0.5,
    )
    assert made.host_kvcache_swap_space_gb == 0.5


# -- one source of truth for page size and layers ------------------------------------------------
def test_page_size_of_the_manager_rederives_the_params() -> None:
    manager = kvcore.PagedKVCacheManager(
        make_params(128), 4, 64, devices=("cpu",), num_pages=2, page_size=4, blocks="allocate"
    )
    assert manager.params.page_size == 4
    assert manager.params.bytes_per_page == make_params(4).bytes_per_page
    assert manager.fetch([])[0].blocks.shape == (2, 2, 2, 4, 1, 2)


def test_num_layers_of_the_manager_rederives_the_params() -> None:
    manager = kvcore.PagedKVCacheManager(make_params(4), 4, 64, 7, num_pages=2)
    assert manager.params.num_layers == 7
    assert manager.fetch([])[0].blocks.shape == (2, 2, 7, 4, 1, 2)


@pytest.mark.parametrize(
    ("rest", "shapes"),
    [
        ({"is_mla": True}, [(3, 1, 2, 4, 1, 2)]),
        ({"shards": 2, "n_kv_heads": 6}, [(3, 2, 2, 4, 3, 2)] * 2),
        ({"replicas": 2, "shards": 2, "n_kv_heads": 2}, [(3, 2, 2, 4, 1, 2)] * 4),
    ],
)
def test_pool_shapes(rest: dict[str, Any], shapes: list[tuple[int, ...]]) -> None:
    split = {k: rest.pop(k) for k in ("replicas", "shards") if k in rest}
    manager = make_manager(4, 3, blocks="allocate", params=rest, **split)
    assert [entry.blocks.shape for entry in manager.fetch([])] == shapes
    sizes = sum(entry.blocks.nbytes for entry in manager.fetch([]))
    assert sizes == 3 * manager.params.bytes_per_page * manager.num_replicas


def test_values_narrower_than_keys_make_a_pair_of_pools() -> None:
    manager = make_manager(4, 3, blocks="allocate", params={"head_dim": 6, "v_head_dim": 4})
    keys, values = manager.fetch([])[0].blocks
    assert (keys.shape[0], keys.shape[-1]) == (3, 6)
    assert (values.shape[0], values.shape[-1]) == (3, 4)
    assert keys.nbytes + values.nbytes == 3 * manager.params.bytes_per_page


def test_scales_have_a_place_of_their_own() -> None:
    rest = {"dtype": "int8", "head_dim": 8, "kv_scale_granularity": 4}
    manager = make_manager(4, 3, blocks="allocate", params=rest)
    (entry,) = manager.fetch([])
    assert entry.kv_scales is not None
    assert entry.kv_scales.shape == (3, 2, 2, 4, 1, 2)
    assert entry.kv_scales.dtype == np.float32
    assert entry.blocks.nbytes + entry.kv_scales.nbytes == 3 * manager.params.bytes_per_page


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW])
def test_every_dtype_has_a_pool(dtype: str) -> None:
    (entry,) = make_manager(4, 3, blocks="allocate", params={"dtype": dtype}).fetch([])
    assert entry.blocks.dtype.name == dtype
    assert entry.kv_scales is None


# -- sizes ---------------------------------------------------------------------------------------
def test_estimated_memory_size() -> None:
    made = make_params(4, replicas=2)  # 2 * 2 * 1 * 2 * 4 = 32 B per token, 128 B per page
    estimate = kvcore.PagedKVCacheManager.estimated_memory_size
    devices = ("cpu", "cpu")
    assert made.bytes_per_page == 128
    # 3 requests of 3 pages on each of 2 replicas
    assert estimate(made, 5, 9, 2, 1 << 20, devices) == 2 * 3 * 3 * 128
    assert estimate(made, 5, 9, 2, 1001, devices) == 2 * 500


def test_estimated_memory_size_rederives_the_layers() -> None:
    made = make_params(4)
    estimate = kvcore.PagedKVCacheManager.estimated_memory_size
    assert estimate(made, 1, 4, 5, 1 << 20, ("cpu",)) == made.bytes_per_page * 5 // 2


@pytest.mark.parametrize(
    ("memory", "expected"),
    [(0, 0), (127, 0), (255, 0), (256, 4), (511, 4), (512, 8), (10_240, 160)],
)
def test_max_supported_sequence_length(memory: int, expected: int) -> None:
    made = make_params(4, replicas=2)
    longest = kvcore.PagedKVCacheManager.max_supported_sequence_length
    assert longest(made, 2, memory) == expected


@pytest.mark.parametrize(
    ("memory", "expected"), [(0, 0), (2 * 383, 0), (2 * 384, 2), (2 * 1151, 4), (2 * 1152, 6)]
)
def test_infer_optimal_batch_size(memory: int, expected: int) -> None:
    made = make_params(4, replicas=2)
    best = kvcore.PagedKVCacheManager.infer_optimal_batch_size
    assert best(made, 9, 2, memory, ("cpu", "cpu")) == expected


@pytest.mark.parametrize(("memory", "pages"), [(256, 1), (511, 1), (512, 2), (2570, 10)])
def test_pages_follow_available_memory(memory: int, pages: int) -> None:
    made = make_params(4, replicas=2)
    manager = kvcore.PagedKVCacheManager(
        made, 4, 64, devices=("cpu", "cpu"), available_cache_memory=memory
    )
    assert manager.total_num_pages == pages
    assert manager.num_free_blocks == 2 * pages


def test_memory_for_no_page_is_refused_with_the_bytes_of_one() -> None:
    with pytest.raises(
        kvcore.CapacityError,
        match=r"available_cache_memory is 127 bytes .* one page needs 128 bytes",
    ):
        kvcore.PagedKVCacheManager(make_params(4), 4, 64, available_cache_memory=127)


@pytest.mark.parametrize("both", [{}, {"available_cache_memory": 4096, "num_pages": 4}])
def test_exactly_one_size_is_given(both: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="num_pages"):
        kvcore.PagedKVCacheManager(make_params(4), 4, 64, **in_groups(both))


@pytest.mark.parametrize("memory", [4096.0, "4096", 2.5e9])
def test_memory_is_counted_in_whole_bytes(memory: Any) -> None:
    made = make_params(4)
    of = kvcore.PagedKVCacheManager
    for call in (
        lambda: of(made, 4, 64, available_cache_memory=memory),
        lambda: of.estimated_memory_size(made, 4, 64, 2, memory, ("cpu",)),
        lambda: of.max_supported_sequence_length(made, 2, memory),
        lambda: of.infer_optimal_batch_size(made, 64, 2, memory, ("cpu",)),
    ):
        with pytest.raises(TypeError, match=r"memory is a .* must be an int"):
            call()


def test_memory_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="memory is -1 bytes"):
        kvcore.PagedKVCacheManager.max_supported_sequence_length(make_params(4), 2, -1)


@pytest.mark.parametrize(("space", "pages"), [(1.0, 1 << 24), (1e-6, 16), (1e-7, 0)])
def test_host_pages_are_what_the_space_holds(space: float, pages: int) -> None:
    tier = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": space}
    manager = make_manager(4, 8, replicas=2, params=tier)
    assert manager.params.bytes_per_page == 128
    assert manager.total_num_host_pages == pages
    assert manager.host_committed_block_pct == 0.0
