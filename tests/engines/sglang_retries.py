# SPDX-License-Identifier: Apache-2.0
"""Each core call of kvcore's cache for SGLang fails once; the caller then repeats the verb.

Needs SGLang's sources (`sglang_sources.open_sources`). All answers, events and sizes, the cached
pages, and their eviction order must equal the results of a run without a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from kvcore import PrefixTree
from kvcore.integrations.sglang import cache as adapter
from kvcore.integrations.sglang.cache import KVCoreRadixCache, KVCoreWindowCache
from sglang_checks import CHECKS, PLAIN, check
from sglang_pair import Side, as_told, ours_content

__all__ = ["CHECKS"]

FAULTS = (MemoryError, RuntimeError)
SLOTS = 60


class Countdown:
    """A counter that fails the n-th call of the core from now; with n = 0 no call fails."""

    def __init__(self, left: int, error: type[Exception]) -> None:
        self.left, self.error, self.has_failed = left, error, False

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.has_failed = True
                raise self.error("as asked for")
            return call(*args, **options)

        return counted


class CountedTree:
    """A tree that counts its calls, except `unpin`, which needs no memory and cannot fail."""

    def __init__(self, countdown: Countdown, *args: Any, **options: Any) -> None:
        self.countdown = countdown
        self.tree = countdown.wrap(PrefixTree)(*args, **options)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.tree, name)
        return self.countdown.wrap(found) if callable(found) and name != "unpin" else found


class Retried:
    """A side that repeats failed verbs; everything is checked between the calls."""

    def __init__(self, kind: Any, page: int, countdown: Countdown, **options: Any) -> None:
        self.countdown, self.answers = countdown, list[Any]()
        self.side = Side(kind, page, SLOTS * page, **options)

    def again(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return the answer of a verb; repeat the call if it fails."""
        rows = [*self.side.rows.free_slots]
        try:
            found = call(*args, **options)
        except FAULTS:
            self.verify()
            self.side.rows.free_slots[:] = rows  # the scheduler does this when a request returns
            found = call(*args, **options)
        self.answers.append((call.__name__, found if isinstance(found, int) else None))
        self.verify()
        self.answers.append((self.side.sizes(), as_told(self.side.cache.take_events())))
        return found

    def verify(self) -> dict[Any, bool]:
        """Check that every page has one owner and the tree is valid; return the cached pages.

        These calls do not count.
        """
        left, self.countdown.left = self.countdown.left, 0
        cache = self.side.cache
        self.side.check()
        cache.unlock(cache.lock(cache.root_node_handle()))
        found = ours_content(cache)
        self.countdown.left = left
        return found

    def finish(self, rid: str, *, checkpoint: bool) -> None:
        """Do SGLang's steps at the end of a request, each verb separately."""
        cache, request = self.side.cache, self.side.requests[rid]
        if checkpoint:
            self.again(self.side.checkpoint, rid, request.kv.kv_allocated_len)
        del self.side.requests[rid]
        cache.free_kv_row(
            request.kv, [(request.kv.cache_protected_len, request.kv.kv_allocated_len)]
        )
        self.side.rows.free_slots.append(request.kv.req_pool_idx)
        self.again(cache.unlock, request.lock)


def shared(side: Side, size: int) -> list[list[int]]:
    """Return prompts that share prefixes, which end within pages and at page ends."""
    base = [7 * i % 101 for i in range(6 * size + 3)]
    ends = (len(base), 3 * size, 2 * size + 1)
    return [[*base[:end], *range(200 + end, 200 + end + size + 2)] for end in ends]


def serve(run: Retried) -> None:
    """Start requests, run their chunks in turn, publish equal prefixes, decode, and end them."""
    side, size = run.side, run.side.page
    for turn in range(2):
        prompts = shared(side, size)
        hits = [run.again(side.start, f"{turn}.{i}", prompts[i], PLAIN, 3 * i) for i in range(3)]
        for i, tokens in enumerate(prompts):
            request = side.requests[f"{turn}.{i}"]
            request.full_untruncated_fill_ids.extend(range(500, 501 + size))
            last = len(request.full_untruncated_fill_ids)
            for end in (min(hits[i] + size + 1, len(tokens)), len(tokens) - 1, len(tokens), last):
                side.grow(f"{turn}.{i}", max(end, request.kv.kv_allocated_len))
                run.again(side.checkpoint, f"{turn}.{i}", end)
        for i in range(3):
            nodes = [each.last_node for each in side.requests.values()]
            run.answers.append(run.again(side.cache.dfs_weight_order, nodes))
            run.finish(f"{turn}.{i}", checkpoint=i != 1)
        for tokens in shared(side, size):
            run.again(lambda: side.match(tokens, PLAIN).device_prefix_len)  # noqa: B023
        run.again(side.evict, 3 * size)


def observe(run: Retried) -> None:
    """Record the order of eviction, and reset the cache."""
    side = run.side
    run.answers.append(run.verify())
    assert side.cache.protected_size() == 0, "a lock has leaked"
    while side.cache.total_size() > 4 * side.page:
        assert run.again(side.evict, 1) == side.page
        run.answers.append(run.verify())

    def reset() -> None:
        side.cache.reset()
        side.allocator.clear()

    run.again(reset)
    assert side.allocator.available_size() == side.slots, "a page has leaked"
    assert run.again(lambda: side.match(shared(side, side.page)[0], PLAIN).device_prefix_len) == 0


def play(kind: Any, page: int, n: int, error: type[Exception], options: Any) -> tuple[Any, bool]:
    """Run with a failure at the n-th call; return the answers, and true if n calls were made."""
    countdown = Countdown(n, error)
    with mock.patch.object(adapter, "PrefixTree", partial(CountedTree, countdown)):
        try:
            run = Retried(kind, page, countdown, **options)
        except FAULTS:  # no cache is made; the next attempt starts afresh
            run = Retried(kind, page, countdown, **options)
        serve(run)
        observe(run)
    return run.answers, countdown.has_failed


def kinds() -> Iterator[tuple[Any, int, dict[str, Any]]]:
    for policy in KVCoreRadixCache.POLICIES:
        yield KVCoreRadixCache, 4, {"eviction_policy": policy}
    for page in (1, 4, 16):
        yield KVCoreRadixCache, page, {"enable_kv_cache_events": True}
        yield KVCoreRadixCache, page, {"is_eagle": True, "enable_kv_cache_events": True}
        yield KVCoreWindowCache, page, {"sliding_window_size": 8}


@check
def a_verb_whose_core_call_failed_is_called_again() -> None:
    failures = 0
    for kind, page, options in kinds():
        expected, _ = play(kind, page, 0, MemoryError, options)
        n, has_failed = 0, True
        while has_failed:
            n += 1
            found, has_failed = play(kind, page, n, FAULTS[n % 2], options)
            failures += has_failed
            text = f"{kind.__name__}, pages of {page}, {options}, call {n}"
            assert len(found) == len(expected), text
            for at, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert one == other, f"{text}: answer {at} is {one}, without a fault {other}"
    assert failures > 1300, failures
