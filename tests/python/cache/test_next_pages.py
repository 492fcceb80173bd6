# SPDX-License-Identifier: Apache-2.0
"""next_pages lists the pages in the order in which requests get them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from builders import claimed, make_manager, make_params, prefilled, put_in_cache
from grouped_traffic import manager_of, params_of
from kvcore import PagedKVCacheManager
from kvcore.groups import FullAttention, SlidingWindow


def taken(manager: Any, count: int, *, at_once: bool) -> list[int]:
    """Return the pages that requests without a prefix hit get."""
    sizes = [count] if at_once else [1] * count
    pages: list[int] = []
    for size in sizes:
        context = claimed(manager, [-5 - len(pages)] * (size * 4))
        assert manager.reserve(context)
        pages += manager.get_req_blocks(context.request_id)
    return pages


@pytest.mark.parametrize("at_once", [False, True])
def test_free_pages_come_before_cached_ones_and_ends_before_beginnings(*, at_once: bool) -> None:
    manager = make_manager(4, 10, first_page=1)
    put_in_cache(manager, range(21))  # pages 1 .. 5, and page 6 for the partial page
    put_in_cache(manager, range(100, 108))  # reuses page 6, and takes page 7
    assert manager.next_pages().tolist() == [8, 9, 10, 5, 4, 3, 2, 1, 7, 6]
    assert manager.next_pages().dtype == "int32"
    assert taken(manager, 10, at_once=at_once) == [8, 9, 10, 5, 4, 3, 2, 1, 7, 6]
    assert manager.next_pages().tolist() == []


def test_what_requests_and_holds_have_is_none_of_them() -> None:
    manager = make_manager(4, 10)
    prefilled(manager, range(9))
    put_in_cache(manager, range(100, 108))
    free = manager.next_pages().tolist()
    assert len(free) == manager.num_free_blocks == 7
    cached = manager.match_prefix([*range(100, 108)], return_pages=True)[1].tolist()
    with manager.hold(cached[:1]):
        assert manager.next_pages().tolist() == [page for page in free if page != cached[0]]
    assert manager.next_pages().tolist() == free


@pytest.mark.parametrize("seed", range(20))
def test_in_random_traffic_the_next_request_takes_the_first(seed: int) -> None:
    rng = random.Random(seed)
    manager = make_manager(4, 24, partial_page_reuse=False)
    running: list[Any] = []
    for _ in range(60):
        expected = manager.next_pages().tolist()
        assert len(expected) == manager.num_free_blocks
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
        context = claimed(manager, prompt)
        hit = manager.match_prefix(prompt[:-1], return_pages=True)[1].tolist()
        if not manager.reserve(context):
            manager.release(context.request_id)
            manager.release(running.pop(rng.randrange(len(running))).request_id)
            continue
        new = manager.get_req_blocks(context.request_id)[len(hit) :]
        assert new == [page for page in expected if page not in hit][: len(new)]
        context.update(0)
        manager.step([context])
        running.append(context)
        while running and rng.random() < 0.6:
            manager.release(running.pop(rng.randrange(len(running))).request_id)
    for context in running:
        manager.release(context.request_id)
    expected = manager.next_pages().tolist()
    assert taken(manager, 24, at_once=False) == expected


def test_each_replica_has_its_own() -> None:
    manager = make_manager(4, 4, replicas=2)
    put_in_cache(manager, range(4), replica_idx=1)
    assert manager.next_pages().tolist() == [0, 1, 2, 3]
    assert sorted(manager.next_pages(1).tolist()) == [0, 1, 2, 3]
    assert manager.next_pages(1).tolist() != [0, 1, 2, 3]
    with pytest.raises(IndexError, match=r"replica_idx is 2, must be 0 \.\. 1"):
        manager.next_pages(2)


def test_where_it_depends_on_who_asks_it_is_refused() -> None:
    windows = manager_of(params_of(FullAttention([0]), SlidingWindow([1], 4)), 40)
    shared = PagedKVCacheManager(
        make_params(), 8, 64, num_pages=8, blocks=None, quotas={"a": (4, None)}
    )
    for manager in (windows, shared):
        with pytest.raises(ValueError, match="groups of layers or quotas"):
            manager.next_pages()
