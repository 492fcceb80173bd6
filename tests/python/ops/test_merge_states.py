# SPDX-License-Identifier: Apache-2.0
"""Two partial attention results merge into the attention over all their keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from attention_oracle import assert_close, assert_lse, merge
from attention_scenes import Scene
from kvcore import ops
from kvcore.support.dtypes import WIDE, numpy_dtype


def states(seed: int, shape: tuple[int, ...], dtype: str) -> list[Any]:
    rng = np.random.default_rng(seed)
    kind = numpy_dtype(dtype)
    values = [rng.normal(size=shape).astype(kind) for _ in range(2)]
    sums = [rng.normal(0, 10, shape[:-1]).astype(np.float32) for _ in range(2)]
    return [values[0], sums[0], values[1], sums[1]]


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from([1, 7, 64, 80, 129]),
    st.sampled_from(WIDE),
    st.integers(1, 3),
)
def test_agrees_with_the_oracle(
    seed: int, leading: list[int], dim: int, dtype: str, threads: int
) -> None:
    given_states = states(seed, (*leading, dim), dtype)
    before = [part.copy() for part in given_states]
    o, lse = ops.merge_states(*given_states, threads=threads)
    expected, sums = merge(*(part.astype(np.float64) for part in given_states))
    assert o.shape == (*leading, dim)
    assert lse.shape == tuple(leading)
    assert_close(o, expected, dtype)
    assert_lse(lse, sums)
    for part, old in zip(given_states, before, strict=True):
        assert part.tobytes() == old.tobytes()


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("empty", [-np.inf, np.inf])
def test_empty_states_do_not_count(dtype: str, empty: float) -> None:
    """NaN in an empty state has no effect."""
    o_a, lse_a, o_b, lse_b = states(3, (4, 2, 24), dtype)
    o_a[1:3], lse_a[1:3] = np.nan, empty
    o_b[2:], lse_b[2:] = np.nan, empty
    o, lse = ops.merge_states(o_a, lse_a, o_b, lse_b)
    both, sums = merge(*(part[:1].astype(np.float64) for part in (o_a, lse_a, o_b, lse_b)))
    assert_close(o[:1], both, dtype)
    assert_lse(lse[:1], sums)
    assert o[1].tobytes() == o_b[1].tobytes()
    assert lse[1].tobytes() == lse_b[1].tobytes()
    assert not o[2].astype(np.float32).any()
    assert (lse[2] == -np.inf).all()
    assert o[3].tobytes() == o_a[3].tobytes()
    assert lse[3].tobytes() == lse_a[3].tobytes()


def test_far_apart_sums() -> None:
    one, other = np.ones((2, 8), np.float32), np.full((2, 8), 5, np.float32)
    o, lse = ops.merge_states(
        one, np.array([1e4, -1e30], np.float32), other, np.array([-1e4, 1e30], np.float32)
    )
    assert o[:, 0].tolist() == [1, 5]
    assert lse.tolist() == [np.float32(1e4), np.float32(1e30)]


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("threads", [1, 3])
def test_merging_into_the_first(dtype: str, threads: int) -> None:
    given_states = states(4, (300, 8, 64), dtype)
    expected = ops.merge_states(*given_states)
    into = given_states[0], given_states[1]
    assert ops.merge_states(*given_states, out=into, threads=threads) is into
    assert into[0].tobytes() == expected[0].tobytes()
    assert into[1].tobytes() == expected[1].tobytes()


def test_result_goes_where_the_caller_says_and_strided_sources_are_read() -> None:
    o_a, lse_a, o_b, lse_b = states(5, (6, 4, 10), "float32")
    out = np.empty((3, 4, 8), np.float32), np.empty((3, 4), np.float32)
    ops.merge_states(o_a[::2, :, 1:9], lse_a[::2], o_b[::-2, :, 1:9], lse_b[::-2], out=out)
    expected, sums = merge(o_a[::2, :, 1:9], lse_a[::2], o_b[::-2, :, 1:9], lse_b[::-2])
    assert_close(out[0], expected, "float32")
    assert_lse(out[1], sums)


def test_parts_of_a_sequence_merge_into_the_whole() -> None:
    scene = Scene(cached=[100], new=[1], group=4, dim=64)
    pools = scene.batch.key_pool, scene.batch.value_pool
    expected, sums = scene.expected()
    parts = []
    for begin, length in ((0, 3 * 16), (3, 101 - 3 * 16)):
        lengths = np.array([length - 1], np.uint32)
        batch = kvcore.PagedBatch(*pools, scene.table[:, begin:], lengths)
        parts += ops.attention(batch, 0, scene.q, scene.offsets, return_lse=True)
    o, lse = ops.merge_states(*parts)
    assert_close(o, expected, "float32")
    assert_lse(lse, sums)


VALUES, LSE = np.ones((3, 2, 8), np.float32), np.zeros((3, 2), np.float32)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"o_b": VALUES[:2]}, ValueError, r"lse_b has shape \(3, 2\) for o_b of shape \(2, 2, 8\)"),
        ({"o_b": VALUES[..., :4]}, ValueError, r"o_b has shape \(3, 2, 4\), must be that of o_a"),
        (
            {"o_b": VALUES.astype(np.float16)},
            TypeError,
            "o_b has dtype float16, must be that of o_a",
        ),
        ({"o_a": VALUES.astype(np.int8)}, TypeError, "o_a has dtype int8"),
        ({"o_a": VALUES.astype(">f4")}, TypeError, "o_a has dtype >f4"),
        ({"lse_a": LSE.astype(float)}, TypeError, "lse_a has dtype float64, must be float32"),
        ({"lse_b": LSE[0]}, ValueError, "lse_b has shape"),
        ({"o_a": [1.0]}, TypeError, "o_a is a list"),
        ({"threads": 0}, ValueError, "threads is 0"),
        ({"out": (VALUES[:2], LSE)}, ValueError, r"out\[1\] has shape"),
        ({"out": (VALUES[:2], LSE[:2])}, ValueError, r"out\[0\] has shape .*, must be that of o_a"),
        ({"out": (VALUES.astype(np.float16), LSE)}, TypeError, r"out\[0\] has dtype float16"),
        ({"out": (np.ones((3, 8, 2), np.float32).transpose(0, 2, 1), LSE)}, ValueError, "C order"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments = {"o_a": VALUES, "lse_a": LSE, "o_b": VALUES.copy(), "lse_b": LSE.copy()} | change
    with pytest.raises(error, match=match):
        ops.merge_states(**arguments)
    assert (VALUES == 1).all()
    assert not LSE.any()


def test_sources_that_would_be_overwritten_are_refused() -> None:
    o_a, lse_a, o_b, lse_b = states(6, (4, 8), "float32")
    memory = np.zeros((5, 8), np.float32)
    fresh = np.zeros(4, np.float32)
    memory.flags.writeable = True
    for arguments, out in (
        ((o_a, lse_a, o_b, lse_b), (o_b, fresh)),
        ((o_a, lse_a, o_b, lse_b), (memory[:4], lse_b)),
        ((memory[1:], lse_a, o_b, lse_b), (memory[:4], fresh)),
        ((o_a, lse_a, o_b, lse_b), (memory[:4], memory.reshape(-1)[:4])),
    ):
        before = memory.copy(), o_b.copy(), lse_b.copy()
        with pytest.raises(ValueError, match="out overlaps its sources"):
            ops.merge_states(*arguments, out=out)
        for array, old in zip((memory, o_b, lse_b), before, strict=True):
            assert np.array_equal(array, old)
    locked = memory[:4].copy()
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        ops.merge_states(o_a, lse_a, o_b, lse_b, out=(locked, fresh))
