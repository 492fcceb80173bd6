# SPDX-License-Identifier: Apache-2.0
"""A host tier returns all bytes of every kind of pool, with any number of devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builders import claimed, make_manager, with_host
from kvcore import ops


def fill(manager: Any, context: Any, seed: int) -> None:
    """Write random bytes into every page of a request, on all devices, scales included."""
    rng = np.random.default_rng(seed)
    pages = manager.get_req_blocks(context.request_id)
    for part in parts(manager, manager.get_replica(context)):
        shape = (len(pages), *part.shape[1:-1], part.shape[-1] * part.itemsize)
        part.view(np.uint8)[pages] = rng.integers(0, 255, shape, np.uint8)


def parts(manager: Any, replica: int) -> list[Any]:
    found = []
    for blocks, scales in manager._shards[replica]:
        for each in (blocks, scales):
            if each is not None:
                found += list(each) if isinstance(each, tuple) else [each]
    return found


def content(manager: Any, context: Any, pages: int) -> list[Any]:
    ids = list(manager.get_req_blocks(context.request_id))[:pages]
    return [p.view(np.uint8)[ids] for p in parts(manager, manager.get_replica(context))]


def strided(shape: tuple[int, ...]) -> Any:
    """Return a pool with gaps between rows, and heads outside of tokens: pages are no byte runs."""
    pages, kv, layers, size, heads, dim = shape
    memory = np.zeros((layers, kv, pages + 1, heads, size, dim + 3), np.float32)
    return memory[:, :, 1:, :, :, :dim].transpose(2, 1, 0, 4, 3, 5)


KINDS: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16", "head_dim": 59, "n_kv_heads": 3},
    {"dtype": "int8", "kv_scale_granularity": 4, "head_dim": 12, "n_kv_heads": 3},
    {"dtype": "float8_e4m3fn", "kv_scale_granularity": 8, "head_dim": 24, "v_head_dim": 16},
    {"is_mla": True, "head_dim": 7, "dtype": "float16"},
    {"is_mla": True, "head_dim": 8, "dtype": "float8_e5m2", "kv_scale_granularity": 8},
    {"v_head_dim": 5},
    {"v_head_dim": 80, "head_dim": 112, "num_layers": 1},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("page_size", [1, 3, 24])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_pages_come_back_with_all_their_bytes(
    kind: dict[str, Any], page_size: int, shape: tuple[int, int]
) -> None:
    replicas, shards = shape
    heads = kind.get("n_kv_heads", 1) * (1 if kind.get("is_mla") else shards)
    params = with_host(
        page_size, 9, **(kind | {"n_kv_heads": heads}), n_devices=replicas * shards,
        data_parallel_degree=replicas,
    )  # fmt: skip
    manager = make_manager(
        page_size, 4, replicas=replicas, shards=shards, params=params, blocks="allocate"
    )
    check_round_trip(manager, page_size, replicas - 1)


def check_round_trip(manager: Any, page_size: int, replica: int) -> None:
    tokens = list(range(3 * page_size + 1))
    context = claimed(manager, tokens, replica_idx=replica)
    assert manager.maybe_reserve(context)
    fill(manager, context, 1)
    expected = content(manager, context, 3)
    manager.fetch([context])
    context.update(0)
    manager.step([context])
    manager.release(context.request_id)
    other = claimed(manager, [t + 1000 for t in tokens], replica_idx=replica)
    manager.fetch([other])
    for part in parts(manager, replica):
        part.view(np.uint8)[...] = 0xFF  # NaNs where a load writes nothing
    other.update(0)
    manager.step([other])
    manager.release(other.request_id)
    again = claimed(manager, tokens, replica_idx=replica)
    assert manager.maybe_reserve(again)
    assert again.start_idx == 3 * page_size
    own = list(manager.get_req_blocks(again.request_id))
    for seen, wanted in zip(content(manager, again, 3), expected, strict=True):
        np.testing.assert_array_equal(seen, wanted)
    for part in parts(manager, replica):  # no other page was written
        rest = np.delete(part.view(np.uint8), own[:3], axis=0)
        assert (rest == 0xFF).all()
    manager.check_integrity()


@pytest.mark.parametrize("page_size", [1, 3, 48])
@pytest.mark.parametrize("make", [np.zeros, strided], ids=["dense", "strided"])
def test_pools_of_the_caller_have_a_tier_too(page_size: int, make: Any) -> None:
    pool = make((4, 2, 2, page_size, 1, 2))
    pool = pool if make is strided else pool.astype(np.float32)
    params = with_host(page_size, 9)
    manager = make_manager(page_size, 4, params=params, blocks=[pool])
    check_round_trip(manager, page_size, 0)


def test_rows_of_a_quantised_pool_come_back_with_their_scales() -> None:
    params = with_host(
        4, 16, dtype="int8", kv_scale_granularity=8, head_dim=16, num_layers=1, n_kv_heads=2
    )
    manager = make_manager(4, 4, params=params, blocks="allocate")
    rng = np.random.default_rng(0)
    k, v = rng.normal(0, 1, (2, 13, 2, 16)).astype(np.float32)

    def run(tokens: Any, keys: Any, values: Any) -> Any:
        context = claimed(manager, tokens)
        inputs = manager.fetch([context])[0]
        start, offsets = context.start_idx, np.array([0, context.active_length], np.uint32)
        ops.append(inputs, 0, keys[start:], values[start:], offsets)
        found = ops.gather(inputs, 0, lengths=np.array([context.active_idx], np.uint32))[:2]
        context.update(0)
        manager.step([context])
        manager.release(context.request_id)
        return start, found

    _, first = run(range(13), k, v)
    run(range(50, 63), 9 * k, 7 * v)
    start, again = run(range(13), k, v)
    assert start == 12
    for seen, wanted in zip(again, first, strict=True):
        np.testing.assert_array_equal(seen, wanted)
