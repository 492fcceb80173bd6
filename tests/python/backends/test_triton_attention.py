# SPDX-License-Identifier: Apache-2.0
"""The GPU's attention kernels, interpreted, against the oracle for all shapes of pool and batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from attention_oracle import assert_close, assert_lse
from attention_scenes import DTYPES, Scene, rules, scenes
from kvcore.support.dtypes import NARROW, WIDE, numpy_dtype
from same_arrays import same_bytes
from triton_interpreter import attend_on_host, require_interpreter

require_interpreter()

#: Absolute error of logarithms: K of 16-bit products is rounded where elements have own scales.
_ROUNDED = {"bfloat16": 2e-2, "float16": 2e-3, "float32": 1e-3}


def check(scene: Scene, splits: int = 1, **rule: Any) -> tuple[Any, Any]:
    """Attend and compare; table entries that no kernel reads hold no page."""
    expected, sums = scene.expected(**rule)
    scene.leave_behind(rule.get("window"), rule.get("chunk"))
    o, lse = attend_on_host(scene.batch, scene.q, scene.offsets, splits=splits, **rule)
    assert_close(o, expected, scene.q_dtype)
    if scene.scales == "tokens":
        np.testing.assert_allclose(lse, sums, atol=_ROUNDED[scene.q_dtype], rtol=1e-5)
    else:
        assert_lse(lse, sums)
    return o, lse


# ---- shapes --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("page", "dim", "group"),
    [(1, 59, 1), (3, 80, 5), (16, 64, 2), (24, 112, 3), (48, 96, 7), (256, 128, 16), (16, 256, 8)],
)
def test_pages_heads_and_groups_of_any_size(page: int, dim: int, group: int) -> None:
    scene = Scene(
        cached=[37, 0, page - 1, 4],
        new=[1, 0, 2, 5],
        page=page,
        dim=dim,
        group=group,
        heads=2 if dim < 100 else 1,
        v_dim=33 if dim == 96 else None,
        q_dtype="float16",
        dtype="float16",
        layout="HND" if page == 24 else "NHD",
    )
    check(scene, splits=2 if page < 16 else 1)


@pytest.mark.parametrize("q_dtype", WIDE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_queries_and_pools(q_dtype: str, dtype: str) -> None:
    kinds = {"int8": "number", "float8_e4m3fn": "none", "float8_e5m2": "heads"}
    scene = Scene(
        cached=[20, 3],
        new=[1, 6],
        page=3,
        heads=1,
        dtype=dtype,
        q_dtype=q_dtype,
        scales=kinds.get(dtype, "none"),
    )
    check(scene)


#: Each pair of values occurs once.
SQUARE = [(a, b, (a + b) % 3) for a in range(3) for b in range(3)]


@pytest.mark.parametrize(("narrow", "kind", "wide"), SQUARE)
@pytest.mark.parametrize("dim", [7, 16])  # one scale for a token and head, or two
def test_scales_of_every_kind(narrow: int, kind: int, wide: int, dim: int) -> None:
    scene = Scene(
        cached=[18],
        new=[2],
        heads=1,
        dtype=NARROW[narrow],
        scales=("number", "heads", "tokens")[kind],
        dim=dim,
        q_dtype=WIDE[wide],
        seed=dim,
    )
    check(scene)


def test_small_scales_do_not_make_weights_of_float16_vanish() -> None:
    """Each token has one scale, for values far below 1 / 127."""
    scene = Scene(cached=[60], new=[1], dtype="int8", scales="tokens", dim=7, q_dtype="float16")
    small = np.float32(1e-6)
    batch = scene.batch
    shrunk = kvcore.PagedBatch(
        batch.key_pool,
        batch.value_pool,
        scene.table,
        batch.cache_lengths,
        key_scales=batch.key_scales,
        value_scales=batch.value_scales * small,
    )
    o, _ = attend_on_host(shrunk, scene.q, scene.offsets)
    expected = scene.expected()[0] * small
    np.testing.assert_allclose(o.astype(float), expected, rtol=0.02, atol=1.2e-7)


def test_codes_of_fp8_that_stand_for_no_number() -> None:
    """NaN stays NaN, e5m2's infinity stays infinite; 448 and the smallest codes are numbers."""
    for name, codes in (("float8_e4m3fn", [0x7F, 0xFF, 0x7E, 1, 0x81]), ("float8_e5m2", [0x7F, 1])):
        kind = numpy_dtype(name)
        for code in codes:
            value = np.full(1, code, np.uint8).view(kind)
            pool = np.full((1, 1, 1, 16), value, kind)
            batch = kvcore.PagedBatch(
                np.zeros_like(pool), pool, np.zeros((1, 1), np.uint32), np.zeros(1, np.uint32)
            )
            q = np.zeros((1, 1, 16), np.float32)
            o, _ = attend_on_host(batch, q, np.array([0, 1], np.uint32))
            assert np.array_equal(o[0, 0, :1], value.astype(np.float32), equal_nan=True)


