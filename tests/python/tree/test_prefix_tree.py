# SPDX-License-Identifier: Apache-2.0
"""PrefixTree as an engine's own cache uses it: handles of inserted pages, lookahead, listings."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore import PrefixTree

PAGE = 4


def common(a: list[int], b: list[int]) -> int:
    """Return the number of leading tokens that two sequences share."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def test_insert_tells_what_was_known_and_a_handle() -> None:
    tree = PrefixTree(2)
    ids, known, handle = tree.insert([1, 2, 3, 4], [7, 8], return_handle=True)
    assert (ids.tolist(), known, handle.num_pages) == ([7, 8], 0, 2)
    # The tree returns its own ids for pages that it has, and appends the new page.
    ids, known, handle = tree.insert([1, 2, 3, 4, 5, 6], [7, 8, 9], return_handle=True)
    assert (ids.tolist(), known, handle.num_pages) == ([7, 8, 9], 2, 3)
    ids, known, handle = tree.insert([1, 2, 3, 4, 5, 6], [10, 11, 12], return_handle=True)
    assert (ids.tolist(), known) == ([7, 8, 9], 3)
    tree.pin(handle)
    assert tree.evict(9).size == 0
    tree.unpin(handle)
    assert sorted(tree.evict(9).tolist()) == [7, 8, 9]
    with pytest.raises(kvcore.InvalidHandleError):
        tree.pin(handle)
    ids, known, handle = tree.insert([], [], "nobody", return_handle=True)
    assert (ids.size, known, handle.num_pages) == (0, 0, 0)
    tree.pin(handle)
    tree.unpin(handle)
    tree.check_integrity()


def test_lookahead_counts_what_a_page_shares() -> None:
    tree = PrefixTree(PAGE)
    tree.insert(list(range(8)), [0, 1])
    tree.insert([0, 1, 2, 3, 4, 5, 9, 9], [0, 2])
    prompt = [0, 1, 2, 3, 4, 5, 6, 8, 7]
    assert [tree.match(prompt, lookahead=n)[1].partial_tokens for n in (0, 1, 2, 3, 4, 2**40)] == [
        0,
        1,
        2,
        3,
        3,
        3,
    ]
    pages, handle = tree.match(prompt[:5], lookahead=3)
    assert (pages.tolist(), handle.partial_tokens) == ([0], 1)
    assert tree.match([5, 5], "other", lookahead=3)[1].partial_tokens == 0
    with pytest.raises(ValueError, match="lookahead"):
        tree.match(prompt, lookahead=-1)


def test_ids_go_where_they_are_wanted() -> None:
    tree = PrefixTree(1)
    tree.insert([1, 2, 3], [4, 5, 6])
    out = np.full(5, -1, np.int32)
    pages, handle = tree.match([1, 2, 3, 4], out=out)
    assert np.shares_memory(pages, out)
    assert (pages.tolist(), out.tolist(), handle.num_pages) == ([4, 5, 6], [4, 5, 6, -1, -1], 3)
    readonly = np.zeros(5, np.int32)
    readonly.flags.writeable = False
    bad: list[tuple[Any, type[Exception]]] = [
        (np.zeros(2, np.int32), ValueError),
        (np.zeros(5, np.int64), TypeError),
        (np.zeros((5, 1), np.int32), TypeError),
        (np.zeros(10, np.int32)[::2], ValueError),
        (np.zeros(5, ">i4"), ValueError),
        (readonly, ValueError),
        ([0] * 5, TypeError),
    ]
    before = tree.runs()
    for wrong, error in bad:
        with pytest.raises(error, match="out"):
            tree.match([1, 2, 3, 4], out=wrong, touch=True)
    assert len(tree.runs()) == len(before)


