# SPDX-License-Identifier: Apache-2.0
"""Tokens into pools in nvfp4 and out of them, against numpy and ml_dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcore import KVCacheParams, PagedBatch, ops
from kvcore.support.dtypes import WIDE, numpy_dtype
from nvfp4_oracle import decoded
from nvfp4_pools import LENGTHS, NEW, PAGE, PAGES, Pools
from tables import table

OFFSETS = np.cumsum([0, *NEW]).astype(np.uint32)
KINDS: list[dict[str, Any]] = [
    {},
    {"layout": "HND"},
    {"is_strided": True, "global_scales": (0.5, np.array([3e-3], np.float32))},
    {"layout": "HND", "is_strided": True, "dims": (16, 112), "heads": 3},
    {"dims": (128, 80), "heads": 1, "global_scales": (np.float32(7), 1)},
]


def whole(array: Any) -> Any:
    """Return the memory that an array is cut out of, as bytes."""
    while array.base is not None:
        array = array.base
    return array.reshape(-1).view(np.uint8)


def same(pools: Pools, expected: dict[str, Any]) -> None:
    for name, array in pools.arrays.items():
        assert np.array_equal(array.view(np.uint8), expected[name].view(np.uint8)), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_append_writes_codes_and_scales_and_nothing_else(
    kind: dict[str, Any], dtype: str, threads: int
) -> None:
    pools = Pools(**kind)
    k, v = pools.tokens(6, dtype)
    expected = pools.expected(k, v, pools.places())
    before = {name: whole(array).copy() for name, array in pools.arrays.items()}
    ops.append(pools.batch(), 0, k, v, OFFSETS, threads=threads)
    same(pools, expected)
    for name, array in pools.arrays.items():  # the gaps between rows
        after = whole(array).copy()
        touched = int((after != before[name]).sum())
        assert touched <= expected[name].view(np.uint8).size
        if pools.is_strided:
            array[...] = 0
            cut = whole(array).copy()
            array[...] = 1
            is_room = cut == whole(array)
            assert np.array_equal(after[is_room], before[name][is_room])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", WIDE)
def test_scatter_and_gather_are_each_others_inverse_within_codes(
    kind: dict[str, Any], dtype: str
) -> None:
    pools = Pools(**kind)
    k, v = pools.tokens(10, dtype)
    new = [6, 0, 4]
    offsets = np.cumsum([0, *new]).astype(np.uint32)
    expected = pools.expected(k, v, pools.places([0, 0, 0], new))
    ops.scatter(pools.batch(), 0, k, v, offsets)
    same(pools, expected)
    places = tuple(np.array(pools.places([0, 0, 0], new)).T)
    given = pools.global_scales or (1.0, 1.0)
    for back in (None, *WIDE):
        found = ops.gather(pools.batch(), 0, lengths=np.array(new), dtype=back, threads=3)
        for i, name in enumerate(("key", "value")):
            codes, scales = (expected[f"{name}_{what}"][places] for what in ("pool", "scales"))
            scale = float(np.asarray(given[i]).reshape(-1)[0])
            values = decoded(codes, scales, back or "float32", scale)
            assert found[i].dtype == values.dtype
            assert np.array_equal(found[i], values, equal_nan=True)


def test_gather_writes_to_strided_room() -> None:
    pools = Pools()
    k, v = pools.tokens(6)
    ops.append(pools.batch(), 0, k, v, OFFSETS)
    plain = ops.gather(pools.batch(), 0)
    room = np.full((8, 2, 2, 48), 9, np.float32)
    ops.gather(pools.batch(), 0, out=(room[:, 0], room[:, 1]))
    assert np.array_equal(room[:, 0], plain[0], equal_nan=True)
    assert np.array_equal(room[:, 1], plain[1], equal_nan=True)


def test_parts_of_a_fused_qkv_are_read_where_they_lie() -> None:
    pools = Pools()
    k, v = pools.tokens(6, "bfloat16")
    fused = np.stack([k, k, v], axis=1)
    expected = pools.expected(k, v, pools.places())
    ops.append(pools.batch(), 0, fused[:, 1], fused[:, 2], OFFSETS)
    same(pools, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slot_dtype", [np.int64, np.int32])
@pytest.mark.parametrize("threads", [1, 4])
def test_slots_of_padding_and_beyond_the_pool_are_skipped(
    kind: dict[str, Any], slot_dtype: Any, threads: int
) -> None:
    pools = Pools(**kind)
    k, v = pools.tokens(9, "float16")
    slots = [4, -1, 20, 7, 21, 1000, 0]  # the last tokens are padding of a graph
    places: list[Any] = [divmod(s, PAGE) if 0 <= s < PAGES * PAGE else None for s in slots]
    expected = pools.expected(k, v, [*places, None, None])
    bad = ops.append_slots(pools.batch(), 0, k, v, np.array(slots, slot_dtype), threads=threads)
    assert bad == 2
    same(pools, expected)
    count = np.zeros(1, np.int32)
    assert ops.append_slots(pools.batch(), 0, k, v, np.array(slots), out=count) is count
    assert count[0] == 2


def test_slots_of_a_step_say_the_same_as_its_table() -> None:
    one, other = Pools(), Pools()
    k, v = one.tokens(6)
    ops.append(one.batch(), 0, k, v, OFFSETS)
    slots = ops.build_slots(other.batch(), OFFSETS)
    ops.append_slots(other.batch(), 0, k, v, slots)
    same(one, other.arrays)


def test_a_global_scale_that_changes_is_read_by_the_next_call() -> None:
    scale = np.array([1.0], np.float32)
    pools = Pools(global_scales=(scale, scale))
    batch = pools.batch()
    k, v = pools.tokens(6)
    scale[0] = 0.125
    expected = pools.expected(k, v, pools.places())
    ops.append(batch, 0, k, v, OFFSETS)
    same(pools, expected)
    scale[0] = np.nan
    with pytest.raises(ValueError, match=r"global_scales\[0\] is nan"):
        ops.append(batch, 0, k, v, OFFSETS)
    same(pools, expected)


def test_other_tables_keep_the_pools() -> None:
    pools = Pools(global_scales=(2.0, 3.0))
    k, v = pools.tokens(6)
    table, lengths = np.array([[1, 2]], np.uint32), np.array([0], np.uint32)
    other = pools.batch().with_tables(table, lengths)
    assert other.global_scales == (2.0, 3.0)
    expected = pools.expected(k, v, [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)])
    ops.append(other, 0, k, v, [0, 6])
    same(pools, expected)


# ---- refusals ------------------------------------------------------------------------------------


def made(**changed: Any) -> PagedBatch:
    pools = Pools()
    given: dict[str, Any] = {
        **pools.arrays,
        "lookup_table": np.array([[1, 2]], np.uint32),
        "cache_lengths": np.zeros(1, np.uint32),
    }
    return PagedBatch(**(given | changed))


E4M3 = numpy_dtype("float8_e4m3fn")
LATENT = np.zeros((7, 3, 24), np.uint8)


@table(
    ("changed", "error", "match"),
    [
        ({"key_pool": np.zeros((7, 3, 2, 24), np.int8)}, TypeError, "must be uint8"),
        ({"value_scales": None}, ValueError, "value_scales are None"),
        ({"value_pool": None}, ValueError, "value_pool or value_scales are None"),
        ({"value_scales": np.ones((7, 3, 2, 3), np.float32)}, TypeError, "as the other scales"),
        ({"key_scales": 0.5}, TypeError, "key_scales is a float"),
        ({"key_scales": np.ones((7, 3, 2, 2), E4M3)}, ValueError, "8 bytes of codes"),
        ({"key_scales": np.ones((7, 3, 1, 3), E4M3)}, ValueError, "all axes but the last"),
        ({"key_pool": np.zeros((7, 3, 2, 20), np.uint8)}, ValueError, "8 bytes of codes"),
        ({"layout": "MLA", "key_pool": LATENT}, ValueError, "must be 'NHD' or 'HND'"),
        ({"global_scales": 1.0}, TypeError, "global_scales is a float"),
        ({"global_scales": (1.0,)}, ValueError, "holds 1 items"),
        ({"global_scales": (1.0, 0.0)}, ValueError, r"global_scales\[1\] is 0.0"),
        ({"global_scales": (np.ones(2, np.float32), 1.0)}, ValueError, "one element"),
        ({"global_scales": (np.ones(1), 1.0)}, ValueError, "dtype float64"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    changed: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        made(**changed)


def test_global_scales_are_for_nvfp4() -> None:
    pool = np.zeros((7, 3, 2, 16), np.int8)
    step = np.array([[1, 2]], np.uint32), np.zeros(1, np.uint32)
    with pytest.raises(ValueError, match="global_scales are given without"):
        PagedBatch(pool, pool.copy(), *step, global_scales=(1.0, 1.0))


def test_params_have_no_nvfp4() -> None:
    params = KVCacheParams(dtype="int8", n_kv_heads=2, head_dim=48, num_layers=1, page_size=3)
    lists = {name: [array] for name, array in Pools().arrays.items()}
    with pytest.raises(ValueError, match="params are given with pools in nvfp4"):
        made(**lists, params=params)


ROWS = np.ones((2, 2, 48), np.float32)


@table(
    ("call", "error", "match"),
    [
        (lambda b: ops.append(b, 0, ROWS[..., :32], ROWS, [0, 2]), ValueError, "must be .2, 2, 48"),
        (lambda b: ops.append(b, 0, ROWS, ROWS, [0, 1]), ValueError, "must be .1, 2, 48"),
        (lambda b: ops.append(b, 0, ROWS, None, [0, 2]), TypeError, "v is"),
        (lambda b: ops.append(b, 0, ROWS, ROWS, [0, 2], scale=1.0), ValueError, "scale is given"),
        (
            lambda b: ops.append(b, 0, ROWS, ROWS.astype(np.uint8), [0, 2]),
            TypeError,
            "v has dtype uint8, must be float32",
        ),
        (lambda b: ops.append(b, 0, ROWS, ROWS.astype(float), [0, 2]), TypeError, "v has dtype"),
        (lambda b: ops.append(b, 1, ROWS, ROWS, [0, 2]), IndexError, "layer is 1"),
        (lambda b: ops.append_slots(b, 0, ROWS, ROWS, np.array([1, 1])), ValueError, "is named"),
        (lambda b: ops.append_slots(b, 0, ROWS, ROWS, np.arange(3)), ValueError, "at least 3"),
        (
            lambda b: ops.append_slots(b, 0, ROWS, ROWS.astype(np.float16), np.arange(2)),
            TypeError,
            "differ in dtype",
        ),
        (
            lambda b: ops.gather(b, 0, lengths=np.array([2]), dtype="int8"),
            ValueError,
            "dtype is 'int8'",
        ),
        (lambda b: ops.gather(b, 0, lengths=np.array([7])), IndexError, "has no page"),
        (
            lambda b: ops.gather(
                b, 0, lengths=np.array([2]), out=(ROWS[..., :24].copy(), ROWS.copy())
            ),
            ValueError,
            "must be .2, 2, 48",
        ),
    ],
)
def test_calls_that_do_not_fit_change_nothing(
    call: Any, error: type[Exception], match: str
) -> None:
    batch = made()
    before = [a.tobytes() for a in (batch.key_pool, batch.value_pool, batch.key_scales)]
    with pytest.raises(error, match=match):
        call(batch)
    assert before == [a.tobytes() for a in (batch.key_pool, batch.value_pool, batch.key_scales)]


def test_pools_that_are_read_only_or_share_memory_are_refused() -> None:
    frozen = Pools().arrays["key_pool"]
    frozen.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        ops.append(made(key_pool=frozen), 0, ROWS, ROWS, [0, 2])
    pools = Pools().arrays
    with pytest.raises(ValueError, match="a pool and another, a pool share memory"):
        ops.append(
            made(value_pool=pools["key_pool"], key_pool=pools["key_pool"]), 0, ROWS, ROWS, [0, 2]
        )
    with pytest.raises(
        ValueError, match="an array of scales and another, an array of scales share memory"
    ):
        ops.append(
            made(value_scales=pools["key_scales"], key_scales=pools["key_scales"]),
            0,
            ROWS,
            ROWS,
            [0, 2],
        )


def test_lengths_of_the_batch_are_the_default() -> None:
    pools = Pools()
    found = ops.gather(pools.batch(), 0)
    assert found[0].shape == (sum(LENGTHS), 2, 48)
