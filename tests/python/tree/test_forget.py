# SPDX-License-Identifier: Apache-2.0
"""Pages with wrong contents leave the cache, and stay with the requests that hold them."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, error_of, make_context, make_manager, prefilled, put_in_cache
from grouped_traffic import manager_of, params_of
from kvcore.groups import FullAttention, SlidingWindow
from tables import table

PROMPT = list(range(16))


def cached(manager: kvcore.PagedKVCacheManager, tokens: list[int]) -> list[int]:
    """Return the ids of the cached pages of some tokens."""
    return list(map(int, manager.match_prefix(tokens, return_pages=True)[1]))


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.uint64)])
def test_pages_leave_with_all_that_is_cached_behind_them(kind: Any) -> None:
    manager = make_manager(4, 16)
    put_in_cache(manager, PROMPT)
    put_in_cache(manager, [*PROMPT[:8], 50, 51, 52, 53])
    pages = cached(manager, PROMPT)
    assert manager.forget(kind([pages[1]])) == 4
    assert manager.match_prefix(PROMPT) == 4
    assert manager.num_cached_blocks == 1
    assert manager.num_free_blocks == 16
    assert manager.forget(kind(pages)) == 1
    assert manager.forget([]) == 0


def test_a_failed_load_is_run_again() -> None:
    manager = make_manager(4, 16)
    context = prefilled(manager, PROMPT)
    pages = manager.get_req_blocks(context.request_id)
    assert manager.forget([pages[2]]) == 2
    assert manager.get_req_blocks(context.request_id) == pages
    manager.truncate(context.request_id, 8)
    context.start_idx = 8
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    context.update(7)
    manager.step([context])
    assert manager.match_prefix(PROMPT) == 16


def test_what_runs_on_is_not_cached() -> None:
    manager = make_manager(4, 16)
    context = prefilled(manager, PROMPT)
    manager.forget(manager.get_req_blocks(context.request_id)[1:2])
    for _ in range(8):
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(7)
        manager.step([context])
    assert manager.match_prefix(context.tokens) == 4
    child = make_context([*context.tokens, 1])
    manager.fork(context.request_id, child)
    assert manager.maybe_reserve(child)
    manager.fetch([child])
    child.update(8)
    manager.step([child])
    for each in (context, child):
        manager.release(each.request_id)
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (1, 16)


def test_pins_keep_what_is_forgotten() -> None:
    manager = make_manager(4, 16)
    put_in_cache(manager, PROMPT)
    with manager.pin(PROMPT) as pinned:
        assert manager.forget(cached(manager, PROMPT)[:1]) == 4
        assert pinned.num_tokens == 16
        assert manager.match_prefix(PROMPT) == 0
        assert manager.num_free_blocks == 12
    assert manager.num_free_blocks == 16


def test_events_tell_of_it() -> None:
    manager = make_manager(4, 16, events=True)
    context = prefilled(manager, PROMPT)
    stored: list[Any] = manager.take_events()
    pages = manager.get_req_blocks(context.request_id)
    manager.forget([pages[1]])
    removed: Any = manager.take_events()[0]
    keys = [key for each in stored for key in each.keys]
    assert sorted(removed.keys) == sorted(keys[1:])
    manager.release(context.request_id)
    assert manager.take_events() == []


def test_the_host_tier_forgets_as_well(tmp_path: Any) -> None:
    manager = make_manager(4, 16, blocks="allocate", tiers=["host:1MiB"])
    put_in_cache(manager, PROMPT)
    pages = cached(manager, PROMPT)
    assert manager.host_committed_block_pct > 0
    assert manager.forget([pages[0]]) == 4
    assert manager.host_committed_block_pct == 0
    context = claimed(manager, PROMPT)
    assert manager.maybe_reserve(context)
    assert context.start_idx == 0


@table(
    ("pages", "error"),
    [
        ([16], kvcore.InvalidHandleError),
        ([-1], kvcore.InvalidHandleError),
        ([1 << 40], kvcore.InvalidHandleError),
        ([1.0], TypeError),
        ([[1]], ValueError),
        (3, ValueError),
        ("a", (TypeError, ValueError)),
        (None, (TypeError, ValueError)),
    ],
)
def test_what_is_no_page_is_refused(pages: Any, error: Any) -> None:
    manager = make_manager(4, 16)
    put_in_cache(manager, PROMPT)
    for verb in (manager.forget, manager.hold):
        assert isinstance(error_of(functools.partial(verb, pages)), error)
        assert manager.match_prefix(PROMPT) == 16
    for verb in (manager.forget, manager.hold):
        with pytest.raises(IndexError, match=r"replica_idx is 1, must be 0 \.\. 0"):
            verb([0], replica_idx=1)


def test_held_pages_are_not_handed_out() -> None:
    manager = make_manager(4, 8)
    context = claimed(manager, range(12))
    assert manager.maybe_reserve(context)
    pages = manager.get_req_blocks(context.request_id)
    held = manager.hold(pages[:2])
    assert held.pages.tolist() == pages[:2]
    assert not held.pages.flags.writeable
    assert (len(held), repr(held)) == (2, "HeldPages(2 pages)")
    manager.release(context.request_id)
    assert manager.num_free_blocks == 6
    other = claimed(manager, range(100, 124))
    assert manager.maybe_reserve(other)
    assert not set(manager.get_req_blocks(other.request_id)) & set(pages[:2])
    held.let_go()
    with pytest.raises(kvcore.InvalidHandleError, match="released before"):
        held.let_go()
    assert manager.num_free_blocks == 2


def test_holds_nest_and_end_by_themselves() -> None:
    manager = make_manager(4, 8)
    put_in_cache(manager, range(16))
    pages = cached(manager, list(range(16)))
    with manager.hold(pages), manager.hold(pages[:1]):
        outer = manager.hold(pages[:3])
        assert manager.num_free_blocks == 4
    assert manager.num_free_blocks == 5
    del outer
    assert manager.num_free_blocks == 8
    with manager.hold(pages) as held:
        held.let_go()
    assert manager.num_free_blocks == 8


def test_free_pages_are_not_held() -> None:
    manager = make_manager(4, 8)
    put_in_cache(manager, range(4))
    with pytest.raises(kvcore.InvalidHandleError, match="page 7 is free"):
        manager.hold([0, 7])
    assert manager.num_free_blocks == 8


def test_a_hold_keeps_its_manager() -> None:
    manager = make_manager(4, 8)
    put_in_cache(manager, range(4))
    held = manager.hold([0])
    before = sys.getrefcount(manager)
    del manager
    held.let_go()
    assert before > 1


def test_held_pages_come_from_managers_alone() -> None:
    with pytest.raises(TypeError, match=r"no public constructor; call hold\("):
        kvcore.HeldPages()
    blank = kvcore.HeldPages.__new__(kvcore.HeldPages)
    assert len(blank) == 0
    with pytest.raises(kvcore.InvalidHandleError, match=r"HeldPages hold nothing; call hold\("):
        blank.let_go()


def run_on(manager: kvcore.PagedKVCacheManager, context: kvcore.TextGenerationContext) -> None:
    """Run one step, with its pending copies."""
    assert manager.maybe_reserve(context)
    manager.take_copies()
    manager.fetch([context])
    context.update(97)
    manager.step([context])


def test_a_fork_of_a_copy_of_a_forgotten_page_is_not_cached() -> None:
    manager = make_manager(4, 32)
    put_in_cache(manager, range(8))
    bad = cached(manager, list(range(8)))[1]
    parent = claimed(manager, [0, 1, 2, 3, 4, 5, 99])  # copies two tokens of the bad page
    run_on(manager, parent)
    child = make_context([*parent.tokens[:7], 55, 56])
    manager.fork(parent.request_id, child)
    manager.release(parent.request_id)
    manager.forget([bad])
    while child.start_idx < 9:
        run_on(manager, child)
    assert manager.match_prefix(child.tokens) == 4


def test_a_copy_that_a_truncation_has_made_of_a_forgotten_page_is_not_cached() -> None:
    manager = make_manager(4, 32)
    context = prefilled(manager, range(12))
    bad = manager.get_req_blocks(context.request_id)[1]
    manager.truncate(context.request_id, 6)
    context.rewind(6)
    context.extend([50])
    run_on(manager, context)
    manager.forget([bad])
    for _ in range(4):
        run_on(manager, context)
    assert manager.match_prefix(context.tokens) == 4


def test_a_copy_of_a_page_that_its_parent_has_cached_since_is_not_cached() -> None:
    manager = make_manager(2, 32)
    parent = claimed(manager, [1, 2, 3])
    run_on(manager, parent)
    child = make_context([1, 2, 3, 9])
    manager.fork(parent.request_id, child)
    assert manager.maybe_reserve(child)
    manager.take_copies()
    manager.fetch([child])
    run_on(manager, parent)
    manager.forget([manager.get_req_blocks(parent.request_id)[1]])
    child.update(7)
    manager.step([child])
    assert manager.match_prefix(child.tokens) == 2


@pytest.mark.parametrize("is_stepped", [True, False])
def test_a_page_that_its_request_has_not_cached_yet(is_stepped: bool) -> None:
    manager = make_manager(4, 16)
    context = claimed(manager, range(10))
    assert manager.maybe_reserve(context)
    bad = manager.get_req_blocks(context.request_id)[2]
    manager.fetch([context])
    if is_stepped:
        context.update(7)
        manager.step([context])
    assert manager.forget([bad]) == 0
    if not is_stepped:
        context.update(7)
        manager.step([context])
    for _ in range(8):
        run_on(manager, context)
    assert manager.match_prefix(context.tokens) == 8
    manager.accept(context, 8)
    context.extend([1] * 8)
    run_on(manager, context)
    assert manager.match_prefix(context.tokens) == 16
    manager.check_integrity()


def test_a_page_in_which_nothing_is_written_is_not_wrong() -> None:
    manager = make_manager(4, 16)
    context = claimed(manager, range(10))
    assert manager.maybe_reserve(context)
    assert manager.forget(manager.get_req_blocks(context.request_id)) == 0
    run_on(manager, context)
    assert manager.match_prefix(context.tokens) == 8


def test_a_fork_of_a_page_that_is_not_cached_and_forgotten_is_not_cached() -> None:
    manager = make_manager(4, 16)
    parent = claimed(manager, range(6))
    run_on(manager, parent)
    bad = manager.get_req_blocks(parent.request_id)[1]
    child = make_context([*range(6), 50, 51])
    manager.fork(parent.request_id, child)
    manager.forget([bad])
    manager.release(parent.request_id)
    for _ in range(6):
        run_on(manager, child)
    assert manager.match_prefix(child.tokens) == 4


def test_a_copied_part_of_a_page_is_forgotten() -> None:
    manager = make_manager(4, 16)
    put_in_cache(manager, range(8))
    context = claimed(manager, [0, 1, 2, 3, 4, 5, 99, 98, 97])
    assert manager.maybe_reserve(context)
    assert context.start_idx == 6
    manager.forget(manager.get_req_blocks(context.request_id)[1:2])
    run_on(manager, context)
    assert manager.match_prefix(context.tokens) == 4
    assert manager.match_prefix(list(range(8))) == 8


def test_a_page_beside_the_cached_one_of_the_same_tokens() -> None:
    manager = make_manager(4, 16, dedup=False)
    put_in_cache(manager, range(8))
    context = claimed(manager, range(8))
    assert manager.maybe_reserve(context, max_hit=0)
    run_on(manager, context)
    bad = manager.get_req_blocks(context.request_id)[1]
    assert bad not in cached(manager, list(range(8)))
    assert manager.forget([bad]) == 0
    for _ in range(8):
        run_on(manager, context)
    assert manager.match_prefix(context.tokens) == 8


@pytest.mark.parametrize(("is_wrong", "hit"), [(False, 8), (True, 6)])
def test_a_forgotten_page_of_a_twin_fills_no_window(is_wrong: bool, hit: int) -> None:
    groups = (FullAttention((0,)), SlidingWindow((1,), window=4))
    params = kvcore.KVCacheParams(
        "float32", 1, 2, 2, page_size=2, enable_prefix_caching=True, groups=groups
    )
    manager = kvcore.PagedKVCacheManager(params, 8, 64, num_pages=24, blocks=None, dedup=False)
    tokens = list(range(20))
    put_in_cache(manager, tokens)
    with manager.pin(tokens):
        filler = claimed(manager, range(100, 112))  # evicts the windows before the end
        assert manager.maybe_reserve(filler)
        manager.release(filler.request_id)
    assert manager.match_prefix(tokens[:8]) == 0
    context = claimed(manager, tokens[:8])
    run_on(manager, context)
    assert manager.match_prefix(tokens[:8]) == 4  # the pages that the request left in the cache
    if is_wrong:
        manager.forget([manager.get_req_blocks(context.request_id, bundle=1)[3]])
    manager.release(context.request_id)
    assert manager.match_prefix(tokens[:8]) == hit
    manager.check_integrity()


def test_windows_of_a_twin_do_not_go_to_a_forgotten_page() -> None:
    groups = (FullAttention((0,)), SlidingWindow((1,), window=4))
    params = kvcore.KVCacheParams(
        "float32", 1, 2, 2, page_size=2, enable_prefix_caching=True, groups=groups
    )
    manager = kvcore.PagedKVCacheManager(params, 8, 64, num_pages=40, blocks=None, dedup=False)
    contexts = [make_context(range(11)), make_context([0, 1])]  # the second page is a duplicate
    for context in contexts:
        manager.claim(context.request_id)
        run_on(manager, context)
    first, second = (context.request_id for context in contexts)
    manager.forget([manager.get_req_blocks(first)[0]])
    manager.release(second)
    manager.check_integrity()
    manager.release(first)
    manager.check_integrity()
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (0, 40)


@pytest.mark.parametrize("groups", [None, [FullAttention([0]), SlidingWindow([1], 8)]])
def test_a_reset_forgets_what_is_in_front_of_a_held_page_that_was_forgotten(groups: Any) -> None:
    manager = make_manager(4, 64)
    if groups is not None:
        manager = manager_of(params_of(*groups, page_size=4), 64)
    put_in_cache(manager, PROMPT)
    pages = cached(manager, PROMPT)
    free = manager.num_free_blocks
    first, last = manager.hold(pages[:1]), manager.hold(pages[3:])
    assert manager.forget([pages[2]]) > 0
    assert manager.match_prefix(PROMPT) == 8
    manager.reset_prefix_cache()
    assert manager.match_prefix(PROMPT) == 0
    assert manager.num_cached_blocks == 0
    assert manager.num_free_blocks < free
    put_in_cache(manager, PROMPT)
    assert not {*cached(manager, PROMPT)} & {pages[0], pages[3]}
    first.let_go()
    last.let_go()
    assert manager.num_free_blocks == free
