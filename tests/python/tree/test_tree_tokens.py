# SPDX-License-Identifier: Apache-2.0
"""PrefixTree of 64-bit tokens and of pairs; inserts after a handle, pinned at once."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import kvcore
from conftest import require
from kvcore import PrefixTree

BIG = 2**40


def longest(known: list[list[Any]], wanted: list[Any], page: int) -> int:
    """Return the largest number of whole pages that a known sequence shares with `wanted`."""
    best = 0
    for each in known:
        n = 0
        while n < min(len(each), len(wanted)) and each[n] == wanted[n]:
            n += 1
        best = max(best, n // page)
    return best


def paired(tokens: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(tokens))


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_tree_of_any_tokens_finds_what_a_search_finds(dtype: type, pairs: bool) -> None:
    rng = random.Random(f"{dtype.__name__} {pairs}")
    page = 2
    tree = PrefixTree(page, token_dtype=dtype, paired=pairs)
    ids = [1, 2, 3] if dtype is np.int32 else [1, 2**32 + 1, -(2**63)]
    known: list[list[Any]] = []
    for step in range(400):
        tokens = [rng.choice(ids) for _ in range(rng.randrange(9))]
        units = paired(tokens) if pairs else tokens
        given: Any = np.array(tokens, dtype) if rng.random() < 0.5 else tokens
        pages, handle = tree.match(given, lookahead=page)
        assert len(pages) == handle.num_pages == longest(known, units, page)
        ahead = longest(known, units, 1) - handle.num_pages * page
        assert handle.partial_tokens == ahead
        if len(units) % page == 0 and rng.random() < 0.3:
            tree.insert(given, range_of(step, len(units) // page))
            known.append(units)
        tree.check_integrity()
    assert max(map(len, known)) > page


def range_of(step: int, n: int) -> list[int]:
    return list(range(100 * step, 100 * step + n))


def test_runs_of_pairs_begin_with_the_token_in_front() -> None:
    for dtype, big in ((np.int64, BIG), (np.int32, 9)):
        tree = PrefixTree(2, token_dtype=dtype, paired=True)
        tree.insert([big, 1, 2, 3, 4], [7, 8], "lora", "salt")
        tree.insert([big, 1, 2, 5, 6], [7, 9], "lora", "salt")
        tree.insert([8, 1, 2], [10])
        runs = {tuple(run.pages.tolist()): run for run in tree.runs()}
        assert {ids: run.tokens.tolist() for ids, run in runs.items()} == {
            (7,): [big, 1, 2],
            (8,): [2, 3, 4],
            (9,): [2, 5, 6],
            (10,): [8, 1, 2],
        }
        assert runs[7,].tokens.dtype == dtype
        names = {(run.extra_key, run.cache_salt) for run in runs.values()}
        assert names == {("lora", "salt"), (None, None)}
        # An extra key and the first token of another name differ, even if they look the same.
        assert tree.match([big, 1, 2], "lora")[1].num_pages == 0


def test_pages_behind_a_handle_cost_nothing_in_front() -> None:
    for pairs in (False, True):
        tree = PrefixTree(2, "lfu", paired=pairs)
        front = [0] if pairs else []
        _, _, first = tree.insert([*front, 1, 2, 3, 4], [1, 2], "x", return_handle=True, pin=True)
        more = [*front, 5, 6, 7, 8]  # the token before the pairs is not read
        _, known, end = tree.insert(more, [3, 4], return_handle=True, after=first, pin=True)
        assert (known, end.num_pages) == (0, 4)
        ids, known, again = tree.insert(more[:-2], [9], return_handle=True, after=first)
        assert (ids.tolist(), known, again.num_pages) == ([3], 1, 3)
        assert tree.match([*front, *range(1, 9)], "x")[0].tolist() == [1, 2, 3, 4]
        assert tree.pages_of(end).tolist() == [1, 2, 3, 4]
        assert tree.pages_of(end, 3).tolist() == [4]
        assert tree.pages_of(end, 4).tolist() == []
        tree.unpin(first)
        assert tree.evict(9).size == 0  # later pages keep it
        assert tree.pages_of(first).tolist() == [1, 2]
        tree.unpin(end)
        assert tree.num_evictable == 4
        assert sorted(tree.evict(9).tolist()) == [1, 2, 3, 4]
        with pytest.raises(kvcore.InvalidHandleError):
            tree.pages_of(end)
        with pytest.raises(kvcore.InvalidHandleError):
            tree.insert(more, [3, 4], after=first)
        assert (tree.num_cached, tree.num_nodes) == (0, 0)
        tree.check_integrity()


def test_a_pinned_handle_that_is_dropped_lets_go() -> None:
    tree = PrefixTree(1)
    tree.insert([1], [1], return_handle=True, pin=True)
    assert tree.num_evictable == 1
    held = tree.insert([1, 2], [1, 2], return_handle=True, pin=True)[2]
    assert tree.num_evictable == 0
    assert tree.pages_of(held).tolist() == [1, 2]
    del held
    assert tree.num_evictable == 2


def test_code_that_runs_while_pages_are_read_may_evict_what_they_come_behind() -> None:
    tree = PrefixTree(1)
    after = tree.insert([1, 2], [1, 2], return_handle=True)[2]

    class Page:
        def __index__(self) -> int:
            tree.evict(9)
            return 3

    pages: Any = [Page()]
    with pytest.raises(kvcore.InvalidHandleError):
        tree.insert([3], pages, after=after, return_handle=True, pin=True)
    assert tree.num_cached == 0
    with pytest.raises(kvcore.InvalidHandleError):
        tree.pages_of(after, pages[0])
    tree.check_integrity()


@pytest.mark.parametrize("pin", [False, True])
def test_memory_that_python_has_not_leaves_no_trace(pin: bool) -> None:
    memory = require("_testcapi")
    failures = 0
    for first in range(60):
        tree = PrefixTree(2, token_dtype=np.int64)
        after = tree.insert([1, 2, 3, 4], [1, 2], "x", return_handle=True, pin=True)[2]
        try:
            memory.set_nomemory(first, first + 1)  # only allocation `first` from now on fails
            try:
                tree.insert([5, 6], [3], after=after, return_handle=True, pin=pin)
            finally:
                memory.remove_mem_hooks()
        except MemoryError:
            failures += 1
            assert (tree.num_cached, tree.num_evictable) == (2, 0)
        tree.check_integrity()
    assert failures > 3


def test_what_a_tree_of_tokens_refuses() -> None:
    tree: Any = PrefixTree(2, token_dtype=np.int64, paired=True)
    handle = tree.insert([1, 2, 3], [5], return_handle=True)[2]
    empty = tree.match([7, 7, 7])[1]
    other = PrefixTree(2)
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "token_dtype is", lambda: PrefixTree(2, token_dtype=np.int16)),
        (ValueError, "page_size is", lambda: PrefixTree(2**30, token_dtype=np.int64)),
        (ValueError, "extra_keys need", lambda: tree.match([1], extra_keys=[])),
        (ValueError, "extra_keys need", lambda: tree.insert([1, 2, 3], [9], extra_keys=[])),
        (ValueError, "pass whole pages", lambda: tree.insert([1, 2], [9])),
        (ValueError, "pass whole pages", lambda: tree.insert([], [9])),
        (ValueError, "return_handle", lambda: tree.insert([1, 2, 3], [9], pin=True)),
        (ValueError, "sets the namespace", lambda: tree.insert([1, 2, 3], [9], "a", after=handle)),
        (ValueError, "0 pages", lambda: tree.insert([1, 2, 3], [9], after=empty)),
        (kvcore.InvalidHandleError, "another", lambda: other.insert([1, 2], [9], after=handle)),
        (kvcore.InvalidHandleError, "another", lambda: other.pages_of(handle)),
        (ValueError, "first is", lambda: tree.pages_of(handle, 2)),
        (ValueError, "first is", lambda: tree.pages_of(handle, -1)),
        (ValueError, "one dimension", lambda: tree.match(np.zeros((2, 2), np.int64))),
        (ValueError, "one dimension", lambda: tree.match([[1, 2], [3, 4]])),
        (TypeError, "fit in 64 bits", lambda: tree.match([2**64, 1, 2])),
        (TypeError, "fit in 64 bits", lambda: tree.match([0.5])),
        (TypeError, "must be a list", lambda: tree.match("abc")),
        (TypeError, "dtype", lambda: tree.match(np.zeros(3))),
    ]
    for error, text, call in cases:
        with pytest.raises(error, match=text):
            call()
    assert (tree.num_cached, tree.num_evictable, other.num_cached) == (1, 1, 0)
    tree.check_integrity()
    other.check_integrity()
