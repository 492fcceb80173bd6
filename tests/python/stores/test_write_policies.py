# SPDX-License-Identifier: Apache-2.0
"""Times and choices of writes to the host tier, and its eviction order, as Python sees them."""

from __future__ import annotations

from typing import Any

import pytest

import kvcore
from builders import make_manager, with_host
from kvcore import TextGenerationContext, policies
from written_pool import WrittenPool


def tiered(num_pages: int = 8, host_pages: int = 40, **options: Any) -> Any:
    return make_manager(2, num_pages, params=with_host(2, host_pages), blocks="allocate", **options)


def serve(manager: Any, name: str, prompt: list[int], **rest: Any) -> int:
    """Run and release a prompt, and check the values it reads. Return its reused tokens."""
    context = TextGenerationContext(name, prompt, **rest)
    manager.claim(name)
    assert manager.reserve(context)
    reused = context.start_idx
    WrittenPool(manager).run([context], 1)
    manager.release(name)
    return reused


def count_up(first: int, n: int) -> list[int]:
    return list(range(first, first + n))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"write_policy": "write_around"}, "write_policy is"),
        ({"write_threshold": 0}, "write_threshold is 0, must be 1 .. 255"),
        ({"write_threshold": 256}, "write_threshold is 256, must be 1 .. 255"),
        ({"host_min_priority": 10}, "host_min_priority is 10, must be 0 unless"),
        ({"host_min_priority": 101, "eviction": "priority"}, "must be 0 .. 100"),
        ({"host_eviction": "mru"}, "host_eviction is 'mru', must be one of"),
        ({"host_eviction": "priority"}, "host_eviction is priority"),
        ({"host_eviction": "hinted"}, "host_eviction is hinted, must be another policy"),
        ({"host_eviction": "hinted", "eviction": "priority"}, "host_eviction is hinted"),
        ({"host_eviction": "priority", "eviction": "hinted"}, "host_eviction is priority"),
    ],
)
def test_impossible_rules_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        tiered(**options)


