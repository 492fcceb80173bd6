# SPDX-License-Identifier: Apache-2.0
"""Reservation bounds: the longest hit, the pages to keep free, the tokens that must fit."""

from __future__ import annotations

import random
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np
import pytest

from bounded_requests import PROMPT, claimed, serve, state_of
from builders import make_manager, with_host
from grouped_traffic import manager_of, params_of, with_host_tier
from kvcore import (
    CapacityError,
    PagedKVCacheManager,
    RequestNotFoundError,
    ReservePlan,
    TextGenerationContext,
)
from kvcore.groups import FullAttention, SlidingWindow
from state_model import state_manager, state_params
from tiered_requests import LONG, DictStore, store_prompt, tiered_manager

# -- max_hit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [True, False, 3])
def test_a_hit_is_as_long_as_it_may_be(partial: Any) -> None:
    manager = make_manager(partial_page_reuse=partial)
    serve(manager, PROMPT)
    for most in range(22):
        context = claimed(manager)
        plan = manager.plan(context, max_hit=most)
        assert manager.reserve(context, max_hit=most)
        expected = min(most, 19)
        if expected % 4 < (partial if partial is not False else 4):
            expected -= expected % 4
        assert (context.start_idx, plan.hit_tokens) == (expected, expected)
        manager.release("a")
    context = claimed(manager)
    assert manager.reserve(context, max_hit=None)
    assert context.start_idx == 16 if partial is False else 19


def test_the_bound_of_a_hit_is_that_of_one_call() -> None:
    manager = make_manager()
    serve(manager, PROMPT)
    context = claimed(manager)
    for most, start in ((8, 8), (4, 8), (0, 8), (12, 12), (None, 19)):
        assert manager.reserve(context, max_hit=most)
        assert context.start_idx == start
    assert manager.metrics.cache_tokens == 19


def test_what_is_reserved_without_the_cache_is_fetched_without_it() -> None:
    manager = make_manager()
    serve(manager, PROMPT)
    context = claimed(manager)
    assert manager.reserve(context, max_hit=0)
    manager.fetch([context])
    assert context.start_idx == 0
    context.update(7)
    manager.step([context])  # the pages equal the cached pages
    cached = manager.match_prefix(PROMPT, return_pages=True)[1]
    assert manager.get_req_blocks("a")[:5] == cached.tolist()


@pytest.mark.parametrize("host_pages", [0, 64])
def test_hits_of_groups_are_legal_in_front_of_the_bound(host_pages: int) -> None:
    params = params_of(FullAttention([0]), SlidingWindow([1], 6), page_size=4)
    params = with_host_tier(params, host_pages) if host_pages else params
    for most in range(0, 24, 3):
        manager = manager_of(params, 16)
        serve(manager, PROMPT, 8)
        if host_pages:
            serve(manager, list(range(100, 136)), 8)
        context = claimed(manager)
        plan = manager.plan(context, max_hit=most)
        before = manager.num_free_blocks
        assert manager.reserve(context, max_hit=most)
        assert context.start_idx == plan.hit_tokens <= most
        taken = plan.new_pages + plan.evictable_hit_pages
        assert manager.num_free_blocks == before - taken


def test_hits_of_states_end_at_a_checkpoint_in_front_of_the_bound() -> None:
    manager = state_manager(state_params(interval=8), num_states=12)
    serve(manager, PROMPT, 8)
    for most, start in ((0, 0), (7, 0), (8, 8), (15, 8), (16, 16), (None, 16)):
        context = claimed(manager)
        assert manager.plan(context, max_hit=most).hit_tokens == start
        assert manager.reserve(context, max_hit=most)
        assert context.start_idx == start
        manager.release("a")


def test_hits_of_the_host_tier_are_bounded() -> None:
    for most in range(21):
        manager = make_manager(
            num_pages=6, params=with_host(4, 16), blocks="allocate", partial_page_reuse=False
        )
        serve(manager, PROMPT)
        serve(manager, list(range(100, 122)))  # takes every page of the device
        context = claimed(manager)
        plan = manager.plan(context, max_hit=most)
        assert manager.reserve(context, max_hit=most, keep_free=1)
        assert context.start_idx == plan.hit_tokens == min(most, 19) // 4 * 4
        assert manager.metrics.h2d_blocks_copied == context.start_idx // 4
        assert manager.num_free_blocks == 1


class Counted(DictStore):
    num_reads = 0

    def get_into(self, keys: Any, buffers: Any) -> Any:
        self.num_reads += len(keys)
        return super().get_into(keys, buffers)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("most", [0, 5, 8])
def test_stores_bring_no_more_than_the_bound(most: int, is_async: bool) -> None:
    store = Counted()
    store_prompt([store])
    with tiered_manager(store, async_onload=is_async) as manager:
        context = TextGenerationContext("r", LONG)
        manager.claim("r")
        assert manager.reserve(context, max_hit=most)
        assert manager.wait(context)
        assert context.start_idx == most // 4 * 4
        assert store.num_reads == most // 4