def test_runs_list_the_tree() -> None:
    tree = PrefixTree(2)
    assert tree.runs() == []
    tree.insert([1, 2, 3, 4], [7, 8])
    _, _, handle = tree.insert([1, 2, 5, 6], [7, 9], return_handle=True)
    tree.insert([1, 2], [10], "lora", "salt")
    tree.insert([1, 2], [11], None, "")
    tree.pin(handle)
    runs = tree.runs()
    assert sum(run.pages.size for run in runs) == tree.num_cached == 5
    assert len(runs) == tree.num_nodes
    by_page = {int(run.pages[0]): run for run in runs}
    assert by_page[7].parent is None
    assert runs[by_page[8].parent or 0] is by_page[7]
    assert (by_page[9].start, by_page[9].tokens.tolist()) == (1, [5, 6])
    assert [by_page[page].is_pinned for page in (7, 8, 9)] == [True, False, True]
    assert (by_page[10].extra_key, by_page[10].cache_salt) == ("lora", "salt")
    assert (by_page[11].extra_key, by_page[11].cache_salt) == (None, "")
    assert (by_page[7].extra_key, by_page[7].cache_salt) == (None, None)


def test_reset_forgets_all_but_what_is_pinned() -> None:
    tree = PrefixTree(1)
    _, _, handle = tree.insert([1, 2, 3], [4, 5, 6], return_handle=True)
    tree.insert([1], [7], "x")
    tree.pin(handle)
    with pytest.raises(kvcore.KVCacheError, match="3 pages are pinned"):
        tree.reset()
    assert tree.num_cached == 4
    tree.unpin(handle)
    assert sorted(tree.reset().tolist()) == [4, 5, 6, 7]
    assert (tree.num_cached, tree.runs()) == (0, [])
    assert tree.reset().size == 0
    tree.check_integrity()


@pytest.mark.parametrize("seed", range(10))
def test_it_agrees_with_a_list_of_prefixes(seed: int) -> None:
    """The oracle has no tree: it looks up each page by the tokens up to the page's end."""
    draw = random.Random(seed)
    tree = PrefixTree(PAGE)
    known: dict[tuple[int, ...], int] = {}
    fresh = iter(range(1_000_000))
    for _ in range(300):
        tokens = [draw.randrange(3) for _ in range(PAGE * draw.randrange(1, 6))]
        if draw.random() < 0.4:
            n = len(tokens) // PAGE
            had = next((i for i in range(n) if tuple(tokens[: (i + 1) * PAGE]) not in known), n)
            own = [known[tuple(tokens[: (i + 1) * PAGE])] for i in range(had)]
            given = (own if draw.random() < 0.5 else [next(fresh) for _ in own]) + [
                next(fresh) for _ in range(n - had)
            ]
            ids, before, handle = tree.insert(tokens, given, return_handle=True)
            assert (before, ids.tolist()) == (had, own + given[had:])
            assert handle.num_pages == n
            for i in range(n):
                known[tuple(tokens[: (i + 1) * PAGE])] = int(ids[i])
        elif draw.random() < 0.1:
            gone = {*tree.evict(draw.randrange(5)).tolist()}
            known = {prefix: page for prefix, page in known.items() if page not in gone}
        else:
            cut = tokens[: draw.randrange(1, len(tokens) + 1)]
            ahead = draw.randrange(6)
            pages, handle = tree.match(cut, lookahead=ahead)
            n = len(pages)
            assert [known.get(tuple(cut[: (i + 1) * PAGE])) for i in range(n)] == pages.tolist()
            assert tuple(cut[: (n + 1) * PAGE]) not in known or len(cut) < (n + 1) * PAGE
            others = [
                common(cut, list(prefix)) - n * PAGE
                for prefix in known
                if len(prefix) == (n + 1) * PAGE
            ]
            assert handle.partial_tokens == min(ahead, max([0, *others]))
        if draw.random() < 0.05:
            listed: dict[tuple[int, ...], int] = {}
            whole: list[list[int]] = []
            for run in tree.runs():
                front = [] if run.parent is None else whole[run.parent]
                assert len(front) == run.start * PAGE
                whole.append(front + run.tokens.tolist())
                for i, page in enumerate(run.pages.tolist()):
                    listed[tuple(whole[-1][: (run.start + i + 1) * PAGE])] = page
            assert listed == known
    tree.check_integrity()