@pytest.mark.parametrize("name", ["write_policy", "host_eviction"])
def test_other_things_than_names_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is 3, must be"):
        tiered(**{name: 3})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("write_policy", "write_back"),
        ("write_threshold", 3),
        ("host_eviction", policies.LFU()),
        ("host_min_priority", 60),
    ],
)
def test_rules_of_a_tier_need_one(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is .*, must be left out"):
        make_manager(2, 8, eviction="priority", **{name: value})


def test_write_back_stores_what_makes_room_and_finds_it_again() -> None:
    manager = tiered(write_policy="write_back")
    assert serve(manager, "a", count_up(0, 8)) == 0
    assert manager.metrics.d2h_blocks_copied == 0
    assert serve(manager, "b", count_up(50, 14)) == 0
    assert manager.metrics.d2h_blocks_copied == 4
    assert serve(manager, "again", count_up(0, 8)) == 6
    assert manager.metrics.h2d_blocks_copied > 0


def test_selective_stores_what_came_back() -> None:
    manager = tiered(30, write_policy="write_through_selective", write_threshold=3)
    for n, stored in enumerate([0, 0, 3, 3]):
        serve(manager, f"{n}", count_up(0, 7))
        assert manager.metrics.d2h_blocks_copied == stored


@pytest.mark.parametrize("verb", ["reserve", "fetch"])
def test_a_copy_that_fails_raises_once_and_keeps_no_page(verb: str) -> None:
    manager = tiered(write_policy="write_back")
    serve(manager, "a", count_up(0, 14))
    mover, tries = manager._mover, []
    run = mover.run

    def broken(orders: Any) -> None:
        tries.append(len(orders))
        raise OSError("no link")

    mover.run = broken
    context = TextGenerationContext("b", count_up(50, 15))
    manager.claim("b")
    argument = context if verb == "reserve" else [context]
    with pytest.raises(OSError, match="no link"):
        getattr(manager, verb)(argument)
    manager.check_integrity()
    assert getattr(manager, verb)(argument), "offered pages are evicted without a copy"
    assert tries == [7]
    mover.run = run
    assert manager.metrics.d2h_blocks_copied == 0
    assert context.start_idx == 0


def test_code_that_copies_does_not_wait_for_itself() -> None:
    manager = tiered(write_policy="write_back")
    serve(manager, "a", count_up(0, 16))
    mover = manager._mover
    run = mover.run
    seen: list[Any] = []
    other = TextGenerationContext("c", count_up(80, 6))

    def meddling(orders: Any) -> None:
        if not seen:
            manager.claim("c")
            with pytest.raises(kvcore.PendingTransfersError) as error:
                manager.reserve(other)
            seen.append(error)
        run(orders)

    mover.run = meddling
    context = TextGenerationContext("b", count_up(50, 4))
    manager.claim("b")
    assert manager.reserve(context)
    assert manager.reserve(other)
    assert len(seen) == 1


def test_a_request_that_goes_meanwhile_is_not_found() -> None:
    manager = tiered(write_policy="write_back")
    serve(manager, "a", count_up(0, 16))
    mover = manager._mover
    run = mover.run

    def releasing(orders: Any) -> None:
        run(orders)
        manager.release("b")
        manager.reset_prefix_cache()

    mover.run = releasing
    context = TextGenerationContext("b", count_up(50, 4))
    manager.claim("b")
    with pytest.raises(kvcore.RequestNotFoundError):
        manager.reserve(context)
    manager.check_integrity()
    assert manager.num_free_blocks == 8
    assert manager.host_committed_block_pct == 0


def test_imports_make_room_in_the_same_way() -> None:
    source = make_manager(2, 8, blocks="allocate")
    context = TextGenerationContext("moved", count_up(50, 9))
    source.claim("moved")
    source.fetch([context])
    context.update(1)
    source.step([context])
    saved = source.export_sequence("moved")
    manager = tiered(write_policy="write_back")
    serve(manager, "a", count_up(0, 16))
    copy = TextGenerationContext("moved", [*count_up(50, 9), 1])
    assert manager.import_sequence(copy, saved)
    assert manager.metrics.d2h_blocks_copied == 8


def test_a_tier_evicts_by_its_own_policy() -> None:
    for eviction, reused in (("lru", 0), (policies.LFU(), 4)):
        manager = tiered(3, 4, host_eviction=eviction)
        for name, first in (("a", 0), ("b", 20), ("a again", 0), ("c", 40), ("d", 60)):
            serve(manager, name, count_up(first, 5))
        assert serve(manager, "last", count_up(0, 5)) == reused


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_a_tier_evicts_by_hints(write_policy: str) -> None:
    options = {"host_eviction": "hinted", "eviction": "hinted", "write_policy": write_policy}
    for hints, reused in ((("soon", "never"), 4), (("never", "soon"), 0), ((None, None), 0)):
        manager = tiered(3, 4, **options)
        serve(manager, "a", count_up(0, 5), returns_in=hints[0])
        serve(manager, "b", count_up(20, 5), returns_in=hints[1])
        serve(manager, "c", count_up(40, 5), returns_in="never")
        serve(manager, "d", count_up(60, 5), returns_in="never")
        assert serve(manager, "last", count_up(0, 5)) == reused


def test_pages_of_lower_priority_stay_on_the_device() -> None:
    manager = tiered(20, eviction="priority", host_min_priority=60)
    for name, priority, stored in (("low", 50, 0), ("high", 60, 3), ("higher", 90, 6)):
        context = TextGenerationContext(name, count_up(priority, 6), priority=priority)
        manager.claim(name)
        manager.fetch([context])
        context.update(1)
        manager.step([context])
        assert manager.metrics.d2h_blocks_copied == stored
        manager.release(name)
