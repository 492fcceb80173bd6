# SPDX-License-Identifier: Apache-2.0
"""Why prompts miss the cache: reasons, their sum, and when they are counted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from threading import Event
from typing import Any

import pytest

from builders import error_of, make_manager, with_host
from fates import Fates
from kvcore import (
    CacheOptions,
    PagedKVCacheManager,
    RequestNotFoundError,
    TextGenerationContext,
)
from kvcore.groups import FullAttention, SlidingWindow, State
from kvcore.metrics import Misses
from kvcore.stores import FinishedHandle
from tiered_requests import LONG, DictStore, store_prompt, tiered_manager

PAGE = 4


def explaining(num_pages: int = 8, **options: Any) -> PagedKVCacheManager:
    explain = options.pop("explain", True)
    cache = CacheOptions(explain=explain, **options.pop("cache", {}))
    return make_manager(PAGE, num_pages, cache=cache, **options)


def admit(mgr: PagedKVCacheManager, name: str, tokens: list[int], **terms: Any) -> Misses:
    """Run a prompt once, and release it."""
    ctx = TextGenerationContext(name, tokens, **terms)
    mgr.claim(name)
    assert mgr.maybe_reserve(ctx)
    mgr.fetch([ctx])
    found = mgr.explain(name)
    ctx.update(1_000_000)
    mgr.step([ctx])
    mgr.release(name)
    assert found is not None
    assert found == ctx.misses
    mgr.check_integrity()
    return found


def reasons(found: Misses | None) -> dict[str, int]:
    assert found is not None
    assert found.cached_tokens + sum(found.by_reason.values()) == found.prompt_tokens
    return {reason: n for reason, n in found.by_reason.items() if n}


def tokens(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


# ---- reasons -------------------------------------------------------------------------------------


def test_an_unseen_prompt_is_never_seen_and_its_end_fills_no_page() -> None:
    assert reasons(admit(explaining(), "a", tokens(10))) == {"never_seen": 8, "partial_page": 2}


def test_a_cached_prompt_misses_its_end() -> None:
    mgr = explaining()
    admit(mgr, "a", tokens(10))
    found = admit(mgr, "b", tokens(10))
    assert (found.cached_tokens, reasons(found)) == (8, {"partial_page": 2})
    found = admit(mgr, "c", tokens(8))  # the last token runs
    assert (found.cached_tokens, reasons(found)) == (7, {"partial_page": 1})


def test_an_evicted_prompt_says_so() -> None:
    mgr = explaining(4)
    admit(mgr, "a", tokens(16))
    admit(mgr, "b", tokens(16, 100))
    found = admit(mgr, "c", tokens(16))
    assert reasons(found) == {"evicted": 16}
    assert found.newest_eviction is not None
    assert "16 evicted for new pages" in str(found)
    assert "16 of 16 prompt tokens were not cached" in str(found)


def test_the_end_of_an_evicted_run_is_found() -> None:
    mgr = explaining(6)
    admit(mgr, "a", tokens(16))
    admit(mgr, "b", tokens(12, 100))  # evicts the last page of a
    found = admit(mgr, "c", tokens(17))
    assert reasons(found) == {"evicted": 4, "partial_page": 1}


def test_a_prompt_that_shares_a_part_of_an_evicted_run() -> None:
    mgr = explaining(4)
    admit(mgr, "a", tokens(16))
    admit(mgr, "b", tokens(16, 100))
    changed = [*tokens(8), 500, *tokens(7, 9)]
    assert reasons(admit(mgr, "c", changed)) == {"evicted": 8, "never_seen": 8}
    found = admit(mgr, "d", tokens(16))  # its start is cached again, its end is still lost
    assert found.cached_tokens == 8
    assert reasons(found) == {"evicted": 8}


@pytest.mark.parametrize("page", [1, 16, 48])
@pytest.mark.parametrize("equal", [0, 1, 5, 31, 32, 33, 64, 80, 90])
def test_long_prompts_are_compared_page_by_page(page: int, equal: int) -> None:
    """The pages of prompts have no token in common, except for the equal pages."""
    n = 90
    mgr = make_manager(page, n, cache=CacheOptions(explain=True), max_seq_len=100 * page)
    admit(mgr, "a", tokens(n * page))
    admit(mgr, "b", tokens(n * page, 10_000))
    prompt = tokens(n * page, 20_000)
    prompt[: equal * page] = tokens(equal * page)
    if 0 < equal < n:
        prompt[equal * page : (equal + 1) * page] = tokens(page, equal * page)
        prompt[(equal + 1) * page - 1] = 30_000  # the last token of the first other page
    expected = {"evicted": equal * page, "never_seen": (n - equal) * page}
    found = reasons(admit(mgr, "c", prompt))
    assert found == {reason: n for reason, n in expected.items() if n}


def test_forgotten_pages_and_a_reset() -> None:
    mgr = explaining()
    admit(mgr, "a", tokens(12))
    _, pages = mgr.match_prefix(tokens(12), return_pages=True)
    mgr.forget([int(pages[1])])
    assert reasons(admit(mgr, "b", tokens(12))) == {"forgotten": 8}
    mgr.reset_prefix_cache()
    assert reasons(admit(mgr, "c", tokens(12))) == {"reset": 12}


def test_pages_that_a_request_held_when_they_were_forgotten() -> None:
    mgr = explaining()
    ctx = TextGenerationContext("a", tokens(12))
    mgr.claim("a")
    mgr.fetch([ctx])
    ctx.update(99)
    mgr.step([ctx])
    mgr.reset_prefix_cache()
    assert reasons(admit(mgr, "b", tokens(12))) == {"reset": 12}


def test_another_namespace() -> None:
    mgr = explaining()
    admit(mgr, "a", tokens(12), cache_salt="a")
    assert reasons(admit(mgr, "b", tokens(14))) == {"other_namespace": 12, "partial_page": 2}
    mgr.check_integrity()


def test_equal_starts_of_pages_below_the_threshold() -> None:
    mgr = explaining(cache={"partial_page_reuse": 3})
    admit(mgr, "a", tokens(8))
    found = admit(mgr, "b", [*tokens(6), 77, 78])
    assert reasons(found) == {"partial_page": 2, "never_seen": 2}


def test_tokens_that_the_caller_does_not_take() -> None:
    mgr = explaining()
    admit(mgr, "a", tokens(16))
    ctx = TextGenerationContext("b", tokens(16))
    mgr.claim("b")
    assert mgr.maybe_reserve(ctx, max_hit=4)
    assert reasons(mgr.explain("b")) == {"declined": 8, "partial_page": 4}


def test_a_window_that_left_its_pages() -> None:
    mgr = explaining(22, params={"groups": (FullAttention([0]), SlidingWindow([1], 4))})
    admit(mgr, "a", tokens(32))
    for i in range(2):  # evict the pages that the window had passed
        admit(mgr, f"f{i}", tokens(16, 1000 * (i + 1)))
    assert sum(group.holes for group in mgr.group_metrics) > 0
    found = admit(mgr, "b", tokens(14))
    assert reasons(found) == {"unreachable": 12, "partial_page": 2}


def test_the_host_tier_was_full() -> None:
    mgr = explaining(4, params=with_host(PAGE, 6), blocks="allocate")
    admit(mgr, "a", tokens(16))
    admit(mgr, "b", tokens(16, 100))
    found = admit(mgr, "c", tokens(16))  # the host tier has room for six of the eight pages
    assert found.cached_tokens == 8
    assert reasons(found) == {"host_full": 8}


class SlowStore(DictStore):
    """A store whose reads end when the test opens the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go = Event()

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> FinishedHandle:
        assert self.may_go.wait(60)
        return super().get_into(keys, buffers)


