# SPDX-License-Identifier: Apache-2.0
"""transfer against numpy over whole caches, untouched bytes included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conftest
from kvcore import ops
from kvcore.ops import PoolLayout
from kvcore.support.dtypes import numpy_dtype
from layout_caches import DTYPES, FORMS, NAMES, Cache, random_bytes


@st.composite
def transfers(draw: st.DrawFn) -> Any:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(DTYPES))
    names = [draw(st.sampled_from(NAMES)) for _ in range(2)]
    dim = draw(st.sampled_from([1, 5, 59, 64, 80]))
    sizes = {
        "l": draw(st.integers(1, 4)),
        "t": draw(st.sampled_from([1, 3, 16, 24])),
        "h": draw(st.integers(1, 3)),
        "d": dim,
        "e": draw(st.sampled_from([dim, dim, 0, 7])),
    }
    if "vllm" in names:
        sizes["d"], sizes["e"] = draw(st.sampled_from([16, 64, 80])), sizes["e"] or 5
    caches = []
    for name in names:
        sizes["p"] = draw(st.integers(1, 6))
        caches.append(Cache(rng, name, draw(st.sampled_from(FORMS)), sizes, dtype))
    counts = [cache.pool.pages for cache in caches]
    n = min(counts)
    ids = [rng.permutation(count)[:n] for count in counts]
    if draw(st.booleans()):
        ids = [np.arange(n), np.arange(n)]
    for each in ids:
        each[rng.random(n) < 0.2] = -1 - rng.integers(3)
    layers: Any = None
    if draw(st.booleans()):
        first = draw(st.integers(0, sizes["l"] - 1))
        layers = draw(st.sampled_from([first, range(first, sizes["l"]), range(first, first)]))
    return caches, ids, layers, draw(st.integers(1, 3))


@given(transfers())
def test_pages_move_between_layouts(case: Any) -> None:
    (source, target), (from_ids, to_ids), layers, threads = case
    before = source.bytes()
    rows = [source.rows(kv) for kv in range(len(source.dims))]
    pool = target.pool
    assert (pool.layers, pool.page_size, pool.heads, pool.head_dim) == rows[0].shape[1:]
    assert pool.v_head_dim == (rows[1].shape[-1] if len(rows) == 2 else 0)
    start = [array.copy() for array in target.arrays]
    ops.transfer(source.pool, pool, from_ids, to_ids, layers=layers, threads=threads)
    moved = target.bytes()
    for array, old in zip(target.arrays, start, strict=True):
        array[...] = old
    chosen = range(pool.layers) if layers is None else np.atleast_1d(np.asarray(layers, int))
    for a, b in zip(from_ids, to_ids, strict=True):
        for layer in chosen if min(a, b) >= 0 else []:
            for kv, values in enumerate(rows):
                target.put(kv, b, layer, values[a, layer])
    assert moved == target.bytes()
    assert before == source.bytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_large_cache_goes_and_comes_back(name: str) -> None:
    """The copies are large enough to bypass the CPU caches, on one thread and on two."""
    rng = np.random.default_rng(3)
    sizes: dict[str, Any] = {"pages": 40, "layers": 2, "page_size": 16, "heads": 4, "head_dim": 256}
    source = PoolLayout(random_bytes(rng, (40, 2, 2, 16, 4, 256), "bfloat16"), "max")
    other, back = (PoolLayout.allocate(n, **sizes) for n in (name, "max"))
    order = rng.permutation(40)
    ops.transfer(source, other, np.arange(40), order)
    ops.transfer(other, back, order, np.arange(40), threads=2)
    assert back.arrays.tobytes() == source.arrays.tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("values", [None, 24])
def test_allocated_caches_have_the_sizes_asked_for(name: str, values: int | None) -> None:
    pool = PoolLayout.allocate(
        name, pages=5, layers=2, page_size=3, heads=4, head_dim=16, v_head_dim=values
    )
    sizes = (pool.pages, pool.layers, pool.page_size, pool.heads, pool.head_dim, pool.v_head_dim)
    assert sizes == (5, 2, 3, 4, 16, values or 16)
    arrays = pool.arrays if isinstance(pool.arrays, tuple) else (pool.arrays,)
    assert sum(a.nbytes for a in arrays) == 5 * 2 * 3 * 4 * (16 + (values or 16)) * 2
    assert all(a.dtype == numpy_dtype("bfloat16") and not a.view(np.uint16).any() for a in arrays)


def test_latent_rows_have_no_values() -> None:
    pool = PoolLayout.allocate(
        "max", pages=2, layers=1, page_size=4, heads=1, head_dim=576, v_head_dim=0
    )
    assert pool.arrays.shape == (2, 1, 4, 1, 576)
    assert pool.v_head_dim == 0
    with_kv = PoolLayout(pool.arrays[:, None], "max")
    pool.arrays[1] = 3
    target = PoolLayout(np.zeros((1, 2, 1, 4, 1, 576), pool.dtype), "page_first_direct")
    ops.transfer(with_kv, target, [1], [1])
    assert (target.arrays[0, 1].astype(float) == 3).all()
    assert not target.arrays[0, 0].any()


def test_any_strides_but_those_of_a_row() -> None:
    rng = np.random.default_rng(4)
    whole = random_bytes(rng, (8, 2, 2, 4, 3, 6), "float32")
    source = PoolLayout(whole[::-2, :, :, ::3, ::-1], "max")  # tokens 0 and 3
    target = PoolLayout.allocate(
        "layer_first_hnd", pages=4, layers=2, page_size=2, heads=3, head_dim=6, dtype="float32"
    )
    ops.transfer(source, target, [0, 1, 2, 3], [3, 2, 1, 0])
    taken = whole[1::2, :, :, ::3, ::-1].transpose(1, 2, 0, 4, 3, 5)
    assert target.arrays.tobytes() == np.ascontiguousarray(taken).tobytes()
    with pytest.raises(ValueError, match="the source is strided within a row"):
        ops.transfer(PoolLayout(whole[..., ::2], "max"), target, [0], [0])


def test_bits_may_be_called_unsigned_integers() -> None:
    sizes: dict[str, Any] = {"pages": 2, "layers": 1, "page_size": 2, "heads": 1, "head_dim": 2}
    source = PoolLayout.allocate("max", dtype="bfloat16", **sizes)
    target = PoolLayout(np.ones(source.arrays.shape, np.uint16), "max")
    ops.transfer(source, target, [0], [1])
    assert target.arrays[:, 0, 0, 0, 0, 0].tolist() == [1, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_are_moved_in_place(dtype: str) -> None:
    torch = conftest.require("torch")
    kind = getattr(torch, dtype)
    layers = [torch.arange(96).reshape(2, 4, 2, 2, 3).to(torch.float32).to(kind) for _ in range(2)]
    target = torch.zeros((2, 4, 2, 2, 2, 3), dtype=kind)
    ops.transfer(
        PoolLayout(layers, "layer_first_nhd"), PoolLayout(target, "page_first_direct"), [3], [1]
    )
    assert torch.equal(target[1, 1, 0].float(), layers[0][1, 3].float())
    assert torch.equal(target[0, 1, 1].float(), layers[1][0, 3].float())
    assert not target[:, [0, 2, 3]].float().any()
    ops.copy_partial(PoolLayout(target, "page_first_direct"), torch.tensor([[1, 2, 1]]))
    assert torch.equal(target[:, 2, :, 0].float(), target[:, 1, :, 0].float())
    assert not target[:, 2, :, 1].float().any()


def test_jax_arrays_are_sources() -> None:
    jax = conftest.require("jax")
    source = jax.numpy.arange(24, dtype=jax.numpy.float32).reshape(2, 2, 1, 3, 1, 2)
    pool = PoolLayout.allocate(
        "max", pages=1, layers=1, page_size=3, heads=1, head_dim=2, dtype="float32"
    )
    ops.transfer(PoolLayout(source, "max"), pool, [1], [0])
    assert np.array_equal(pool.arrays[0], np.asarray(source)[1])
    with pytest.raises(ValueError, match="the destination is read-only"):
        ops.transfer(pool, PoolLayout(source, "max"), [0], [0])


# -- refusals ------------------------------------------------------------------------------------
def pool_of(name: str = "max", **changed: Any) -> PoolLayout:
    sizes: dict[str, Any] = {"pages": 3, "layers": 2, "page_size": 4, "heads": 2, "head_dim": 8}
    pool = PoolLayout.allocate(name, **(sizes | {"dtype": "float32"} | changed))
    for part in pool.arrays if isinstance(pool.arrays, tuple) else (pool.arrays,):
        part[...] = 5
    return pool


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda p: ops.transfer(pool_of(), p, [3], [0]), IndexError, "page 3 is outside"),
        (lambda p: ops.transfer(pool_of(), p, [0, 0], [1, 3]), IndexError, "page 3 is outside"),
        (lambda p: ops.transfer(pool_of(), p, [0, 1], [1, 1]), ValueError, "page 1 twice"),
        (lambda p: ops.transfer(pool_of(), p, [0, 1], [1]), ValueError, "source_ids has 2"),
        (lambda p: ops.transfer(pool_of(), p, [[0]], [[1]]), ValueError, "source_ids has shape"),
        (lambda p: ops.transfer(pool_of(), p, [0.5], [1]), TypeError, "source_ids has dtype"),
        (lambda p: ops.transfer(pool_of(), p, [0], [1], layers=2), IndexError, "layers 2 .. 2"),
        (lambda p: ops.transfer(pool_of(), p, [0], [1], layers=-1), IndexError, "layers -1"),
        (
            lambda p: ops.transfer(pool_of(), p, [0], [1], layers=range(0, 4, 2)),
            ValueError,
            "step 1",
        ),
        (lambda p: ops.transfer(pool_of(layers=1), p, [0], [1]), ValueError, "source has 1 layers"),
        (lambda p: ops.transfer(pool_of(heads=1), p, [0], [1]), ValueError, "1 heads"),
        (lambda p: ops.transfer(pool_of(page_size=2), p, [0], [1]), ValueError, "of 2 tokens"),
        (lambda p: ops.transfer(pool_of(head_dim=4), p, [0], [1]), ValueError, "of 16 bytes"),
        (lambda p: ops.transfer(pool_of(v_head_dim=0), p, [0], [1]), ValueError, "neither must"),
        (lambda p: ops.transfer(pool_of(dtype="int8"), p, [0], [1]), TypeError, "dtype int8"),
        (lambda p: ops.transfer(p, p, [0], [1]), ValueError, "overlap in memory"),
        (lambda p: ops.transfer(p, PoolLayout(p.arrays[1:], "max"), [0], [1]), ValueError, "over"),
        (lambda p: ops.transfer(p.arrays, p, [0], [1]), TypeError, "source is a ndarray"),
        (lambda p: ops.transfer(pool_of(), p, [0], [1], threads=0), ValueError, "threads is 0"),
        (lambda p: ops.copy_partial(p, [(0, 3, 1)]), IndexError, "page 3"),
        (lambda p: ops.copy_partial(p, [(-1, 2, 1)]), IndexError, "page -1"),
        (lambda p: ops.copy_partial(p, [(0, 1, 5)]), ValueError, "5 tokens, a page holds 4"),
        (lambda p: ops.copy_partial(p, [(0, 1, -1)]), ValueError, "-1 tokens"),
        (lambda p: ops.copy_partial(p, [(0, 2, 1), (1, 1, 1)]), ValueError, "to itself"),
        (lambda p: ops.copy_partial(p, [(0, 1)]), ValueError, "three columns"),
        (lambda p: ops.copy_partial(p, [0, 1, 2]), ValueError, "copies has shape"),
        (lambda p: ops.copy_partial(p, [(0, 1, 1.5)]), TypeError, "copies has dtype"),
        (lambda p: ops.copy_partial(pool_of("vllm"), [(0, 1, 1)]), ValueError, "vllm"),
        (lambda p: ops.copy_partial(p, [(0, 1, 1)], threads=0), ValueError, "threads is 0"),
    ],
)
def test_refused_calls_change_nothing(
    call: Callable[[PoolLayout], object], error: type[Exception], match: str
) -> None:
    pool = pool_of()
    pool.arrays[0] = 6
    before = pool.arrays.copy()
    with pytest.raises(error, match=match):
        call(pool)
    assert np.array_equal(pool.arrays, before)


@pytest.mark.parametrize(
    ("arrays", "layout", "error", "match"),
    [
        (np.zeros((2, 2, 1, 4, 1, 8)), "nhd", ValueError, "layout is 'nhd', must be one of max"),
        (np.zeros((2, 2, 4, 8)), "max", ValueError, r"\(2, 2, 4, 8\), must be \[page, kv, layer"),
        (np.zeros((2, 3, 1, 4, 1, 8)), "max", ValueError, "1 or 2 along axis 1"),
        (7, "max", TypeError, "an array of the pool is a int"),
        ((np.zeros((2, 2, 1, 4, 1, 8)),) * 2, "max", ValueError, "a tuple of arrays is K and V"),
        (
            (np.zeros((2, 1, 4, 1, 8)), np.zeros((3, 1, 4, 1, 8))),
            "max",
            ValueError,
            "K and V differ",
        ),
        (
            (np.zeros((2, 1, 4, 1, 8)), np.zeros((2, 1, 4, 1, 8), np.int8)),
            "max",
            TypeError,
            "dtypes float64, int8",
        ),
        (
            [np.zeros((2, 4, 1, 8)), np.zeros((2, 5, 1, 8))],
            "max",
            ValueError,
            "the layers of a pool differ",
        ),
        ([], "max", ValueError, "one for each layer"),
        ([np.zeros((2, 4, 1, 8)), np.zeros((2, 2, 4, 1, 8))], "max", ValueError, "the same axes"),
        (np.zeros((2, 3)), "vllm", ValueError, "must be a tuple"),
        ((np.zeros((2, 3)), np.zeros((2, 3))), "vllm", ValueError, "K has shape"),
        (
            (np.zeros((1, 2, 1, 2, 4, 4), np.int8), np.zeros((1, 2, 1, 8, 4), np.int8)),
            "vllm",
            ValueError,
            "last axis of K has 4 bytes, must have 16",
        ),
    ],
)
def test_arrays_that_are_no_such_cache_are_refused(
    arrays: Any, layout: str, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        PoolLayout(arrays, layout)


def test_elements_that_no_cache_has_are_not_packed() -> None:
    packed = PoolLayout((np.zeros((1, 2, 1, 2, 4, 2)), np.zeros((1, 2, 1, 4, 4))), "vllm")
    plain = PoolLayout(np.zeros((2, 2, 1, 4, 1, 4)), "max")
    with pytest.raises(ValueError, match="units of 8 bytes"):
        ops.transfer(packed, plain, [0], [0])


def test_vllm_layout_needs_heads_of_whole_units() -> None:
    with pytest.raises(ValueError, match="head_dim is 12, must be a multiple of 8"):
        PoolLayout.allocate("vllm", pages=1, layers=1, page_size=1, heads=1, head_dim=12)
