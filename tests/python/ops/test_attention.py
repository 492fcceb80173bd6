# SPDX-License-Identifier: Apache-2.0
"""Attention over pages against the oracle, for every shape of pool and batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvcore
from attention_oracle import assert_close, assert_lse
from attention_scenes import DTYPES, Scene, rules, scenes
from kvcore import ops
from kvcore.support.dtypes import WIDE, numpy_dtype
from same_arrays import same_bytes

PAGES = (1, 3, 16, 24, 48)


@given(scenes(), rules(), st.booleans(), st.integers(2, 3))
def test_agrees_with_the_oracle(scene: Scene, rule: Any, sinks: bool, threads: int) -> None:
    if sinks:
        rule["sinks"] = scene.rng.normal(size=scene.q_heads).astype(np.float32)
    before = scene.pool_bytes()
    o, lse = ops.attention(scene.batch, 0, scene.q, scene.offsets, return_lse=True, **rule)
    expected, sums = scene.expected(**rule)
    assert_close(o, expected, scene.q_dtype)
    assert_lse(lse, sums)
    assert scene.pool_bytes() == before
    scene.leave_behind(rule.get("window"), rule.get("chunk"))
    alone = ops.attention(scene.batch, 0, scene.q, scene.offsets, threads=threads, **rule)
    assert same_bytes(alone, o)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_dtype", WIDE)
def test_long_rows_of_every_dtype(dtype: str, q_dtype: str) -> None:
    """The rows are long enough to be cut into parts for two threads."""
    scene = Scene(
        cached=[1300, 0, 640],
        new=[1, 70, 3],
        dim=64,
        group=4,
        dtype=dtype,
        q_dtype=q_dtype,
        scales="number" if dtype == "int8" else "none",
    )
    o, lse = ops.attention(scene.batch, 0, scene.q, scene.offsets, return_lse=True)
    expected, sums = scene.expected()
    assert_close(o, expected, q_dtype)
    assert_lse(lse, sums)
    for threads in (2, 3, 16):
        again = ops.attention(
            scene.batch, 0, scene.q, scene.offsets, return_lse=True, threads=threads
        )
        assert same_bytes(again[0], o)
        assert same_bytes(again[1], lse)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("float8_e5m2", "float16")])
@pytest.mark.parametrize("group", [1, 16])
def test_keys_and_values_of_different_dtypes(dtypes: tuple[str, str], group: int) -> None:
    scenes = [Scene(cached=[50], new=[3], dtype=dtype, group=group) for dtype in dtypes]
    scenes[0].values = scenes[1].values
    batch = over(scenes[0], scenes[0].batch.key_pool, scenes[1].batch.value_pool)
    assert np.array_equal(scenes[0].table, scenes[1].table)
    o = ops.attention(batch, 0, scenes[0].q, scenes[0].offsets)
    assert_close(o, scenes[0].expected()[0], "float32")


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("new", [1, 5])
def test_windows_and_lengths_around_the_ends_of_pages(page: int, new: int) -> None:
    for around in (-1, 0, 1):
        cached = [2 * page + around, page + around + 1, page]
        scene = Scene(cached=cached, new=[new] * 3, page=page, dtype="float16")
        for window in (1, max(1, page - 1), page, page + 1, 2 * page, 1000):
            o, lse = ops.attention(
                scene.batch, 0, scene.q, scene.offsets, window=window, return_lse=True
            )
            expected, sums = scene.expected(window=window)
            assert_close(o, expected, "float32")
            assert_lse(lse, sums)


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_that_begin_anywhere_in_a_step_and_in_a_page(page: int, dtype: str) -> None:
    """Steps of one or many tokens begin at the end, middle and start of a chunk."""
    for chunk in (1, 2, 5, 16, 30, 48, 1000):
        cached = [2 * chunk - 1, 2 * chunk, 2 * chunk + 1, chunk - 2] if chunk < 1000 else [37] * 4
        scene = Scene(
            cached=[max(0, n) for n in cached],
            new=[1, 1, 1, 37],
            page=page,
            group=3,
            dtype=dtype,
            scales="number" if dtype == "int8" else "none",
        )
        for window in (None, 7):
            rule: dict[str, Any] = {"chunk": chunk, "window": window}
            o, lse = ops.attention(scene.batch, 0, scene.q, scene.offsets, return_lse=True, **rule)
            expected, sums = scene.expected(**rule)
            assert_close(o, expected, "float32")
            assert_lse(lse, sums)


def test_the_first_token_of_a_chunk_answers_its_own_value() -> None:
    scene = Scene(cached=[32, 15], new=[1, 2], group=2)
    o = ops.attention(scene.batch, 0, scene.q, scene.offsets, chunk=16)
    own = np.stack([self[at] for self, at in zip(scene._rows(scene.values), [32, 16], strict=True)])
    np.testing.assert_allclose(o[[0, 2]], own.repeat(2, axis=1), rtol=1e-6)


def test_a_chunk_without_causality_is_seen_whole() -> None:
    scene = Scene(cached=[20], new=[30])
    o = ops.attention(scene.batch, 0, scene.q, scene.offsets, chunk=16, causal=False)
    assert_close(o, scene.expected(chunk=16, causal=False)[0], "float32")
    scene.leave_behind(chunk=16)
    poisoned = scene.batch.value_pool
    poisoned[scene.table[0, 48 // 16], :2] = np.nan
    again = ops.attention(scene.batch, 0, scene.q, scene.offsets, chunk=16, causal=False)
    assert same_bytes(again[:28], o[:28])
    assert np.isnan(again[28:]).all()


@pytest.mark.parametrize("rule", [{"window": 20}, {"chunk": 24}, {"window": 40, "chunk": 24}])
@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("group", [1, 20])
def test_what_nobody_sees_is_not_looked_up(rule: Any, page: int, group: int) -> None:
    scene = Scene(cached=[50, 30, 24, 100], new=[1, 9, 40, 0], page=page, group=group, dtype="int8")
    expected = ops.attention(scene.batch, 0, scene.q, scene.offsets, **rule)
    given = scene.table.copy()
    scene.leave_behind(**rule)
    assert (scene.table >= scene.num_pages).sum() > (given >= scene.num_pages).sum()
    for threads in (1, 3):
        found = ops.attention(scene.batch, 0, scene.q, scene.offsets, threads=threads, **rule)
        assert same_bytes(found, expected)
    behind = scene.table.copy()
    for row in range(3):
        (seen,) = np.nonzero(behind[row] == given[row])
        scene.table[...] = behind
        scene.table[row, seen[0]] = scene.num_pages
        out = np.full(scene.q.shape, 7, np.float32)
        with pytest.raises(IndexError, match=f"row {row} has no page: column {seen[0]} of"):
            ops.attention(scene.batch, 0, scene.q, scene.offsets, out=out, **rule)
        assert (out == 7).all()


def test_window_of_one_answers_the_own_value() -> None:
    scene = Scene(cached=[20, 3], new=[1, 4], group=3)
    o = ops.attention(scene.batch, 0, scene.q, scene.offsets, window=1)
    own = np.concatenate([r[c:] for r, c in zip(scene._rows(scene.values), [20, 3], strict=True)])
    np.testing.assert_allclose(o, own.repeat(3, axis=1), rtol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_chunks_answer_what_one_pass_does(threads: int) -> None:
    whole = Scene(cached=[0], new=[150], page=24, group=4, dim=80, dtype="bfloat16")
    expected, sums = whole.expected()
    o = ops.attention(whole.batch, 0, whole.q, whole.offsets, threads=threads)
    assert_close(o, expected, "float32")
    for begin, end in ((0, 1), (1, 24), (24, 49), (49, 150)):
        batch = kvcore.PagedBatch(
            whole.batch.key_pool, whole.batch.value_pool, whole.table, np.array([begin], np.uint32)
        )
        offsets = np.array([0, end - begin], np.uint32)
        part = ops.attention(batch, 0, whole.q[begin:end], offsets, return_lse=True)
        assert_close(part[0], expected[begin:end], "float32")
        assert_lse(part[1], sums[begin:end])


@pytest.mark.parametrize("dtype", WIDE)
def test_large_scores_choose_their_value(dtype: str) -> None:
    scene = Scene(cached=[40], new=[3], dim=64, q_dtype=dtype)
    q = (scene.q.astype(np.float32) * 1000).astype(numpy_dtype(dtype))
    o, lse = ops.attention(scene.batch, 0, q, scene.offsets, return_lse=True)
    expected, sums = scene.expected(q)
    np.testing.assert_allclose(o.astype(np.float64), expected, atol=2e-2, rtol=1e-2)
    np.testing.assert_allclose(lse, sums, rtol=1e-5)


def test_scores_far_below_zero_and_far_apart() -> None:
    scene = Scene(cached=[70], new=[2], heads=1, group=1, dim=1, page=3)
    scene.keys[...] = np.nan_to_num(scene.keys)
    pool = scene.batch.key_pool
    at = np.arange(72)
    pool[scene.table[0, at // 3], at % 3, 0, 0] = np.linspace(-3e4, -100, 72)
    q = np.ones((2, 1, 1), np.float32)
    o, lse = ops.attention(scene.batch, 0, q, scene.offsets, scale=1.0, return_lse=True)
    last = scene.values[scene.table[0, at // 3], at % 3, 0, 0][-2:]
    np.testing.assert_allclose(o[:, 0, 0], last, rtol=1e-6)
    np.testing.assert_allclose(lse[:, 0], np.linspace(-3e4, -100, 72)[-2:], rtol=1e-6)


@pytest.mark.parametrize("group", [1, 4, 16])
def test_nan_of_a_token_reaches_those_that_see_it_only(group: int) -> None:
    scene = Scene(cached=[30], new=[20], group=group, dim=64)
    for pool in (scene.batch.key_pool, scene.batch.value_pool):
        pool[scene.table[0, 40 // 16], 40 % 16] = np.nan
    o, lse = ops.attention(scene.batch, 0, scene.q, scene.offsets, return_lse=True)
    expected, _ = scene.expected()
    assert_close(o[:10], expected[:10], "float32")
    assert np.isnan(o[10:]).all()
    assert np.isfinite(lse[:10]).all()


def test_sinks_take_weight_and_nothing_else() -> None:
    scene = Scene(cached=[9], new=[2], heads=1, group=4)
    plain = ops.attention(scene.batch, 0, scene.q, scene.offsets, return_lse=True)
    none = ops.attention(
        scene.batch, 0, scene.q, scene.offsets, sinks=np.full(4, -np.inf, np.float32)
    )
    assert same_bytes(none, plain[0])
    for dtype in WIDE:
        sinks = np.array([-2, 0, 1, 5]).astype(numpy_dtype(dtype))
        o, lse = ops.attention(scene.batch, 0, scene.q, scene.offsets, sinks=sinks, return_lse=True)
        assert_lse(lse, np.logaddexp(plain[1].astype(float), [-2, 0, 1, 5]))
        assert_close(o, plain[0] * np.exp(plain[1] - lse)[..., None], "float32")


@pytest.mark.parametrize("threads", [1, 2])
def test_batches_of_nothing(threads: int) -> None:
    for cached, new in (([], []), ([5, 0], [0, 0]), ([0, 5, 3], [0, 1, 0])):
        scene = Scene(cached=cached, new=new)
        o, lse = ops.attention(
            scene.batch, 0, scene.q, scene.offsets, return_lse=True, threads=threads
        )
        assert o.shape == (sum(new), 4, 16)
        assert lse.shape == (sum(new), 4)
        assert_close(o, scene.expected()[0].reshape(o.shape), "float32")


def test_threads_of_python_attend_at_the_same_time() -> None:
    scenes = [Scene(cached=[400, 7], new=[1, 20], group=4, seed=seed) for seed in range(4)]
    alone = [ops.attention(scene.batch, 0, scene.q, scene.offsets) for scene in scenes]

    def attend(scene: Scene) -> Any:
        found = [ops.attention(scene.batch, 0, scene.q, scene.offsets, threads=2) for _ in range(5)]
        assert all(same_bytes(found[0], other) for other in found)
        return found[0]

    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(attend, scenes))
    assert all(map(same_bytes, alone, together))


# -- memory --------------------------------------------------------------------------------------
@given(scenes(), st.sampled_from(["heads", "tokens", "swapped", "reversed"]))
@example(Scene(cached=[3], new=[2], v_dim=5), "swapped")
def test_out_is_written_and_nothing_beside_it(scene: Scene, form: str) -> None:
    o = ops.attention(scene.batch, 0, scene.q, scene.offsets)
    tokens, heads, dim = o.shape
    memory = np.full((tokens + 2, heads + 2, dim + 3), 0x7C, np.uint8).astype(o.dtype)
    if form == "swapped":
        memory = np.full((heads + 2, tokens + 2, dim + 3), 7).astype(o.dtype).transpose(1, 0, 2)
    out = memory[1 : 1 + tokens, 1 : 1 + heads, 1 : 1 + dim]
    out = out[::-1] if form == "reversed" else out
    untouched = memory.copy()
    target = untouched[1 : 1 + tokens, 1 : 1 + heads, 1 : 1 + dim]
    target[...] = o[::-1] if form == "reversed" else o
    assert ops.attention(scene.batch, 0, scene.q, scene.offsets, out=out) is out
    assert same_bytes(memory, untouched)


@pytest.mark.parametrize("cascades", [False, True])
def test_logarithms_go_where_the_caller_says(cascades: bool) -> None:
    scene = Scene(cached=[40, 3], new=[1, 2], group=2)
    attend = partial(ops.cascade_attention, shared=[]) if cascades else ops.attention
    expected = attend(scene.batch, 0, scene.q, scene.offsets, return_lse=True)
    memory = np.full((len(scene.q) + 2, scene.q_heads), 7, np.float32)
    out, lse = np.empty_like(expected[0]), memory[1:-1]
    for pair in ((out, lse), [out, lse]):
        memory[...] = 7
        found = attend(scene.batch, 0, scene.q, scene.offsets, out=pair, return_lse=True)
        assert found[0] is out
        assert found[1] is lse
        assert same_bytes(out, expected[0])
        assert same_bytes(lse, expected[1])
        assert (memory[[0, -1]] == 7).all()
    alone = attend(scene.batch, 0, scene.q, scene.offsets, out=out, return_lse=True)
    assert alone[0] is out
    assert same_bytes(alone[1], expected[1])


def over(scene: Scene, k: Any, v: Any) -> kvcore.PagedBatch:
    """Return the scene's batch over other pools."""
    return kvcore.PagedBatch(k, v, scene.table, scene.batch.cache_lengths)