# -- keep_free -------------------------------------------------------------------------------------


def test_pages_are_kept_free_and_a_refusal_evicts_nothing() -> None:
    manager = make_manager(num_pages=8)
    serve(manager, PROMPT[:16])
    context = claimed(manager, tokens=PROMPT[:18])
    before = state_of(manager)
    for kept in range(20, 3, -1):
        assert not manager.plan(context, keep_free=kept).fits
        assert not manager.reserve(context, keep_free=kept)
        assert state_of(manager) == before
        assert (context.start_idx, context.active_idx) == (0, 18)
    plan = manager.plan(context, keep_free=3)
    assert plan == ReservePlan(16, 1, 0, 0, fits=True, evictable_hit_pages=4)
    assert manager.maybe_reserve(context, keep_free=3)
    assert manager.num_free_blocks == 3
    assert manager.reserve(context)  # needs no more pages
    assert not manager.reserve(context, keep_free=4)


def test_what_is_kept_is_of_the_replica() -> None:
    manager = make_manager(num_pages=8, replicas=2)
    manager.claim("other", 1)
    assert manager.reserve(TextGenerationContext("other", PROMPT))
    context = claimed(manager)
    assert not manager.reserve(context, keep_free=4)
    assert manager.reserve(context, keep_free=3)


def test_room_that_must_be_counts_for_the_quota_of_its_tenant() -> None:
    manager = make_manager(num_pages=16, quotas={"t": (0, 6)}, reserve_chunks=True)
    first = claimed(manager, "a", list(range(100, 108)), tenant="t")
    assert manager.reserve(first)
    second = claimed(manager, "b", active_idx=4, tenant="t")
    before = state_of(manager)
    assert not manager.reserve(second, must_fit=20)
    assert state_of(manager) == before
    assert manager.reserve(second, must_fit=16, keep_free=10)
    with pytest.raises(CapacityError, match="more than the 6 that quotas leave its tenant"):
        manager.reserve(second, must_fit=28)
    unclaimed = TextGenerationContext("c", PROMPT, active_idx=4, tenant="t")
    assert manager.plan(unclaimed, must_fit=12).fits
    assert not manager.plan(unclaimed, must_fit=16).fits
    assert manager.plan(TextGenerationContext("c", PROMPT, active_idx=4), must_fit=20).fits


# -- must_fit --------------------------------------------------------------------------------------


def test_a_prompt_begins_by_the_chunk_where_all_of_it_fits() -> None:
    """`must_fit` answers like a manager that reserves whole sequences."""
    draw = random.Random(5)
    asked = 0
    for _ in range(200):
        pages = draw.randint(4, 14)
        by_chunk = make_manager(num_pages=pages, reserve_chunks=True, enable_runtime_checks=False)
        whole = make_manager(num_pages=pages, enable_runtime_checks=False)
        n = draw.randint(2, 4 * pages)
        cached, held = draw.randint(1, n), draw.randint(1, 4 * pages)
        tokens = list(range(n))
        active = draw.randint(1, n)
        contexts, answers = [], []
        for manager in (by_chunk, whole):
            serve(manager, [*tokens[:cached], 77])
            manager.claim("held")
            assert manager.reserve(TextGenerationContext("held", list(range(200, 200 + held))))
            contexts.append(claimed(manager, "a", tokens, active_idx=active))
            fit = n if manager is by_chunk else None
            answers.append(manager.reserve(contexts[-1], must_fit=fit))
        assert answers[0] is answers[1]
        asked += answers[0]
        if answers[0]:
            run_by_the_chunk(by_chunk, contexts[0])
    assert 25 < asked < 175


def run_by_the_chunk(manager: PagedKVCacheManager, context: TextGenerationContext) -> None:
    while True:
        assert manager.reserve(context)
        manager.fetch([context])
        if context.active_idx == context.end_idx:
            return
        context.update(7)
        manager.step([context])
        context.active_idx = min(context.start_idx + 3, context.end_idx)


@pytest.mark.parametrize("keep_free", [0, 1])
def test_window_pages_that_others_read_make_no_room_for_later_chunks(keep_free: int) -> None:
    """Another request reads the 4 hit pages, so a window that passes them frees no page."""
    for pages in range(16, 26):
        params = params_of(SlidingWindow([0], 9), page_size=1)
        manager = manager_of(params, pages, reserve_chunks=True, partial_page_reuse=False)
        first = claimed(manager, "first", PROMPT[:5])
        assert manager.reserve(first)
        manager.fetch([first])
        first.update(7)
        manager.step([first])
        second = claimed(manager, "second", [*PROMPT[:4], *range(50, 84)], active_idx=14)
        if not manager.reserve(second, must_fit=38, keep_free=keep_free):
            assert pages < 5 + 8 + 10 + keep_free
            continue
        assert second.start_idx == 4
        while second.active_idx < second.end_idx:
            manager.fetch([second])
            second.update(7)
            manager.step([second])
            second.active_idx = min(second.start_idx + 10, second.end_idx)
            assert manager.reserve(second)
            assert manager.num_free_blocks >= keep_free
        assert pages >= 5 + 8 + 10 + keep_free


