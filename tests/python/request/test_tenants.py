# SPDX-License-Identifier: Apache-2.0
"""Tenants with reservations and ceilings: the requests they admit, and the pages that each owns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvcore import (
    CapacityError,
    InsufficientBlocksError,
    PagedKVCacheManager,
)
from kvcore.groups import FullAttention, SlidingWindow
from kvcore.scheduler import Request, Scheduler
from tables import table
from tenant_steps import PAGES, context_of, manager_of, reserved, run


def held(manager: PagedKVCacheManager) -> dict[str, int]:
    return {tenant: each.held_pages for tenant, each in manager.tenant_metrics.items()}


def test_reserved_pages_are_not_available_to_others() -> None:
    manager = manager_of({"a": (6, None)})
    # Ten pages are left to a tenant without a quota.
    assert reserved(manager, context_of("x", range(20), "b"))
    other = context_of("y", range(100, 102))
    assert not reserved(manager, other)
    assert reserved(manager, context_of("z", range(200, 212), "a"))
    assert held(manager) == {"a": 6}
    assert not reserved(manager, context_of("w", range(300, 301), "a"))
    manager.release("z")
    assert not reserved(manager, other)
    manager.release("x")
    assert reserved(manager, other)


def test_nobody_exceeds_a_ceiling() -> None:
    manager = manager_of({"a": (0, 4), "b": (2, 3)})
    assert reserved(manager, context_of("1", range(6), "a"))
    assert not reserved(manager, context_of("2", range(10, 14), "a"))
    assert reserved(manager, context_of("3", range(20, 22), "a"))
    assert held(manager) == {"a": 4, "b": 0}
    assert manager.tenant_metrics["a"].refused == 1
    manager.reset_metrics()
    assert manager.tenant_metrics["a"].refused == 0
    assert (manager.tenant_metrics["b"].reserved_pages, manager.tenant_metrics["b"].max_pages) == (
        2,
        3,
    )


def test_held_pages_count_for_their_tenant_to_the_end() -> None:
    manager = manager_of({"a": (2, 6), "b": (0, 10)})
    run(manager, context_of("r", range(8), "a"))
    manager.release("r")
    pin = manager.pin(list(range(8)))
    kept = manager.hold([0, 1, 2, 3])
    assert manager.forget([0]) > 0
    manager.reset_prefix_cache()
    pin.release()
    assert held(manager) == {"a": 4, "b": 0}
    manager.check_integrity()
    assert not reserved(manager, context_of("x", range(100, 106), "a"))  # the ceiling is 6 pages
    kept.let_go()
    assert held(manager) == {"a": 0, "b": 0}
    assert reserved(manager, context_of("y", range(100, 106), "a"))
    manager.check_integrity()


def test_what_can_never_fit_is_refused_at_once() -> None:
    manager = manager_of({"a": (0, 4), "b": (6, None)})
    for tenant, most in (("a", 4), (None, 10), ("other", 10), ("b", 16)):
        fits = context_of("fits", range(2 * most), tenant)
        assert reserved(manager, fits)
        manager.release("fits")
        manager.claim("never")
        never = context_of("never", range(2 * most + 1), tenant)
        assert not manager.plan(never).fits
        free = manager.num_free_blocks
        text = "pool" if most == PAGES else f"more than the {most} that quotas leave its tenant"
        with pytest.raises(CapacityError, match=text):
            manager.reserve(never)
        with pytest.raises(CapacityError, match=text):
            manager.fetch([never])
        with pytest.raises(CapacityError, match=text):
            manager.maybe_reserve_batch([never])
        assert manager.num_free_blocks == free
        manager.release("never")


def test_a_fetch_says_that_a_quota_is_in_the_way() -> None:
    manager = manager_of({"a": (0, 4)})
    first, second = context_of("1", range(6), "a"), context_of("2", range(10, 14), "a")
    manager.claim("1")
    manager.claim("2")
    with pytest.raises(InsufficientBlocksError, match=r"'2' needs 2 more pages, quotas leave its"):
        manager.fetch([first, second])
    assert held(manager) == {"a": 0}
    assert manager.tenant_metrics["a"].refused == 1
    manager.fetch([first])
    assert held(manager) == {"a": 3}


def test_a_shared_page_counts_for_who_committed_it() -> None:
    manager = manager_of({"a": (0, 4), "b": (0, 3)})
    run(manager, context_of("1", range(8), "a"))
    run(manager, context_of("2", [*range(8), 50, 51], "b"))
    assert held(manager) == {"a": 4, "b": 1}
    manager.release("1")
    assert held(manager) == {"a": 4, "b": 1}  # "2" still holds them
    manager.release("2")
    assert held(manager) == {"a": 0, "b": 0}
    # Five pages exceed its ceiling, but four of them are cached and belong to another tenant.
    assert reserved(manager, context_of("3", [*range(8), 60], "b"))
    assert held(manager) == {"a": 4, "b": 1}


def test_a_cached_page_goes_to_who_takes_it_where_its_tenant_has_no_room() -> None:
    manager = manager_of({"a": (0, 4), "b": (0, 5)})
    run(manager, context_of("1", range(7), "a"))
    manager.release("1")
    assert reserved(manager, context_of("2", range(100, 108), "a"))
    assert reserved(manager, context_of("3", range(7), "b"))
    assert held(manager) == {"a": 4, "b": 4}
    manager.release("3")
    manager.release("2")
    run(manager, context_of("4", range(7), "a"))
    assert held(manager) == {"a": 1, "b": 3}  # these pages belong to "b" from now on


def test_duplicates_move_the_count() -> None:
    manager = manager_of({"a": (0, 4), "b": (0, 4)})
    first, second = context_of("1", range(8), "a"), context_of("2", range(8), "b")
    for context in (first, second):
        assert reserved(manager, context)
    assert held(manager) == {"a": 4, "b": 4}
    manager.fetch([first, second])
    first.update(1)
    second.update(1)
    manager.step([first])
    swaps = manager.step([second])
    assert len(swaps) == 4
    assert held(manager) == {"a": 4, "b": 0}


def test_duplicates_of_a_tenant_without_room_stay_with_who_has_them() -> None:
    manager = manager_of({"a": (0, 4), "b": (0, 4)})
    first, second = context_of("1", range(8), "a"), context_of("2", range(8), "b")
    assert reserved(manager, first)
    assert reserved(manager, second)
    manager.fetch([first, second])
    first.update(1)
    second.update(1)
    manager.step([first])
    manager.release("1")
    assert reserved(manager, context_of("3", range(100, 108), "a"))
    assert len(manager.step([second])) == 4
    assert held(manager) == {"a": 4, "b": 4}


@pytest.mark.parametrize("is_room", [True, False])
def test_twins_are_committed_only_where_quotas_leave_room(is_room: bool) -> None:
    manager = manager_of({"a": (0, 8), "c": (8, None)}, dedup=False, num_pages=16 + 2 * is_room)
    first, second = context_of("1", range(4), "a"), context_of("2", range(4), "a")
    assert reserved(manager, first)
    assert reserved(manager, second)
    manager.fetch([first, second])
    first.update(1)
    second.update(1)
    manager.step([first])
    manager.release("1")
    assert reserved(manager, context_of("3", range(50, 62)))  # all pages that "c" has not reserved
    manager.step([second])  # its duplicates would also be held
    assert manager.num_free_blocks == 8
    assert held(manager) == {"a": 4 if is_room else 2, "c": 0}
    assert reserved(manager, context_of("4", range(70, 86), "c"))


def test_forks_are_their_parents_unless_they_say() -> None:
    manager = manager_of({"a": (0, 6), "b": (0, 6)})
    parent = context_of("p", range(7), "a")
    run(manager, parent)
    children = [
        context_of("c1", [*range(7), 8, 9]),
        context_of("c2", [*range(7), 8, 9], "b"),
        context_of("c3", [*range(7), 8, 9], "who"),
    ]
    manager.fork("p", *children)
    assert held(manager) == {"a": 4, "b": 0}
    for child in children:
        assert reserved(manager, child)
    assert held(manager) == {"a": 6, "b": 2}  # two pages of "c3" belong to no tenant
    manager.release("p")
    manager.release("c1")
    assert held(manager) == {"a": 3, "b": 2}


def test_truncate_and_release_give_back() -> None:
    manager = manager_of({"a": (0, 8)})
    context = context_of("1", range(9), "a")
    run(manager, context)
    assert held(manager) == {"a": 5}
    manager.truncate("1", 4)
    assert held(manager) == {"a": 2}
    manager.release("1")
    assert held(manager) == {"a": 0}
    assert manager.num_cached_blocks == 4


def test_pins_count_for_who_committed_and_stay_within_quotas() -> None:
    manager = manager_of({"a": (0, 4), "b": (10, None)})
    run(manager, context_of("1", range(8), "a"))
    manager.release("1")
    with manager.pin(list(range(8))) as pin:
        assert pin.num_tokens == 8
        assert held(manager) == {"a": 4, "b": 0}
    run(manager, context_of("2", range(100, 103), "a"))
    with manager.pin(list(range(8))) as pin:  # two pages fit its ceiling
        assert pin.num_tokens == 4
        assert held(manager) == {"a": 4, "b": 0}
    assert held(manager) == {"a": 2, "b": 0}
    assert reserved(manager, context_of("3", range(200, 206), None))
    with manager.pin(list(range(8))) as pin:  # one page is not reserved by "b"
        assert pin.num_tokens == 2
    assert reserved(manager, context_of("4", range(300, 320), "b"))


def test_reset_leaves_what_is_held() -> None:
    manager = manager_of({"a": (4, 8)})
    run(manager, context_of("1", range(7), "a"))
    run(manager, context_of("2", range(100, 105), "a"))
    manager.release("2")
    manager.reset_prefix_cache()
    assert held(manager) == {"a": 4}


def test_quotas_are_those_of_each_replica() -> None:
    manager = manager_of({"a": (2, 4)}, data_parallel_degree=2)
    for replica in range(2):
        manager.claim(replica, replica)
        assert manager.reserve(context_of(replica, range(8), "a"))  # type: ignore[arg-type]
    metrics = manager.tenant_metrics["a"]
    assert (metrics.held_pages, metrics.reserved_pages, metrics.max_pages) == (8, 4, 8)


def test_pages_of_all_bundles_count_and_those_behind_windows_do_not() -> None:
    groups = [FullAttention([0]), SlidingWindow([1], 4)]
    manager = manager_of({"a": (0, 40)}, num_pages=60, groups=groups, num_layers=2)
    context = context_of("1", range(20), "a")
    assert reserved(manager, context)
    assert held(manager) == {"a": 20}
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    assert held(manager) == {"a": 12}  # two of ten window pages are left
    given_back = manager.group_metrics[1].given_back
    assert given_back == 8


def test_managers_without_quotas_take_no_notice() -> None:
    manager = manager_of(None)
    run(manager, context_of("1", range(8), "a"))
    assert manager.tenant_metrics == {}
    assert dict(manager.quotas) == {}


@table(
    ("quotas", "error", "text"),
    [
        ({"a": (-1, 4)}, ValueError, "reserved_pages of quotas.'a'. is -1, must be at least 0"),
        ({"a": (5, 4)}, ValueError, "max_pages of quotas.'a'. is 4, must be 5"),
        ({"a": (0, 0)}, ValueError, "max_pages of quotas.'a'. is 0, must be 1"),
        ({"a": (10, None), "b": (7, 9)}, ValueError, "reserve 17 pages in all, .* the 16 of a"),
        ({"a": (0, 2**70)}, ValueError, "max_pages"),
        ({"a": (2**70, None)}, ValueError, "reserve 1180591620717411303424 pages"),
        ({"a": 3}, ValueError, "must be .reserved_pages, max_pages"),
        ({"a": (1, 2, 3)}, ValueError, "must be .reserved_pages, max_pages"),
        ({"a": (1.5, 2)}, TypeError, "reserved_pages of quotas.'a'. is a float"),
        ({"a": (True, 2)}, TypeError, "is a bool"),
        ({"a": (1, "2")}, TypeError, "is a str"),
        ({1: (1, 2)}, TypeError, "tenant 1 of quotas is not a string"),
    ],
)
def test_quotas_that_cannot_be(quotas: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        manager_of(quotas)


def test_a_ceiling_beyond_the_pool_is_none() -> None:
    manager = manager_of({"a": (0, 1000)})
    assert reserved(manager, context_of("1", range(32), "a"))
    assert held(manager) == {"a": 16}


@pytest.mark.parametrize("tenant", [1, b"a", ["a"], object()])
def test_a_tenant_is_a_string(tenant: Any) -> None:
    with pytest.raises(TypeError, match=r"tenant is .*, must be a string or None"):
        context_of("1", range(3), tenant)


def test_a_context_says_its_tenant() -> None:
    class Name(str):
        __slots__ = ()

        def __hash__(self) -> int:
            raise AssertionError

    assert context_of("1", range(3)).tenant is None
    assert context_of("1", range(3), "").tenant == ""
    assert type(context_of("1", range(3), Name("a")).tenant) is str


def test_eight_threads_stay_within_quotas() -> None:
    manager = manager_of({"a": (8, 20), "b": (0, 12), "c": (4, None)}, num_pages=40)

    def serve(seed: int) -> int:
        rng = np.random.default_rng(seed)
        done = 0
        for i in range(40):
            tenant = ("a", "b", "c", None)[int(rng.integers(4))]
            tokens = [*range(int(rng.integers(1, 12))), *rng.integers(0, 9, 4).tolist()]
            context = context_of(f"{seed} {i}", tokens, tenant)
            manager.claim(context.request_id)
            if manager.reserve(context):
                context.update(3)
                manager.step([context])
                done += 1
            assert manager.tenant_metrics["b"].held_pages <= 12
            manager.release(context.request_id)
        return done

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(serve, range(8))) > 0
    assert held(manager) == {"a": 0, "b": 0, "c": 0}
    manager.check_integrity()


def test_a_scheduler_admits_others_and_preempts_the_same_tenant() -> None:
    manager = manager_of({"a": (4, 6), "b": (0, 6)})
    scheduler = Scheduler(manager)
    blocked = [Request(context_of(f"a{i}", range(i * 20, i * 20 + 7), "a"), 5) for i in range(3)]
    other = Request(context_of("b", range(100, 105), "b"), 5)
    for request in (*blocked, other):
        scheduler.add(request)
    with pytest.raises(CapacityError, match="comes to 13 tokens in steps of 1, the pool holds 12"):
        scheduler.add(Request(context_of("never", range(12), "a"), 2))
    batch = scheduler.next_batch()
    assert batch is not None
    assert batch.admitted == [blocked[0], other]
    ended: list[Request] = []
    while batch is not None:
        assert held(manager)["a"] <= 6
        assert other not in batch.preempted
        ended += scheduler.update(batch, np.arange(len(batch.requests)))
        batch = scheduler.next_batch()
    assert {each.finish_reason for each in ended} == {"length"}
    assert len(ended) == 4


def test_a_batch_may_take_a_page_over_whose_owner_has_no_room_for_it() -> None:
    """The pages of that hit count for their owner until the call reaches the hit's row."""
    manager = manager_of({"c": (0, 4), "b": (0, None)})
    first = context_of("first", range(8), "c")
    run(manager, first)
    manager.release("first")  # no request holds these four pages of "c"
    assert reserved(manager, context_of("full", range(50, 58), "c"))
    batch = [context_of("any", [70, 71]), context_of("taker", range(10), "b")]
    for context in batch:
        manager.claim(context.request_id)
    (inputs,) = manager.fetch(batch)
    assert inputs.cache_lengths.tolist() == [0, batch[1].start_idx]
    assert batch[1].start_idx == 8
    assert held(manager) == {"c": 4, "b": 5}