# ---- visible tokens ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rule",
    [
        {"causal": False},
        {"window": 1},
        {"window": 20},
        {"window": 5, "causal": False},
        {"chunk": 8},
        {"chunk": 24, "causal": False},
        {"chunk": 16, "window": 9},
        {"soft_cap": 0.5},
        {"soft_cap": 30.0, "scale": 0.3, "window": 10**9, "chunk": 10**9},
    ],
)
def test_rules(rule: dict[str, Any]) -> None:
    for splits in (1, 3):
        scene = Scene(cached=[40, 0, 15], new=[2, 12, 1], heads=1, page=3, seed=splits)
        check(scene, splits, **rule)


@pytest.mark.parametrize("splits", [1, 4])
def test_sinks(splits: int) -> None:
    scene = Scene(cached=[9], new=[2], heads=1, group=4)
    for dtype in WIDE:
        sinks = np.array([-2, 0, -np.inf, 5]).astype(numpy_dtype(dtype))
        check(scene, splits, sinks=sinks)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_token_that_sees_nothing_answers_zeros(splits: int) -> None:
    """The table has no page at all, not even the token's own page."""
    scene = Scene(cached=[20], new=[1], heads=1)
    scene.table[...] = 2**32 - 1
    for sinks, sums in ((None, -np.inf), (np.array([1.5, -np.inf], np.float32), [1.5, -np.inf])):
        o, lse = attend_on_host(scene.batch, scene.q, scene.offsets, splits=splits, sinks=sinks)
        assert not o.any()
        assert np.array_equal(lse[0], np.broadcast_to(sums, 2).astype(np.float32))


def test_entries_without_a_page_are_skipped() -> None:
    """The cases are a hole, and columns beyond the table."""
    scene = Scene(cached=[60], new=[1], heads=1)
    whole, rows = scene.table.copy(), [scene._rows(pool)[0] for pool in (scene.keys, scene.values)]
    scene.table[0, 1] = scene.num_pages
    for table, tokens in ((scene.table, [*range(16), *range(32, 61)]), (whole[:, :2], range(32))):
        batch = scene.batch.with_tables(table, scene.batch.cache_lengths)
        o, _ = attend_on_host(batch, scene.q, scene.offsets, causal=False)
        keys, values = (of[list(tokens)] for of in rows)
        scores = np.exp(scene.q[0].astype(float) @ keys[:, 0].T / 4)
        expected = scores / scores.sum(axis=1, keepdims=True) @ values[:, 0]
        assert_close(o[0], expected, "float32")


# ---- numbers -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", WIDE)
def test_large_scores_choose_their_value(dtype: str) -> None:
    scene = Scene(cached=[40], new=[3], dim=64, q_dtype=dtype, heads=1)
    q = (scene.q.astype(np.float32) * 1000).astype(numpy_dtype(dtype))
    expected, sums = scene.expected(q)
    assert np.abs(sums).max() > 1e3
    o, lse = attend_on_host(scene.batch, q, scene.offsets, splits=2)
    np.testing.assert_allclose(o.astype(np.float64), expected, atol=2e-2, rtol=1e-2)
    np.testing.assert_allclose(lse, sums, rtol=1e-5)


