# SPDX-License-Identifier: Apache-2.0
"""Pages of a PrefixTree with wrong contents leave it, and return when no handle pins them."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore import PrefixTree
from kvcore.policies import BY_NAME

PAGE = 2


class Oracle:
    """Paths of tokens with the ids of their last pages, and forgotten pages that are pinned."""

    def __init__(self) -> None:
        self.pages: dict[tuple[Any, ...], int] = {}
        self.gone: dict[tuple[Any, ...], tuple[int, int]] = {}  # path, when: id, pins
        self.pins: list[tuple[tuple[Any, ...], Any, set[tuple[Any, ...]]]] = []

    def match(self, name: str, tokens: list[int]) -> list[int]:
        found = []
        for end in range(PAGE, len(tokens) + 1, PAGE):
            page = self.pages.get((name, *tokens[:end]))
            if page is None:
                break
            found.append(page)
        return found

    def forget(self, asked: set[int]) -> set[tuple[Any, ...]]:
        bad = {path for path, page in self.pages.items() if page in asked}
        return {p for p in self.pages if any(p[: len(path)] == path for path in bad)}


def paths(name: str, tokens: list[int], n: int) -> list[tuple[Any, ...]]:
    return [(name, *tokens[: end * PAGE]) for end in range(1, n + 1)]


class Pair:
    """A tree and dicts that get the same random calls."""

    def __init__(self, seed: int, policy: str, wide: bool) -> None:
        self.rng = random.Random(f"{seed} {policy}")
        self.tree = PrefixTree(PAGE, policy, token_dtype=np.int64 if wide else np.int32)
        self.wide, self.oracle = wide, Oracle()
        # Ids are any int32, and each id has an owner: the user or the tree.
        self.mine = [self.rng.randrange(-(2**31), 2**31) for _ in range(40)]
        self.held: list[tuple[Any, str, list[int], list[int]]] = []
        self.left: list[int] = []  # forgotten, not given back yet

    def prompt(self) -> tuple[str, list[int]]:
        top = 2**40 if self.wide else 7
        tokens = [self.rng.choice((0, 1, top)) for _ in range(PAGE * self.rng.randrange(1, 6))]
        return self.rng.choice(("", "a")), tokens

    def insert(self) -> None:
        name, tokens = self.prompt()
        n = len(tokens) // PAGE
        if len(self.mine) < n:
            return
        given = [self.mine.pop() for _ in range(n)]
        pin = self.rng.random() < 0.4
        ids, known, handle = self.tree.insert(
            tokens, given, name or None, return_handle=True, pin=pin
        )
        expected = self.oracle.match(name, tokens)
        assert known == len(expected)
        assert ids.tolist() == expected + given[known:]
        self.mine += given[:known]
        self.oracle.pages.update(zip(paths(name, tokens, n), ids.tolist(), strict=True))
        if pin:
            self.held.append((handle, name, tokens, ids.tolist()))

    def pin(self) -> None:
        name, tokens = self.prompt()
        pages, handle = self.tree.match(tokens, name or None)
        assert pages.tolist() == self.oracle.match(name, tokens)
        if pages.size:
            self.tree.pin(handle)
            self.held.append((handle, name, tokens, pages.tolist()))

    def let_go(self) -> None:
        if not self.held:
            return
        handle, _, _, pages = self.held.pop(self.rng.randrange(len(self.held)))
        assert self.tree.pages_of(handle).tolist() == pages
        if self.rng.random() < 0.5:
            self.tree.unpin(handle)
        del handle

    def forget(self) -> None:
        known = [*self.oracle.pages.values()]
        asked = {self.rng.choice(known) for _ in range(self.rng.randrange(3))} if known else set()
        gone = self.oracle.forget(asked)
        assert self.tree.forget([*asked, 12345]) == len(gone)
        self.left += [self.oracle.pages.pop(path) for path in gone]

    def evict(self) -> None:
        protected = {page for *_, pages in self.held for page in pages}
        evicted = self.tree.evict(self.rng.randrange(3)).tolist()
        paths = {page: path for path, page in self.oracle.pages.items()}
        for page in evicted:
            assert page not in protected
            del self.oracle.pages[paths[page]]
        self.mine += evicted

    def go_on(self) -> None:
        """No page is inserted after a forgotten page; after any other page an insert works."""
        if not self.held or not self.mine:
            return
        handle, name, tokens, pages = self.rng.choice(self.held)
        path = (name, *tokens[: len(pages) * PAGE])
        if self.oracle.pages.get(path) == pages[-1]:
            more = [*tokens[: len(pages) * PAGE], 1, 0]
            ids = self.tree.insert([1, 0], self.mine[-1:], after=handle)
            if ids[0] == self.mine[-1]:
                self.oracle.pages[(name, *more)] = self.mine.pop()
            return
        with pytest.raises(kvcore.InvalidHandleError):
            self.tree.insert([1, 0], self.mine[-1:], after=handle)

    def step(self) -> None:
        verbs = (self.insert, self.insert, self.pin, self.let_go, self.forget, self.evict)
        self.rng.choice((*verbs, self.go_on))()
        self.tree.check_integrity()
        still = {page for *_, pages in self.held for page in pages}
        if self.rng.random() < 0.5:
            back = self.tree.take_forgotten().tolist()
            assert sorted(back) == sorted(set(self.left) - still)
            self.left = [page for page in self.left if page in still]
            self.mine += back
        pages = self.oracle.pages
        assert self.tree.num_cached == len(pages)
        assert self.tree.num_evictable == len({*pages.values()} - still)
        listed = [page for run in self.tree.runs() for page in run.pages.tolist()]
        assert sorted(listed) == sorted(pages.values())


@pytest.mark.parametrize("policy", BY_NAME)
@pytest.mark.parametrize("wide", [False, True])
def test_random_calls_agree_with_dicts(policy: str, wide: bool) -> None:
    for seed in range(15):
        pair = Pair(seed, policy, wide)
        for _ in range(120):
            pair.step()
        pair.held.clear()
        pair.left.clear()
        pair.mine += [*pair.tree.take_forgotten().tolist(), *pair.tree.reset().tolist()]
        assert len({*pair.mine}) == 40


def test_pages_leave_with_all_behind_them() -> None:
    tree = PrefixTree(2)
    tree.insert(list(range(8)), [10, 11, 12, 13])
    tree.insert([0, 1, 2, 3, 9, 9], [10, 11, 14])
    tree.insert([0, 1], [20], "other")
    assert tree.forget([11, 99]) == 4
    assert sorted(tree.take_forgotten().tolist()) == [11, 12, 13, 14]
    assert tree.take_forgotten().size == 0
    assert tree.match(list(range(8)))[0].tolist() == [10]
    assert tree.forget([]) == tree.forget([11]) == 0
    assert tree.forget(np.array([20, 10], np.int64)) == 2
    assert (tree.num_cached, tree.num_nodes) == (0, 0)
    tree.check_integrity()


def test_pinned_pages_stay_with_those_who_pinned_them() -> None:
    tree = PrefixTree(2)
    _, _, handle = tree.insert(list(range(6)), [0, 1, 2], return_handle=True, pin=True)
    assert tree.forget([1]) == 2
    assert tree.take_forgotten().size == 0
    assert tree.pages_of(handle).tolist() == [0, 1, 2]
    assert tree.pages_of(handle, 2).tolist() == [2]
    assert tree.insert(list(range(6)), [7, 8, 9]).tolist() == [0, 8, 9]  # pages 1, 2 are replaced
    tree.pin(handle)
    tree.unpin(handle)
    assert tree.take_forgotten().size == 0
    tree.unpin(handle)
    assert sorted(tree.take_forgotten().tolist()) == [1, 2]
    with pytest.raises(kvcore.InvalidHandleError):
        tree.pages_of(handle)
    assert tree.match(list(range(6)))[0].tolist() == [0, 8, 9]


def test_trees_of_pairs_forget() -> None:
    tree = PrefixTree(2, paired=True)
    tree.insert([1, 2, 3, 4, 5], [0, 1])
    tree.insert([2, 3, 4], [2])
    assert tree.forget([0]) == 2
    assert sorted(tree.take_forgotten().tolist()) == [0, 1]
    assert tree.match([2, 3, 4])[0].tolist() == [2]


@pytest.mark.parametrize(
    ("pages", "error"),
    [([2**31], ValueError), (["x"], TypeError), (3, TypeError), ([[1]], (TypeError, ValueError))],
)
def test_what_is_no_id_changes_nothing(pages: Any, error: Any) -> None:
    tree = PrefixTree(1)
    tree.insert([1], [0])
    with pytest.raises(error):
        tree.forget(pages)
    assert tree.num_cached == 1


def test_a_tree_that_dies_with_its_handles_is_freed() -> None:
    for _ in range(20):
        tree = PrefixTree(1)
        handle: Any = tree.insert([1, 2, 3], [0, 1, 2], return_handle=True, pin=True)[2]
        tree.forget([1])
        loop: list[Any] = [tree, handle]
        loop.append(loop)
        del tree, handle, loop
    gc.collect()