def unaligned(array: Any) -> Any:
    """Return a copy at an odd address."""
    memory = np.empty(array.nbytes + 1, np.uint8)[1:]
    view = memory.view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("group", [1, 8])
def test_odd_addresses_and_backward_strides(dtype: str, group: int) -> None:
    scene = Scene(cached=[33, 2], new=[1, 9], group=group, dtype=dtype, q_dtype=dtype, dim=59)
    expected = ops.attention(scene.batch, 0, scene.q, scene.offsets)
    pools = [unaligned(pool) for pool in (scene.batch.key_pool, scene.batch.value_pool)]
    batch = over(scene, *pools)
    out = unaligned(np.empty_like(expected))
    ops.attention(batch, 0, unaligned(scene.q), scene.offsets, out=out)
    assert same_bytes(out, expected)
    backward = [pool[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1] for pool in pools]
    batch = over(scene, *backward)
    q = scene.q[::-1, ::-1].copy()[::-1, ::-1]
    assert same_bytes(ops.attention(batch, 0, q, scene.offsets), expected)


def test_strided_tables_are_read_in_their_rows() -> None:
    scene = Scene(cached=[33, 2], new=[1, 9])
    wide = np.zeros((2, 50), np.uint32)
    table = wide[:, 3 : 3 + scene.table.shape[1]]
    table[...] = scene.table
    pools = scene.batch.key_pool, scene.batch.value_pool
    batch = kvcore.PagedBatch(*pools, table, scene.batch.cache_lengths)
    expected, _ = scene.expected()
    assert_close(ops.attention(batch, 0, scene.q, scene.offsets), expected, "float32")


def test_page_ids_beyond_two_to_the_32_bytes() -> None:
    """The pool is a sparse mapping: only written pages use memory."""
    pool = np.zeros((70_000, 16, 4, 512), np.float32)  # 9 GB of address space, pages of 128 KiB
    scene = Scene(cached=[35], new=[2], heads=4, dim=512, group=2, seed=3)
    table = np.array([[69_999, 3, 40_000]], np.uint32)
    pool[table[0]] = scene.batch.key_pool[scene.table[0, :3]]
    batch = kvcore.PagedBatch(pool, pool, table, scene.batch.cache_lengths)
    scene.values = scene.keys
    o = ops.attention(batch, 0, scene.q, scene.offsets, threads=2)
    assert_close(o, scene.expected()[0], "float32")