def test_scores_far_below_zero_and_far_apart() -> None:
    scene = Scene(cached=[70], new=[2], heads=1, group=1, dim=1, page=3)
    pool, at = scene.batch.key_pool, np.arange(72)
    pool[scene.table[0, at // 3], at % 3, 0, 0] = np.linspace(-3e4, -100, 72)
    q = np.ones((2, 1, 1), np.float32)
    for splits in (1, 5):
        o, lse = attend_on_host(scene.batch, q, scene.offsets, scale=1.0, splits=splits)
        last = scene.values[scene.table[0, at // 3], at % 3, 0, 0][-2:]
        np.testing.assert_allclose(o[:, 0, 0], last, rtol=1e-6)
        np.testing.assert_allclose(lse[:, 0], np.linspace(-3e4, -100, 72)[-2:], rtol=1e-6)


@pytest.mark.parametrize("dtype", WIDE)
def test_splits_agree_and_repeat_their_bytes(dtype: str) -> None:
    scene = Scene(cached=[130, 5], new=[1, 1], heads=1, dtype=dtype, q_dtype=dtype)
    largest = max(np.abs(rows).max() for rows in scene._rows(scene.values))
    one, _ = check(scene)
    for splits in (2, 7, 16):
        o, lse = check(scene, splits)
        off = np.abs(o.astype(np.float64) - one.astype(np.float64))
        if dtype == "float32":
            assert off.max() <= 1e-5 * largest
        else:
            eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
            ulp = np.maximum(np.exp2(np.floor(np.log2(np.abs(one.astype(float)) + 1e-30))) * eps, 0)
            # Near zero, the bound is 2 ulp of the operands whose difference is the result.
            assert (off <= 2 * np.maximum(ulp, eps / 8)).all()
    again = attend_on_host(scene.batch, scene.q, scene.offsets, splits=splits)
    assert same_bytes(again[0], o)
    assert same_bytes(again[1], lse)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("rule", [{}, {"window": 12}, {"chunk": 13}])
def test_nan_of_a_token_reaches_those_that_see_it_only(value: float, rule: Any) -> None:
    """The NaN's tile is also read for earlier tokens and for much later tokens."""
    scene = Scene(cached=[10], new=[30], group=2, heads=1, dim=64, q_dtype="bfloat16")
    expected, _ = scene.expected(**rule)
    scene.batch.value_pool[scene.table[0, 20 // 16], 20 % 16] = value
    o, lse = attend_on_host(scene.batch, scene.q, scene.offsets, **rule)
    at = np.arange(10, 40)
    sees = at >= 20
    if "window" in rule:
        sees &= at < 20 + 12
    if "chunk" in rule:
        sees &= at // 13 == 20 // 13
    assert_close(o[~sees], expected[~sees], "bfloat16")
    assert not np.isfinite(o[sees].astype(np.float32)).any()
    assert np.isfinite(lse).all()


# ---- memory --------------------------------------------------------------------------------------
def test_pages_beyond_two_to_the_33_bytes() -> None:
    """The pool is a sparse mapping: only written pages use memory."""
    pool = np.zeros((70_000, 16, 4, 512), np.float32)  # 9 GB of address space, pages of 128 KiB
    scene = Scene(cached=[33], new=[1], heads=4, dim=512, group=1, seed=3)
    table = np.array([[69_999, 3, 40_000]], np.uint32)
    pool[table[0]] = scene.batch.key_pool[scene.table[0, :3]]
    pool[table[0, 2], 2:] = np.nan
    batch = kvcore.PagedBatch(pool, pool, table, scene.batch.cache_lengths)
    scene.values = scene.keys
    o, _ = attend_on_host(batch, scene.q, scene.offsets)
    assert_close(o, scene.expected()[0], "float32")


def test_out_is_written_in_its_rows_and_nothing_beside_it() -> None:
    """Rows after the last row also stay unwritten: a graph has room for more tokens."""
    scene = Scene(cached=[5, 3], new=[2, 3])
    expected, _ = scene.expected()
    q = np.concatenate([scene.q, np.full((4, *scene.q.shape[1:]), np.nan, np.float32)])
    for splits in (1, 3):
        memory = np.full((9, 6, 32), 7, np.float32)
        scratch = np.full(1000 + 3 * 9 * 4 * 17, 7, np.float32)
        out = memory[:, 1:5, 3:19]
        found, _ = attend_on_host(
            scene.batch, q, scene.offsets, out=out, splits=splits, scratch=scratch
        )
        assert found is out
        assert_close(out[:5], expected, "float32")
        out[:5] = 7
        assert (memory == 7).all()
        assert (scratch[-1000:] == 7).all()


def test_tables_and_lengths_lie_anywhere() -> None:
    scene = Scene(cached=[50, 20, 7], new=[1, 2, 1], page=3)
    wide = np.full((6, scene.table.shape[1] + 5), 2**32 - 1, np.uint32)
    table = wide[::2, 3 : 3 + scene.table.shape[1]]
    table[...] = scene.table
    lengths = np.full(6, 2**31, np.uint32)
    lengths[::2] = scene.cached
    batch = scene.batch.with_tables(table, lengths[::2])
    o, _ = attend_on_host(batch, scene.q, scene.offsets)
    assert_close(o, scene.expected()[0], "float32")


def test_batches_of_nothing() -> None:
    for cached, new in (([], []), ([3], [0]), ([0, 4], [0, 0])):
        scene = Scene(cached=cached, new=new)
        o, lse = attend_on_host(scene.batch, scene.q, scene.offsets, splits=2)
        assert o.shape == (0, 4, 16)
        assert lse.shape == (0, 4)


# ---- random cases --------------------------------------------------------------------------------
@pytest.mark.slow
@given(scenes([1, 3, 16, 24, 48, 256]), rules(), st.booleans(), st.sampled_from([1, 1, 2, 3, 16]))
def test_agrees_with_the_oracle(scene: Scene, rule: Any, sinks: bool, splits: int) -> None:
    if sinks:
        rule["sinks"] = scene.rng.normal(size=scene.q_heads).astype(np.float32)
    before = scene.pool_bytes()
    check(scene, splits, **rule)
    assert scene.pool_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("group", [1, 2, 6, 16, 48, 128])
def test_groups_up_to_more_than_a_program_has(heads: int, group: int) -> None:
    # Interpreted kernels are slow: a large group fills several programs with few tokens.
    several = [9, 30] if group < 48 else [3, 5]
    for new in ([1, 1], several):
        check(Scene(cached=[30, 2], new=new, heads=heads, group=group, q_dtype="bfloat16"))