def test_window_pages_of_another_tenant_make_no_room_in_a_quota() -> None:
    for most in range(10, 22):
        params = params_of(SlidingWindow([0], 9), page_size=1)
        quotas = {"t": (0, most), "u": (0, None)}
        manager = manager_of(params, 64, reserve_chunks=True, quotas=quotas)
        first = claimed(manager, "first", PROMPT[:5], tenant="u")
        assert manager.reserve(first)
        manager.fetch([first])
        first.update(7)
        manager.step([first])
        manager.release("first")
        tokens = [*PROMPT[:4], *range(50, 84)]
        second = claimed(manager, "second", tokens, active_idx=14, tenant="t")
        try:
            if not manager.reserve(second, must_fit=38):
                continue
        except CapacityError:
            continue
        assert most >= 8 + 10
        while second.active_idx < second.end_idx:
            manager.fetch([second])
            second.update(7)
            manager.step([second])
            second.active_idx = min(second.start_idx + 10, second.end_idx)
            assert manager.reserve(second)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"max_hit": -1}, ValueError, "max_hit is -1, must be at least 0"),
        ({"keep_free": -1}, ValueError, "keep_free is -1, must be at least 0"),
        ({"must_fit": -1}, ValueError, "must_fit is -1, must be at least 0"),
        ({"max_hit": 1.5}, TypeError, "max_hit is a float, must be an int"),
        ({"keep_free": None}, TypeError, "keep_free is a NoneType, must be an int"),
        ({"must_fit": "4"}, TypeError, "must_fit is a str, must be an int"),
        ({"max_hit": 1 << 64}, ValueError, "max_hit is 18446744073709551616, must fit in 64 bits"),
    ],
)
def test_bad_bounds_are_refused(options: dict[str, Any], kind: Any, text: str) -> None:
    manager = make_manager()
    context = claimed(manager)
    for call in (manager.reserve, manager.maybe_reserve, manager.plan):
        with pytest.raises(kind, match=text):
            call(context, **options)
    assert manager.num_free_blocks == 16


def test_room_that_can_never_be_is_an_error_and_no_plan() -> None:
    manager = make_manager(max_seq_len=40)
    context = claimed(manager)
    with pytest.raises(CapacityError, match="'a': must_fit is 41 tokens, must be at most 40"):
        manager.reserve(context, must_fit=41)
    assert not manager.plan(context, must_fit=41).fits
    assert manager.num_free_blocks == 16
    assert manager.reserve(context, must_fit=40)


class Meddling:
    """An integer whose conversion runs other code first."""

    def __init__(self, value: int, do: Callable[[], Any]) -> None:
        self.value, self.do = value, do

    def __index__(self) -> int:
        self.do()
        return self.value


def test_bounds_whose_code_releases_the_request() -> None:
    manager = make_manager()
    context = claimed(manager)
    gone: Any = Meddling(4, lambda: manager.release("a"))
    with pytest.raises(RequestNotFoundError):
        manager.reserve(context, max_hit=gone)
    assert manager.num_free_blocks == 16
    manager.claim("a")
    assert manager.plan(context, keep_free=gone).fits  # the plan is of an unclaimed request
    forgets: Any = Meddling(1, manager.reset_prefix_cache)
    assert manager.match_prefix(PROMPT, lookahead=forgets) == (0, 0)


# -- threads ---------------------------------------------------------------------------------------


def test_requests_that_others_release_while_they_are_reserved() -> None:
    """Each call succeeds or raises for the released request; no page is lost or leaked."""
    manager = make_manager(num_pages=24, enable_runtime_checks=False)
    serve(manager, PROMPT)
    errors: list[BaseException] = []

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for i in range(300):
                context = TextGenerationContext((seed, i), PROMPT)
                manager.claim((seed, i))
                other = Thread(target=manager.release, args=((seed, i),)) if i % 10 == 0 else None
                if other is not None:
                    other.start()
                try:
                    manager.plan(context, max_hit=draw.randint(0, 20))
                    manager.reserve(
                        context,
                        max_hit=draw.randint(0, 20),
                        keep_free=draw.randint(0, 20),
                        must_fit=draw.randint(0, 60),
                    )
                    manager.get_req_blocks((seed, i), first=draw.randint(0, 6))
                    manager.match_prefix(PROMPT, lookahead=3, out=np.zeros(5, np.int32))
                except RequestNotFoundError:
                    assert other is not None
                if other is not None:
                    other.join()
                else:
                    manager.release((seed, i))
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [Thread(target=ask, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    manager.check_integrity()
    assert manager.num_free_blocks == 24
