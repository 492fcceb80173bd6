# SPDX-License-Identifier: Apache-2.0
"""BlockPool and PrefixTree: the parts for an engine with its own manager."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore import BlockPool, PrefixTree
from tables import table

# -- BlockPool -----------------------------------------------------------------------------------


def test_pool_hands_out_every_page_once() -> None:
    pool = BlockPool(10)
    assert (pool.num_blocks, pool.num_free) == (10, 10)
    first, second = pool.allocate(4), pool.allocate(6)
    assert first.dtype == np.int32
    assert sorted([*first, *second]) == list(range(10))
    assert pool.num_free == 0
    assert pool.allocate(0).shape == (0,)
    with pytest.raises(kvcore.InsufficientBlocksError, match=r"\b1\b.*\b0\b.*\b10\b"):
        pool.allocate(1)
    pool.free(first)
    assert sorted(pool.allocate(4)) == sorted(first)
    pool.check_integrity()


def test_shared_page_is_free_after_its_last_holder() -> None:
    pool = BlockPool(4)
    ids = pool.allocate(2)
    pool.share(ids[:1])
    pool.share([int(ids[0])])
    assert [pool.ref_count(int(i)) for i in ids] == [3, 1]
    pool.free(ids)
    assert pool.num_free == 3
    pool.free(ids[:1])
    pool.free(ids[:1])
    assert pool.num_free == 4
    assert pool.ref_count(int(ids[0])) == 0


@table("verb", ["free", "share"])
@table("bad", [[0, 5], [0, 0, 0, 5], [5, 0], [0, -1], [0, 8], [0, 2**31 - 1]])
def test_wrong_id_changes_nothing(verb: str, bad: list[int]) -> None:
    pool = BlockPool(8)
    ids = pool.allocate(3)
    assert sorted(ids) == [0, 1, 2]
    with pytest.raises(kvcore.InvalidHandleError):
        getattr(pool, verb)(bad)
    assert [pool.ref_count(i) for i in range(8)] == [1] * 3 + [0] * 5
    assert pool.num_free == 5
    pool.check_integrity()


def test_double_free_is_found_also_within_one_call() -> None:
    pool = BlockPool(8)
    (page,) = pool.allocate(1)
    with pytest.raises(kvcore.InvalidHandleError, match=str(page)):
        pool.free([page, page])
    assert pool.ref_count(page) == 1
    pool.free([page])
    with pytest.raises(kvcore.InvalidHandleError):
        pool.free([page])
    assert pool.num_free == 8


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31, 2**40])
def test_pool_of_an_impossible_size(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=str(num_blocks)):
        BlockPool(num_blocks)


def test_ids_of_a_wrong_type() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    wrong: list[Any] = [np.zeros(1, np.float32), ["0"], [1.5], None]
    for bad in wrong:
        with pytest.raises(TypeError):
            pool.free(bad)
    with pytest.raises(ValueError, match="2 dimensions"):
        pool.free(np.zeros((2, 2), np.int32))
    with pytest.raises(ValueError, match="n is -1, must be at least 0"):
        pool.allocate(-1)
    assert pool.num_free == 0


def test_pool_agrees_with_a_list_of_counts() -> None:
    draw, pool, counts = random.Random(3), BlockPool(12), [0] * 12
    for _ in range(5000):
        ids = [draw.randrange(12) for _ in range(draw.randint(1, 4))]
        verb = draw.choice(["allocate", "free", "share"])
        if verb == "allocate":
            if len(ids) <= counts.count(0):
                for page in pool.allocate(len(ids)):
                    assert counts[page] == 0
                    counts[page] = 1
            continue
        delta = 1 if verb == "share" else -1
        legal = all(counts[i] > (0 if delta == 1 else ids.count(i) - 1) for i in ids)
        if legal:
            getattr(pool, verb)(ids)
            for page in ids:
                counts[page] += delta
        else:
            with pytest.raises(kvcore.InvalidHandleError):
                getattr(pool, verb)(ids)
        assert [pool.ref_count(i) for i in range(12)] == counts
        assert pool.num_free == counts.count(0)
    pool.check_integrity()


# -- PrefixTree ----------------------------------------------------------------------------------
def pages_of(tree: PrefixTree, tokens: Any, **names: Any) -> list[int]:
    return list(tree.match(tokens, **names)[0].tolist())


def test_tree_keeps_the_first_page_of_equal_ones() -> None:
    tree = PrefixTree(2)
    assert tree.insert([1, 2, 3, 4], [7, 8]).tolist() == [7, 8]
    assert tree.insert([1, 2, 3, 5], [1, 9]).tolist() == [7, 9]
    assert tree.insert([], []).tolist() == []
    assert tree.num_cached == 3
    assert pages_of(tree, [1, 2, 3, 4, 5, 6]) == [7, 8]
    assert pages_of(tree, [1, 2, 3, 5]) == [7, 9]
    assert pages_of(tree, [1, 2, 3]) == [7]
    assert pages_of(tree, [1]) == pages_of(tree, []) == pages_of(tree, [2, 2]) == []
    tree.check_integrity()


def test_pinned_prefix_outlives_eviction() -> None:
    tree = PrefixTree(1)
    tree.insert([1, 2, 3], [0, 1, 2])
    tree.insert([1, 2, 4], [0, 1, 3])
    _, handle = tree.match([1, 2, 3, 9])
    assert handle.num_pages == 3
    tree.pin(handle)
    assert (tree.num_cached, tree.num_evictable) == (4, 1)
    assert tree.evict(10).tolist() == [3]
    tree.pin(handle)
    tree.unpin(handle)
    assert tree.evict(10).tolist() == []
    tree.unpin(handle)
    with pytest.raises(kvcore.InvalidHandleError):
        tree.unpin(handle)
    assert tree.evict(2).tolist() == [2, 1]
    assert pages_of(tree, [1, 2, 3]) == [0]
    tree.check_integrity()


def test_pin_inside_a_run_protects_its_head_only() -> None:
    tree = PrefixTree(1)
    tree.insert(list(range(8)), list(range(8)))
    _, handle = tree.match([0, 1, 2])
    tree.pin(handle)
    assert tree.num_evictable == 5
    assert sorted(tree.evict(100).tolist()) == [3, 4, 5, 6, 7]
    tree.insert([0, 1, 2, 3, 4], [0, 1, 2, 13, 14])
    assert pages_of(tree, [0, 1, 2, 3, 4]) == [0, 1, 2, 13, 14]
    tree.unpin(handle)
    tree.check_integrity()


def test_handle_of_evicted_pages_is_stale() -> None:
    tree = PrefixTree(1)
    tree.insert([1, 2, 3], [0, 1, 2])
    _, handle = tree.match([1, 2, 3])
    tree.evict(3)
    with pytest.raises(kvcore.InvalidHandleError):
        tree.pin(handle)
    tree.insert([1, 2, 3], [5, 6, 7])
    with pytest.raises(kvcore.InvalidHandleError):
        tree.pin(handle)
    assert tree.num_evictable == 3
    tree.check_integrity()


def test_handle_survives_splits_and_growth_of_its_run() -> None:
    tree = PrefixTree(1)
    tree.insert([1, 2, 3, 4], [0, 1, 2, 3])
    handles = [tree.match([1, 2, 3, 4][:n])[1] for n in range(5)]
    tree.insert([1, 2, 9], [0, 1, 4])
    tree.insert([1, 2, 3, 4, 5], [0, 1, 2, 3, 5])
    tree.insert([1, 8], [0, 6])
    for pages, handle in enumerate(handles):
        assert handle.num_pages == pages
        tree.pin(handle)
        assert tree.num_evictable == 7 - pages
        tree.check_integrity()
        tree.unpin(handle)


def test_handle_of_another_tree_is_refused() -> None:
    tree, other = PrefixTree(1), PrefixTree(1)
    tree.insert([1], [0])
    _, handle = tree.match([1])
    for call in (other.pin, other.unpin):
        with pytest.raises(kvcore.InvalidHandleError):
            call(handle)


def test_dropped_handle_lets_go_and_keeps_its_tree() -> None:
    tree = PrefixTree(1)
    tree.insert([1, 2], [0, 1])
    _, handle = tree.match([1, 2])
    tree.pin(handle)
    del handle
    assert tree.num_evictable == 2
    _, handle = tree.match([1, 2])
    tree.pin(handle)
    del tree
    assert handle.num_pages == 2
    del handle


def test_tree_namespaces_do_not_meet() -> None:
    tree = PrefixTree(1)
    names = [(None, None), ("", None), (None, ""), ("a", "b"), ("ab", "")]
    for page, (extra_key, cache_salt) in enumerate(names):
        tree.insert([1], [page], extra_key, cache_salt)
    for page, (extra_key, cache_salt) in enumerate(names):
        assert pages_of(tree, [1], extra_key=extra_key, cache_salt=cache_salt) == [page]
    assert pages_of(tree, [1], extra_key="b") == []
    assert sorted(tree.evict(9).tolist()) == [0, 1, 2, 3, 4]
    assert tree.num_nodes == 0
    tree.check_integrity()


def test_pages_must_be_whole() -> None:
    tree = PrefixTree(2)
    for tokens, pages in (([1], [0]), ([1, 2], [0, 1]), ([1, 2, 3], [0])):
        with pytest.raises(ValueError, match=str(len(tokens))):
            tree.insert(tokens, pages)
    with pytest.raises(ValueError, match="page_size is 0, must be 1"):
        PrefixTree(0)
    with pytest.raises(ValueError, match="n is -1, must be at least 0"):
        tree.evict(-1)
    assert tree.num_cached == 0


def test_tree_agrees_with_a_dictionary() -> None:
    """Insert, pin, unpin and evict against prefixes in a dict with the time of their last use."""
    draw, tree = random.Random(11), PrefixTree(2)
    cached: dict[tuple[int, ...], int] = {}
    pinned: list[tuple[Any, list[int]]] = []
    free = list(range(400))
    for _ in range(3000):
        tokens = [draw.randrange(2) for _ in range(2 * draw.randint(1, 6))]
        prefixes = [tuple(tokens[: n + 2]) for n in range(0, len(tokens), 2)]
        verb = draw.choice(["insert", "insert", "pin", "unpin", "evict"])
        if verb == "insert" and len(free) >= len(prefixes):
            mine = [free.pop() for _ in prefixes]
            kept = tree.insert(tokens, mine).tolist()
            for prefix, own, page in zip(prefixes, mine, kept, strict=True):
                assert cached.setdefault(prefix, own) == page
                if page != own:
                    free.append(own)
        elif verb == "pin" and len(pinned) < 6:
            _, handle = tree.match(tokens)
            tree.pin(handle)
            pinned.append((handle, tokens[: 2 * handle.num_pages]))
        elif verb == "unpin" and pinned:
            tree.unpin(pinned.pop(draw.randrange(len(pinned)))[0])
        elif verb == "evict":
            held = {tuple(t[: n + 2]) for _, t in pinned for n in range(0, len(t), 2)}
            for page in tree.evict(draw.randint(0, 5)).tolist():
                prefix = next(p for p, owned in cached.items() if owned == page)
                assert prefix not in held
                del cached[prefix]
                free.append(page)
            assert all(p[:-2] in cached for p in cached if len(p) > 2), "a page without its head"
        expected = [cached[p] for p in prefixes if p in cached]
        assert pages_of(tree, tokens) == expected
        assert tree.num_cached == len(cached)
    tree.check_integrity()
