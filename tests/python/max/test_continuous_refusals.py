# SPDX-License-Identifier: Apache-2.0
"""Refused calls on slots change nothing; calls from many threads."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import error_of
from slot_managers import ROOM, seen, slot_manager
from together import THREADS, run_together, switch_often

__all__ = ["switch_often"]

Manager = kvcore.ContinuousBatchingKVCacheManager


def other_view(manager: Manager) -> Any:
    other = slot_manager()
    other.claim(2)
    return other.fetch_collection([0, 1])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: m.claim(-1), ValueError, "batch_size is -1"),
        (lambda m: m.claim(1.0), TypeError, "float"),
        (lambda m: m.external_claim([3, 4]), ValueError, "slot 4 must be 0 .. 3"),
        (lambda m: m.external_claim([-1]), ValueError, "slot -1 must be 0 .. 3"),
        (lambda m: m.external_claim([3, 3]), ValueError, "holds 3 twice"),
        (lambda m: m.external_claim([3, 1]), kvcore.AlreadyClaimedError, "slot 1"),
        (lambda m: m.external_claim(3), TypeError, "int"),
        (lambda m: m.external_claim("3"), TypeError, "str"),
        (lambda m: m.external_claim(["3"]), TypeError, "str"),
        (lambda m: m.release(2), kvcore.RequestNotFoundError, "sequence 2"),
        (lambda m: m.release(99), kvcore.RequestNotFoundError, "sequence 99"),
        (lambda m: m.release(-1), kvcore.RequestNotFoundError, "sequence -1"),
        (lambda m: m.fetch([0, 2]), kvcore.RequestNotFoundError, "sequence 2"),
        (lambda m: m.fetch([2**70]), kvcore.RequestNotFoundError, str(2**70)),
        (lambda m: m.fetch([0, 1, 0]), ValueError, "holds 0 twice"),
        (lambda m: m.fetch([0.0]), TypeError, "float"),
        (lambda m: m.fetch_collection([0, 3]), kvcore.RequestNotFoundError, "sequence 3"),
        (lambda m: m.fetch_collection([0, 1], [1, 4]), kvcore.CapacityError, "row 1 .* 9 .* 8"),
        (lambda m: m.fetch_collection([0, 1], [1]), ValueError, r"\(1,\) for 2"),
        (lambda m: m.fetch_collection([0, 1], -1), ValueError, "-1"),
        (lambda m: m.fetch_collection([0, 1], 1.5), TypeError, "float"),
        (lambda m: m.step({0: 1, 1: 4}), kvcore.CapacityError, r"5 \+ 4 = 9 .* 8"),
        (lambda m: m.step({0: 1, 2: 1}), kvcore.RequestNotFoundError, "sequence 2"),
        (lambda m: m.step({0: 1, 1: -1}), ValueError, "grow by -1"),
        (lambda m: m.step({0: 1, 1: 0.5}), TypeError, "float"),
        (lambda m: m.step([1, 9], [0, 1]), kvcore.CapacityError, "14"),
        (lambda m: m.step([1], [0, 1]), ValueError, "1 counts for 2"),
        (lambda m: m.step([1, 1], [0, 0]), ValueError, "holds 0 twice"),
        (lambda m: m.step([1, 1]), ValueError, "without seq_ids"),
        (lambda m: m.step({0: 1}, [0]), ValueError, "with a dict"),
        (lambda m: m.step([1, 1], other_view(m)), ValueError, "another manager"),
    ],
)
def test_refused_call_leaves_no_trace(
    call: Callable[[Manager], object], error: type[Exception], words: str
) -> None:
    """Fixed: an unknown id or a length past the slot's end changes no other sequence."""
    manager = slot_manager()
    manager.claim(2)
    manager.step({0: 2, 1: 5})
    before = seen(manager)
    with pytest.raises(error, match=words):
        call(manager)
    assert seen(manager) == before
    assert manager.claim(2) == [2, 3]


def test_not_found_is_what_the_seed_promised() -> None:
    manager = slot_manager()
    assert isinstance(error_of(lambda: manager.fetch([0])), ValueError)
    assert isinstance(error_of(lambda: manager.release(0)), KeyError)


@pytest.mark.parametrize("again", [False, True])
def test_step_with_the_view_of_a_released_sequence(again: bool) -> None:
    manager = slot_manager()
    ids = manager.claim(2)
    views = manager.fetch_collection(ids)
    manager.release(1)
    if again:
        manager.external_claim([1])
    before = seen(manager)
    with pytest.raises(kvcore.InvalidHandleError, match="sequence 1 was released"):
        manager.step([1, 1], views)
    assert seen(manager) == before


# -- threads -------------------------------------------------------------------------------------
@pytest.mark.usefixtures("switch_often")
def test_threads_with_sequences_of_their_own() -> None:
    manager = slot_manager(3 * THREADS, 1000)

    def work(number: int) -> None:
        draw, running = random.Random(number), dict[int, int]()
        for _ in range(200):
            running |= dict.fromkeys(manager.claim(draw.randint(0, 3 - len(running))), 0)
            added = {slot: draw.randint(0, 3) for slot in running}
            manager.step(added)
            for slot, more in added.items():
                running[slot] += more
            (view,) = manager.fetch_collection(running)
            assert view.cache_lengths.tolist() == list(running.values())
            assert all(manager.cache_lengths[slot] == n for slot, n in running.items())
            for slot in [slot for slot in running if draw.random() < 0.5]:
                view.get_key_cache(1).store(list(running).index(slot), 0, ROOM, 1, number)
                assert manager.blocks[0][slot, 0, 1, ROOM, 0, 1] == number
                manager.release(slot)
                del running[slot]
                view = manager.fetch_collection(running)[0]
        for slot in running:
            manager.release(slot)

    run_together(work)
    assert seen(manager) == ([], {}, 3 * THREADS)


@pytest.mark.usefixtures("switch_often")
def test_threads_race_for_the_last_slots() -> None:
    manager = slot_manager(5)
    owner: list[int | None] = [None] * 5
    won, refused = [0] * THREADS, [0] * THREADS

    def work(number: int) -> None:
        for _ in range(300):
            try:
                ids = manager.claim(2)
            except kvcore.CapacityError:
                refused[number] += 1
                continue
            won[number] += 1
            for slot in ids:
                assert owner[slot] is None
                owner[slot] = number
            for slot in ids:
                assert owner[slot] == number
                owner[slot] = None
                manager.release(slot)

    run_together(work)
    assert sum(won) + sum(refused) == 300 * THREADS
    assert sum(won) > 0
    assert seen(manager) == ([], {}, 5)


def test_ids_may_come_from_numpy() -> None:
    manager = slot_manager()
    manager.external_claim(np.array([1, 3], np.uint32))
    manager.step({np.int64(1): np.uint8(2)})
    assert manager.fetch(np.array([3, 1]))[0].cache_lengths.tolist() == [0, 2]
    manager.release(np.int32(3))
    assert manager.cache_lengths == {1: 2}