def test_a_store_that_takes_too_long() -> None:
    store = SlowStore()
    store_prompt([store])
    cache = CacheOptions(explain=True)
    with tiered_manager(store, store_timeout=0.02, cache=cache) as mgr:
        ctx = TextGenerationContext("r", LONG)
        mgr.claim("r")
        assert mgr.maybe_reserve(ctx)
        found = reasons(mgr.explain("r"))
        assert found.pop("late") >= len(LONG) - mgr.params.page_size
        assert found.keys() <= {"partial_page"}
        mgr.release("r")
        store.may_go.set()


def test_a_prefix_without_a_checkpoint() -> None:
    groups = (FullAttention([0]), State([1], {"s": ((2,), "float32")}))
    mgr = explaining(24, params={"groups": groups})
    admit(mgr, "a", tokens(16))
    found = admit(mgr, "b", [*tokens(8), 50, 51, 52])
    assert found.cached_tokens == 0
    assert reasons(found) == {"unreachable": 8, "partial_page": 3}


# ---- admissions ----------------------------------------------------------------------------------


def test_counts_are_taken_once_when_the_hit_is_final() -> None:
    mgr = explaining()
    ctx = TextGenerationContext("a", tokens(10))
    mgr.claim("a")
    assert mgr.explain("a") is None
    assert ctx.misses is None
    assert mgr.maybe_reserve(ctx)
    assert mgr.maybe_reserve(ctx)
    assert mgr.miss_metrics.admissions == 0
    mgr.fetch([ctx])
    mgr.fetch([ctx])
    assert mgr.miss_metrics.admissions == 1
    assert mgr.miss_metrics.uncached_tokens == mgr.metrics.input_tokens == 10
    mgr.reset_metrics()
    assert mgr.miss_metrics.admissions == mgr.miss_metrics.prompt_tokens == 0
    mgr.check_integrity()


