# SPDX-License-Identifier: Apache-2.0
"""Contexts rewound into committed or shared pages: those pages are copied, never rewritten."""

from __future__ import annotations

from typing import Any

import pytest

import kvcore
from builders import claimed, make_manager, prefilled


def cut_back(num_pages: int, n: int, **rest: Any) -> tuple[kvcore.PagedKVCacheManager, Any]:
    """Return a request with 4 committed pages of 4 tokens, rewound to `n` tokens."""
    manager = make_manager(4, num_pages, **rest)
    context = prefilled(manager, range(16))
    assert len(manager.get_req_blocks(context.request_id)) == 4
    context.rewind(n)
    return manager, context


@pytest.mark.parametrize("n", range(1, 17))
def test_page_written_next_is_copied_first(n: int) -> None:
    manager, context = cut_back(16, n)
    cached = manager.match_prefix(list(range(16)), return_pages=True)[1].tolist()
    assert manager.maybe_reserve(context)
    pages = list(manager.get_req_blocks(context.request_id))
    column, written = divmod(context.start_idx, 4)
    assert pages[:column] == cached[:column]
    assert pages[column] not in cached
    copies = [[0, cached[column], pages[column], written]] if written else []
    assert manager.take_copies().tolist() == copies
    assert manager.match_prefix(list(range(16))) == 16
    assert manager.metrics.copied_tokens == 0
    assert manager.maybe_reserve(context)
    assert list(manager.get_req_blocks(context.request_id)) == pages


@pytest.mark.parametrize("num_pages", [5, 6, 7])
def test_one_free_page_is_enough_for_one_page_to_write(num_pages: int) -> None:
    manager, context = cut_back(num_pages, 6)
    plan = manager.plan(context)
    assert (plan.fits, plan.new_pages, plan.evicted_pages) == (True, 1, 0)
    assert manager.maybe_reserve(context)


def test_no_page_for_the_copy_answers_false() -> None:
    manager, context = cut_back(4, 6)
    before = list(manager.get_req_blocks(context.request_id))
    assert not manager.plan(context).fits
    assert manager.maybe_reserve(context) is False
    assert list(manager.get_req_blocks(context.request_id)) == before
    with pytest.raises(kvcore.InsufficientBlocksError):
        manager.fetch([context])
    assert manager.match_prefix(list(range(16))) == 16


@pytest.mark.parametrize("n", [1, 4, 5, 8, 13, 16])
def test_old_tokens_stay_cached_and_new_ones_are_committed(n: int) -> None:
    manager, context = cut_back(16, n)
    for token in range(100, 112):
        manager.fetch([context])
        context.update(token)
        manager.step([context])
        pages = list(manager.get_req_blocks(context.request_id))
        written = context.start_idx // 4
        count, cached = manager.match_prefix(context.tokens, return_pages=True)
        assert count >= written * 4
        assert cached[:written].tolist() == pages[:written]
    assert manager.match_prefix(list(range(16))) == 16
    manager.release(context.request_id)
    assert manager.num_free_blocks == 16
    manager.reset_prefix_cache()
    assert manager.match_prefix(list(range(16))) == 0


def test_other_holders_of_the_page_keep_it() -> None:
    manager = make_manager(4, 16)
    first = prefilled(manager, range(16))
    second = prefilled(manager, [*range(16), 16])
    shared = list(manager.get_req_blocks(first.request_id))
    second.rewind(6)
    assert manager.maybe_reserve(second)
    assert list(manager.get_req_blocks(first.request_id)) == shared
    pages = list(manager.get_req_blocks(second.request_id))
    assert pages[0] == shared[0]
    assert pages[1] != shared[1]


def test_pages_of_the_pool_are_copied() -> None:
    manager = make_manager(4, 16, blocks="allocate")
    context = claimed(manager, range(12))
    (entry,) = manager.fetch([context])
    entry.blocks[:] = entry.lookup_table.max() + 5
    entry.blocks[manager.get_req_blocks(context.request_id)[1]] = 42
    context.update(12)
    manager.step([context])
    context.rewind(7)
    assert manager.maybe_reserve(context)
    page = manager.get_req_blocks(context.request_id)[1]
    assert (entry.blocks[page, :, :, :2] == 42).all()
    assert len(manager.take_copies()) == 0
