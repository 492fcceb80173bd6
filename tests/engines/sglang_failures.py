# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefix cache on a tree whose calls fail: no page and no lock is lost.

Needs SGLang's sources (`sglang_sources.open_sources`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore.integrations.sglang.cache import KVCoreRadixCache
from sglang_checks import CHECKS, PLAIN, check, put
from sglang_pair import Side

__all__ = ["CHECKS"]


class Failing:
    """A tree that fails the n-th call from now."""

    def __init__(self, tree: Any, fails_at: int) -> None:
        self.tree, self.left = tree, fails_at

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.tree, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise MemoryError("as asked for")
            return found(*args, **options)

        return call


@check
def a_failing_core_call_leaks_no_page_and_no_lock() -> None:
    failures = sum(fail_at(n, policy) for policy in ("lru", "priority") for n in range(1, 60))
    assert failures > 40, failures


def fail_at(n: int, policy: str) -> int:
    """Fail the n-th call of a scene; return true if the scene has n calls."""
    options: dict[str, Any] = {"eviction_policy": policy, "enable_kv_cache_events": True}
    side = Side(KVCoreRadixCache, 4, 256, **options)
    failing = Failing(side.cache.tree, n)
    side.cache.tree = failing
    failed = 0

    def attempt(call: Callable[..., Any], *args: Any, **more: Any) -> bool:
        nonlocal failed
        try:
            call(*args, **more)
        except MemoryError:
            failed += 1
            return False
        return True

    base = list(range(100, 130))
    for rid, tokens in (("a", base), ("b", base), ("c", [*base[:9], *range(20)])):
        if not attempt(side.start, rid, tokens, PLAIN, 3):
            side.requests.pop(rid, None)
            continue
        for end in (10, 17, len(tokens) - 1):
            side.grow(rid, max(end, side.requests[rid].kv.kv_allocated_len))
            attempt(side.checkpoint, rid, end)
            verify(side, failing)
    attempt(side.evict, 5)
    attempt(side.match, base, PLAIN)
    attempt(side.cache.dfs_weight_order, [each.last_node for each in side.requests.values()])
    for rid in [*side.requests]:
        request = side.requests[rid]
        if not attempt(side.release, rid, checkpoint=True):
            side.requests[rid] = request  # the scheduler continues, or ends
            side.cache.tree = failing.tree
            side.release(rid, checkpoint=False)
            side.cache.tree = failing
        del request
        verify(side, failing)
    assert not side.requests
    assert side.cache.protected_size() == 0, "a lock has leaked"
    side.cache.tree = failing.tree
    side.evict(10**6)
    assert side.allocator.available_size() == 256, "a page has leaked"
    return failed


def verify(side: Side, failing: Failing) -> None:
    """Check through the tree itself that every page has exactly one owner."""
    side.cache.tree = failing.tree
    side.check()
    side.cache.tree = failing


@check
def a_failing_free_is_made_up_for() -> None:
    side = Side(KVCoreRadixCache, 4, 256)
    put(side, list(range(32)))
    free = side.allocator.free_page_ids

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("as asked for")

    side.allocator.free_page_ids = refuse
    for _ in range(2):
        try:
            side.evict(8)
        except RuntimeError:
            continue
        raise AssertionError("the call did not fail")
    side.allocator.free_page_ids = free
    assert side.evict(4) == 8
    assert side.cache.total_size() + side.allocator.available_size() == 256