def test_a_request_that_is_released_before_it_runs_is_not_counted() -> None:
    mgr = explaining()
    ctx = TextGenerationContext("a", tokens(10))
    mgr.claim("a")
    assert mgr.maybe_reserve(ctx)
    mgr.release("a")
    assert mgr.miss_metrics.admissions == 0
    assert reasons(ctx.misses) == {"never_seen": 8, "partial_page": 2}


def test_a_refused_reservation_changes_nothing() -> None:
    mgr = explaining(4)
    first, second = (
        TextGenerationContext("a", tokens(12)),
        TextGenerationContext("b", tokens(9, 50)),
    )
    mgr.claim("a")
    mgr.claim("b")
    mgr.fetch([first])
    assert not mgr.maybe_reserve(second)
    assert mgr.explain("b") is None
    assert mgr.miss_metrics.admissions == 1


def test_a_batch_counts_each_request() -> None:
    mgr = explaining()
    batch = [TextGenerationContext(name, tokens(10, 50 * i)) for i, name in enumerate("ab")]
    for ctx in batch:
        mgr.claim(ctx.request_id)
    mgr.fetch(batch)
    assert mgr.miss_metrics.admissions == 2
    assert all(reasons(ctx.misses) == {"never_seen": 8, "partial_page": 2} for ctx in batch)


def test_a_preempted_request_is_admitted_again_with_its_generated_tokens() -> None:
    mgr = explaining()
    ctx = TextGenerationContext("a", tokens(10))
    mgr.claim("a")
    mgr.fetch([ctx])
    ctx.update(7)
    mgr.step([ctx])
    mgr.release("a")
    ctx.start_idx = 0
    mgr.claim("a")
    mgr.fetch([ctx])
    found = mgr.explain("a")
    assert found is not None
    assert (found.prompt_tokens, found.cached_tokens) == (11, 8)
    assert reasons(found) == {"partial_page": 3}
    assert mgr.miss_metrics.admissions == 2


def test_forks_and_truncation_are_no_admissions() -> None:
    mgr = explaining()
    ctx = TextGenerationContext("a", tokens(10))
    mgr.claim("a")
    mgr.fetch([ctx])
    ctx.update(7)
    mgr.step([ctx])
    child = TextGenerationContext("b", [*tokens(10), 7, 8, 9])
    mgr.fork("a", child)
    mgr.fetch([child])
    assert mgr.explain("b") is None
    mgr.truncate("a", 6)
    ctx.rewind(6)
    assert mgr.miss_metrics.admissions == 1
    assert reasons(mgr.explain("a")) == {"never_seen": 8, "partial_page": 2}
    mgr.check_integrity()


def test_a_full_record_forgets_the_oldest_pages() -> None:
    mgr = explaining(4, explain=4)
    for i in range(3):
        admit(mgr, f"a{i}", tokens(16, 100 * i))
    assert mgr.miss_metrics.remembered_pages == 4
    assert reasons(admit(mgr, "b", tokens(16))) == {"never_seen": 16}


