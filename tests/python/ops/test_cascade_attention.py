# SPDX-License-Identifier: Apache-2.0
"""Cascade attention reads shared prefixes once, and has the results of flat attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from attention_oracle import assert_close, assert_lse
from attention_scenes import Scene
from kvcore import ops
from kvcore.support.dtypes import WIDE
from tables import table

# Rows, and the number of pages that they share, the longest last.
GROUPS: list[list[tuple[list[int], int]]] = [
    [],
    [([0, 1, 2, 3, 4], 3)],
    [([1, 3], 2)],
    [([0, 2], 1), ([1, 3, 4], 2)],
    [([0, 1, 2, 3, 4], 1), ([0, 2, 4], 2), ([2, 4], 3)],
    [([0, 1, 2], 1), ([3, 4], 1), ([0, 1], 2), ([3, 4], 3)],
]


@given(
    st.sampled_from(GROUPS[:-1]),
    st.sampled_from([1, 3, 16, 24]),
    st.lists(st.sampled_from([0, 1, 1, 4]), min_size=5, max_size=5),
    st.sampled_from([(1, 16), (2, 64), (5, 80)]),
    st.sampled_from([None, 1, 7, 40]),
    st.sampled_from([None, 1, 5, 32, 50]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_agrees_with_the_oracle(
    shared: Any,
    page: int,
    new: list[int],
    heads: Any,
    window: Any,
    chunk: Any,
    capped: bool,
    seed: int,
) -> None:
    scene = Scene(
        cached=[3 * page, 4 * page - 1, 3 * page + 2, 5 * page, 3 * page],
        new=new,
        page=page,
        group=heads[0],
        dim=heads[1],
        dtype="bfloat16",
        shared=shared,
        seed=seed,
    )
    rule: dict[str, Any] = {"window": window, "chunk": chunk}
    if capped:
        rule |= {"soft_cap": 3.0, "sinks": scene.rng.normal(size=scene.q_heads).astype(np.float32)}
    given_groups = scene.groups()
    o, lse = ops.cascade_attention(
        scene.batch, 0, scene.q, scene.offsets, given_groups, return_lse=True, **rule
    )
    expected, sums = scene.expected(**rule)
    assert_close(o, expected, "float32")
    assert_lse(lse, sums)
    scene.leave_behind(window, chunk)
    again = ops.cascade_attention(
        scene.batch, 0, scene.q, scene.offsets, given_groups[::-1], threads=3, **rule
    )
    assert again.tobytes() == o.tobytes()


def scene_of(index: int, **rest: Any) -> Scene:
    return Scene(cached=[50, 60, 50, 70, 50], new=[1, 1, 2, 1, 1], shared=GROUPS[index], **rest)


@pytest.mark.parametrize("index", range(len(GROUPS) - 1))
@pytest.mark.parametrize("q_dtype", WIDE)
def test_long_prefixes_and_threads(index: int, q_dtype: str) -> None:
    shared = [(rows, 30 * pages) for rows, pages in GROUPS[index]]
    scene = Scene(cached=[1500] * 5, new=[1] * 5, shared=shared, group=4, dim=64, q_dtype=q_dtype)
    o, lse = ops.cascade_attention(
        scene.batch, 0, scene.q, scene.offsets, scene.groups(), return_lse=True
    )
    assert_close(o, scene.expected()[0], q_dtype)
    for threads in (2, 5):
        again = ops.cascade_attention(
            scene.batch, 0, scene.q, scene.offsets, scene.groups(), return_lse=True, threads=threads
        )
        assert again[0].tobytes() == o.tobytes()
        assert again[1].tobytes() == lse.tobytes()


def test_shared_latent_rows() -> None:
    scene = scene_of(4, heads=1, group=16, dim=80)
    rows = scene.batch.key_pool[:, :, 0]
    batch = kvcore.PagedBatch(
        rows[..., :64], rows[..., 64:], scene.table, scene.batch.cache_lengths, "MLA"
    )
    scene.values = scene.keys
    o = ops.cascade_attention(batch, 0, scene.q, scene.offsets, scene.groups())
    assert_close(o, scene.expected(v_dim=64)[0], "float32")


def test_result_goes_where_the_caller_says() -> None:
    scene = scene_of(4)
    out = np.empty(scene.q.shape, np.float32)
    found = ops.cascade_attention(
        scene.batch, 0, scene.q, scene.offsets, scene.groups(), out=out, return_lse=True
    )
    assert found[0] is out
    assert_close(out, scene.expected()[0], "float32")


@pytest.mark.parametrize("rule", [{"window": 30}, {"chunk": 40}])
def test_rows_share_what_both_of_them_see(rule: dict[str, Any]) -> None:
    """The longer row lacks pages that the shorter row needs, or has other pages at their place."""
    scene = Scene(cached=[90, 50, 70], new=[1, 2, 0], shared=[([0, 1, 2], 3)])
    shared = [prefix([0, 1, 2], 48)]
    expected, _ = scene.expected(**rule)
    scene.table[0, :3] = 2**32 - 1
    scene.table[2] = 77_777  # runs no token in this step
    found = ops.cascade_attention(scene.batch, 0, scene.q, scene.offsets, shared, **rule)
    assert_close(found, expected, "float32")
    scene.table[0, 2], other = scene.table[0, 3], scene.table[1, 2]
    with pytest.raises(IndexError, match="position 0 of row 0 has no page"):
        ops.cascade_attention(scene.batch, 0, scene.q, scene.offsets, shared)
    with pytest.raises(ValueError, match=f"rows 1 and 0 hold pages {other} and .* in column 2"):
        ops.cascade_attention(scene.batch, 0, scene.q, scene.offsets, shared, window=50)


def prefix(rows: Any, num_tokens: int, replica: int = 0) -> kvcore.SharedPrefix:
    return kvcore.SharedPrefix(tuple(rows), num_tokens, replica)


@table(
    ("shared", "error", "match"),
    [
        ([prefix([0, 5], 8)], IndexError, r"shared\[0\].rows holds 5, .* below the 5 rows"),
        ([prefix([-1, 2], 8)], IndexError, r"shared\[0\].rows holds -1"),
        ([prefix([2, 0], 8)], IndexError, "must be ascending"),
        ([prefix([0, 0], 8)], IndexError, "must be ascending"),
        ([prefix([0, 2], 0)], ValueError, "num_tokens is 0, must be at least 1"),
        ([prefix([0, 2], 51)], ValueError, "num_tokens is 51, but row 0 has 50 cached"),
        ([prefix([0, 1], 16)], ValueError, "hold pages .* in column 0; call shared_prefixes after"),
        ([prefix([0, 2], 17)], ValueError, r"shared\[0\]: rows 0 and 2 hold pages .* in column 1"),
        ([prefix([1, 3, 4], 32), prefix([3, 4], 16)], ValueError, "have rows in common"),
        ([prefix([1, 3], 32), prefix([3, 4], 16)], ValueError, "have rows in common"),
        ([prefix([1, 3], 32), prefix([1, 3, 4], 32)], ValueError, "have rows in common"),
        ([((0, 2), 16)], TypeError, r"shared\[0\] is a tuple, must be a SharedPrefix"),
        ([SimpleNamespace(rows=(0, 1.5), num_tokens=1, replica=0)], TypeError, "is a float"),
        (None, TypeError, "not iterable"),
    ],
)
def test_wrong_groups_are_refused(shared: Any, error: type[Exception], match: str) -> None:
    scene = scene_of(3)
    out = np.full(scene.q.shape, 7, np.float32)
    with pytest.raises(error, match=match):
        ops.cascade_attention(scene.batch, 0, scene.q, scene.offsets, shared, out=out)
    assert (out == 7).all()
