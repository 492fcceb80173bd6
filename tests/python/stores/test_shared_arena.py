# SPDX-License-Identifier: Apache-2.0
"""Memory that an arena gives out in pieces: no piece twice, and no piece lost."""

from __future__ import annotations

import gc
import random
import sys
import time
from typing import Any

import numpy as np
import pytest

from kvcore.stores.shared_arena import HEAD_ROOM, SharedArena
from together import run_together, switch_often

__all__ = ["switch_often"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")


def free_bytes(arena: SharedArena) -> int:
    arena._collect()
    return arena._room()


@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_apart_and_come_back(seed: int) -> None:
    arena, draw = SharedArena(1 << 16), random.Random(seed)
    held: list[tuple[Any, Any]] = []
    for _ in range(600):
        if draw.random() < 0.55:
            size = draw.choice([1, 63, 64, 65, 1000, 5000])
            if draw.random() < 0.5:
                found = arena.new_buffer(size)
                if found is None:
                    continue
                begin = arena.find(found.data)
                piece: Any = found
            else:
                piece = arena.taken(size, time.monotonic() - 1)
                try:
                    begin = piece.__enter__()
                except TimeoutError:
                    continue
            assert begin is not None
            used = [(a, a + n) for a, n, _ in (each[0] for each in held)]
            assert all(begin + size <= a or b <= begin for a, b in used)
            held.append(((begin, size, piece), None))
        elif held:
            (_, _, piece), _ = held.pop(draw.randrange(len(held)))
            if not isinstance(piece, np.ndarray):
                piece.__exit__(None, None, None)
            del piece
    for (_, _, piece), _ in held:
        if not isinstance(piece, np.ndarray):
            piece.__exit__(None, None, None)
    held.clear()
    del piece, found
    gc.collect()
    assert free_bytes(arena) == arena.size
    assert len(arena._free) == 1


def test_half_stays_for_batches() -> None:
    arena = SharedArena(1 << 16)
    kept = []
    size = (1 << 10) - HEAD_ROOM
    while (found := arena.new_buffer(size)) is not None:
        kept.append(found)
    assert len(kept) == 32
    with arena.taken(1 << 15, time.monotonic()):
        pass
    view = kept[0][10:20]
    kept.clear()
    del found
    gc.collect()
    assert free_bytes(arena) == arena.size - (1 << 10)  # a view keeps its piece
    view[:] = 7
    arena.close()
    arena.close()
    assert view.tolist() == [7] * 10


@pytest.mark.usefixtures("switch_often")
def test_who_waits_gets_what_others_give_back() -> None:
    arena = SharedArena(1 << 12)

    def work(number: int) -> None:
        for i in range(60):
            with arena.taken(1 << 11, time.monotonic() + 30) as begin:
                arena.view(begin, 1 << 11)[:] = bytes([number]) * (1 << 11)
                time.sleep(0)
                assert bytes(arena.view(begin, 1 << 11)) == bytes([number]) * (1 << 11)
            if i % 7 == 0:
                buffer = arena.new_buffer(100)
                del buffer

    run_together(work)
    assert free_bytes(arena) == arena.size


def test_buffers_that_are_dropped_are_found_by_who_waits() -> None:
    arena = SharedArena(1 << 12)
    buffer = arena.new_buffer(1 << 10)
    began = time.monotonic()
    with pytest.raises(TimeoutError), arena.taken(1 << 12, began + 0.1):
        pass
    assert time.monotonic() - began < 5
    del buffer
    with arena.taken(1 << 12, time.monotonic() + 0.1):
        pass


def test_a_buffer_has_room_in_front_of_it() -> None:
    arena = SharedArena(1 << 14)
    one, two = arena.new_buffer(100), arena.new_buffer(100)
    assert one is not None
    assert two is not None
    begins = [arena.find(each.data) or 0 for each in (one, two)]
    assert abs(begins[0] - begins[1]) >= 100 + HEAD_ROOM
    for begin in begins:
        arena.view(begin - HEAD_ROOM, HEAD_ROOM)[:] = bytes(HEAD_ROOM)
    assert [arena.is_buffer(begins[0], n) for n in (99, 100, 101)] == [False, True, False]
    assert not arena.is_buffer(begins[0] + 1, 99)
    del one
    gc.collect()
    free_bytes(arena)
    assert not arena.is_buffer(begins[0], 100)


def test_memory_of_others_is_not_its_own() -> None:
    arena = SharedArena(1 << 12)
    assert arena.find(memoryview(bytearray(10))) is None
    assert arena.find(memoryview(b"")) is None
    assert arena.find(arena.view(64, 10)) == 64