def test_a_manager_that_does_not_explain_refuses() -> None:
    mgr = explaining(explain=False)
    ctx = TextGenerationContext("a", tokens(10))
    mgr.claim("a")
    mgr.fetch([ctx])
    assert "explain_pages is 0, must be at least 1" in str(error_of(lambda: mgr.explain("a")))
    assert ctx.misses is None
    assert mgr.miss_metrics.admissions == 0
    with pytest.raises(RequestNotFoundError):
        explaining().explain("b")
    with pytest.raises(ValueError, match="explain is 0, must be"):
        explaining(explain=0)


def test_the_record_has_room_for_four_times_the_pages() -> None:
    assert CacheOptions(explain=True).explain_pages(100) == 400
    assert CacheOptions(explain=True).explain_pages(1 << 20) == 1 << 18
    assert CacheOptions(explain=7).explain_pages(100) == 7
    assert CacheOptions().explain_pages(100) == 0
    mgr = explaining(4)
    for i in range(9):
        admit(mgr, f"a{i}", tokens(16, 100 * i))
    assert mgr.miss_metrics.remembered_pages == 16


# ---- the slow model ------------------------------------------------------------------------------


class Traffic:
    """Random calls of a manager and of its slow model."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.mgr = explaining(self.random.choice([6, 10, 16]), explain=1 << 12)
        self.fates = Fates(self.mgr, PAGE)
        self.number = 0
        self.live: list[TextGenerationContext] = []
        self.sum = self.unrun = 0

    def prompt(self) -> list[int]:
        """Tokens of few kinds of pages, so that prompts share starts and have equal middles."""
        pages = [self.random.choice("abc") for _ in range(self.random.randint(1, 5))]
        made = [ord(page) * 10 + i for page in pages for i in range(PAGE)]
        return made[: self.random.randint(1, len(made))]

    def run(self) -> None:
        self.number += 1
        salt = self.random.choice([None, None, "x"])
        prompt = self.prompt()
        ctx = TextGenerationContext(self.number, prompt, cache_salt=salt)
        before = self.mgr.metrics.cache_tokens
        self.mgr.claim(self.number)
        if not self.mgr.maybe_reserve(ctx):
            return self.mgr.release(self.number)
        cached = self.mgr.metrics.cache_tokens - before
        self.fates.settle("evicted")
        assert ctx.misses is not None
        assert cached == ctx.misses.cached_tokens
        assert reasons(ctx.misses) == self.fates.expected(salt, prompt, cached)
        if self.random.random() < 0.1:
            self.unrun += len(prompt) - cached
            return self.mgr.release(self.number)
        self.mgr.fetch([ctx])
        self.sum += len(prompt) - cached
        self.live.append(ctx)
        self.step(ctx)
        if len(self.live) > 1 or self.random.random() < 0.7:
            self.release()
        return None

    def step(self, ctx: TextGenerationContext) -> None:
        ctx.update(2_000_000 + self.number)
        self.mgr.step([ctx])
        self.fates.settle("evicted")
        self.fates.watch(ctx.cache_salt, ctx.tokens.tolist())

    def release(self) -> None:
        self.mgr.release(self.live.pop(0).request_id)

    def forget(self) -> None:
        _, pages = self.mgr.match_prefix(self.prompt(), return_pages=True)
        if len(pages):
            self.mgr.forget([int(self.random.choice(pages))])
            self.fates.settle("forgotten")

    def reset(self) -> None:
        self.mgr.reset_prefix_cache()
        self.fates.settle("reset")

    def check(self) -> None:
        self.mgr.check_integrity()
        assert self.mgr.miss_metrics.uncached_tokens == self.sum
        assert self.mgr.metrics.input_tokens == self.sum + self.unrun


@pytest.mark.parametrize("seed", range(40))
def test_random_traffic_agrees_with_the_fate_of_every_prefix(seed: int) -> None:
    traffic = Traffic(seed)
    for _ in range(120):
        kind = traffic.random.random()
        if kind < 0.04:
            traffic.reset()
        elif kind < 0.12:
            traffic.forget()
        else:
            traffic.run()
        traffic.check()
