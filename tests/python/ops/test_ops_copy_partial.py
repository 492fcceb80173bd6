# SPDX-License-Identifier: Apache-2.0
"""copy_partial against numpy over whole caches, untouched bytes included."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcore import ops
from layout_caches import DTYPES, FORMS, SHAPES, Cache


@st.composite
def partial_copies(draw: st.DrawFn) -> Any:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    name, form = draw(st.sampled_from(list(SHAPES))), draw(st.sampled_from(FORMS))
    dim, page = draw(st.sampled_from([1, 5, 59, 64])), draw(st.sampled_from([1, 3, 16, 24]))
    pages = draw(st.integers(2, 5))
    sizes = {"p": pages, "l": draw(st.integers(1, 3)), "t": page, "h": draw(st.integers(1, 3))}
    sizes |= {"d": dim, "e": draw(st.sampled_from([dim, 0, 7]))}
    cache = Cache(rng, name, form, sizes, draw(st.sampled_from(DTYPES)))
    copies = []
    for _ in range(draw(st.integers(0, 6))):
        source, target = rng.permutation(pages)[:2]
        copies.append((int(source), int(target), int(rng.integers(0, page + 1))))
    return cache, copies, draw(st.integers(1, 3))


@given(partial_copies())
def test_starts_of_pages_are_copied_in_order(case: Any) -> None:
    """A page may be both read and written, or written twice."""
    cache, copies, threads = case
    start = [array.copy() for array in cache.arrays]
    ops.copy_partial(cache.pool, copies, threads=threads)
    moved = cache.bytes()
    for array, old in zip(cache.arrays, start, strict=True):
        array[...] = old
    for source, target, tokens in copies:
        for kv in range(len(cache.dims)):
            for layer in range(cache.pool.layers):
                rows = cache.rows(kv)[target, layer].copy()
                rows[:tokens] = cache.rows(kv)[source, layer, :tokens]
                cache.put(kv, target, layer, rows)
    assert moved == cache.bytes()


def test_pools_of_a_manager_are_taken_as_they_are() -> None:
    keys, values = np.zeros((3, 1, 2, 4, 2, 5), np.int8), np.zeros((3, 1, 2, 4, 2, 3), np.int8)
    keys[0], values[0] = 1, 2
    ops.copy_partial((keys, values), np.array([[0, 2, 3]], np.int32))
    assert keys[2, 0, 1, :, 1, 4].tolist() == [1, 1, 1, 0]
    assert values[2, 0, 0, :, 0, 2].tolist() == [2, 2, 2, 0]
    assert not keys[1].any()
