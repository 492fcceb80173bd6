# SPDX-License-Identifier: Apache-2.0
"""Requests that compute the same prompt at the same time, with and without deduplication."""

from __future__ import annotations

from typing import Any

import pytest

import kvcore
from builders import claimed, make_manager

PROMPT = list(range(12))


def twins(**rest: Any) -> tuple[kvcore.PagedKVCacheManager, list[Any]]:
    """Return a manager and two requests that compute the same prompt at the same time."""
    manager = make_manager(4, 16, **rest)
    batch = [claimed(manager, PROMPT) for _ in range(2)]
    manager.fetch(batch)
    assert manager.num_free_blocks == 10
    for context in batch:
        context.update(7)
    return manager, batch


def test_equal_pages_are_swapped_for_the_cached_ones() -> None:
    manager, batch = twins()
    before = [list(manager.get_req_blocks(c.request_id)) for c in batch]
    swaps = manager.step(batch)
    assert swaps.tolist() == [[1, column, page] for column, page in enumerate(before[0])]
    assert [list(manager.get_req_blocks(c.request_id)) for c in batch] == [before[0]] * 2
    assert manager.num_free_blocks == 13
    (entry,) = manager.fetch(batch)
    assert entry.lookup_table[0, :3].tolist() == entry.lookup_table[1, :3].tolist() == before[0]


def test_order_of_the_batch_decides_whose_page_stays() -> None:
    manager, batch = twins()
    pages = list(manager.get_req_blocks(batch[1].request_id))
    assert manager.step(batch[::-1]).tolist() == [
        [1, column, page] for column, page in enumerate(pages)
    ]


def test_without_deduplication_each_keeps_its_pages() -> None:
    manager, batch = twins(dedup=False)
    before = [list(manager.get_req_blocks(c.request_id)) for c in batch]
    assert len(manager.step(batch)) == 0
    assert [list(manager.get_req_blocks(c.request_id)) for c in batch] == before
    assert manager.num_free_blocks == 10
    assert manager.match_prefix(PROMPT, return_pages=True)[1].tolist() == before[0]


@pytest.mark.parametrize("last", [0, 1])
def test_cached_page_of_a_referenced_position_is_referenced(last: int) -> None:
    """Without deduplication a request also holds the tree node equal to its own page."""
    manager, batch = twins(dedup=False)
    manager.step(batch)
    manager.release(batch[1 - last].request_id)
    assert manager.match_prefix(PROMPT) == 12
    greedy = claimed(manager, range(500, 560))
    assert manager.maybe_reserve(greedy) is False
    manager.release(batch[last].request_id)
    assert manager.num_free_blocks == 16
    assert manager.maybe_reserve(greedy)


def test_descendant_under_another_requests_page_protects_it() -> None:
    manager, batch = twins(dedup=False)
    first, second = batch
    manager.step(batch)
    for token in range(8):
        manager.fetch([second])
        second.update(token)
        manager.step([second])
    manager.release(first.request_id)
    assert manager.match_prefix(second.tokens) == 20
    assert not manager.reset_prefix_cache()
    assert manager.match_prefix(second.tokens) == 0
    assert manager.num_free_blocks < 16
    manager.release(second.request_id)
    manager.reset_prefix_cache()
    assert manager.match_prefix(second.tokens) == 0
    assert manager.num_free_blocks == 16
