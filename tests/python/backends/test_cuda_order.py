# SPDX-License-Identifier: Apache-2.0
"""The order of streams that use a manager's pools, with per-thread streams and bad events."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from cuda_machine import Machine, require_emulation
from kvcore import KVCacheError, KVCacheParams, PagedKVCacheManager, TextGenerationContext, ops

KERNELS = require_emulation()

PER_THREAD = 2  # the handle of each thread's own default stream


def manager_of(pages: int = 1) -> PagedKVCacheManager:
    params = KVCacheParams("float32", 1, 4, num_layers=1, page_size=4)
    return PagedKVCacheManager(params, 2, 16, devices=["cuda:0"], num_pages=pages)


class Turns:
    """Successive requests that use the same page, and the values that each request read."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.manager = manager_of()
        self.seen = machine.memory((4, 4, 1, 4), np.float32)

    def run(self, turn: int) -> None:
        machine = self.machine
        context = TextGenerationContext(turn, [turn] * 4)
        self.manager.claim(turn)
        (inputs,) = self.manager.fetch([context])
        tokens = machine.array(np.full((4, 1, 4), turn + 1, np.float32))
        ops.append(inputs, 0, tokens, tokens, np.array([0, 4], np.uint32))
        out = self.seen[turn], machine.memory((4, 1, 4), np.float32)
        ops.gather(inputs, 0, lengths=np.array([4], np.uint32), out=out)
        self.manager.release(turn)


@pytest.mark.parametrize("others", ["own", "legacy", "made"])
@pytest.mark.parametrize("seed", range(10))
def test_default_streams_of_threads_are_ordered(machine: Machine, seed: int, others: str) -> None:
    """All default streams have the same handle; a stream of another kind runs between them."""
    turns = Turns(machine)
    stream = KERNELS.Stream(0)
    machine.in_any_order(seed)
    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(2)]
        for turn in range(4):
            machine.streams[0] = PER_THREAD
            if turn % 2 == 1 and others != "own":
                machine.streams[0] = 0 if others == "legacy" else stream.ptr
            threads[turn % 2].submit(turns.run, turn).result()
    assert machine.host(turns.seen)[:, 0, 0, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(5))
def test_a_thread_that_takes_another_stream_is_behind_its_own(machine: Machine, seed: int) -> None:
    turns = Turns(machine)
    stream = KERNELS.Stream(0)
    machine.in_any_order(seed)
    for turn in range(4):
        machine.streams[0] = PER_THREAD if turn % 2 == 0 else stream.ptr
        turns.run(turn)
    assert machine.host(turns.seen)[:, 0, 0, 0].tolist() == [1, 2, 3, 4]


# ---- streams that are gone, or captured ----------------------------------------------------------
@pytest.mark.parametrize("seed", range(10))
def test_a_stream_that_is_destroyed_leaves_its_work_in_order(machine: Machine, seed: int) -> None:
    """The manager still works: it does not own its last stream."""
    turns = Turns(machine)
    machine.in_any_order(seed)
    for turn in range(4):
        stream = KERNELS.Stream(0)
        machine.streams[0] = stream.ptr
        turns.run(turn)
        del stream
    machine.streams.clear()
    assert machine.host(turns.seen)[:, 0, 0, 0].tolist() == [1, 2, 3, 4]
    for turn in range(4, 7):
        context = TextGenerationContext(turn, [turn] * 4)
        turns.manager.claim(turn)
        turns.manager.fetch([context])
        turns.manager.release(turn)


def test_a_last_stream_that_is_captured_is_not_joined(machine: Machine) -> None:
    """A call cannot wait for work from before the capture: it is refused until the capture ends."""
    manager, first, second = manager_of(4), KERNELS.Stream(0), KERNELS.Stream(0)
    context = TextGenerationContext("a", [1, 2, 3])
    manager.claim("a")
    machine.streams[0] = first.ptr
    manager.fetch([context])
    pages = manager.get_req_blocks("a")
    KERNELS.emulation.begin_capture(0, first.ptr)
    machine.streams[0] = second.ptr
    for _ in range(2):
        with pytest.raises(ValueError, match="called on last is captured into a graph"):
            manager.fetch([context])
    assert not KERNELS.is_capturing(0, second.ptr)
    graph = KERNELS.emulation.end_capture(0, first.ptr)
    KERNELS.emulation.replay(graph, 0, second.ptr)
    assert KERNELS.emulation.num_waiting() == 0, "something was captured"
    (inputs,) = manager.fetch([context])
    assert manager.get_req_blocks("a") == pages
    assert machine.host(inputs.lookup_table)[0, :1].tolist() == pages


# ---- events --------------------------------------------------------------------------------------
class Event:
    """An event of another library that has only a handle."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle


def test_a_bad_event_is_refused_where_it_is_given(machine: Machine) -> None:
    """A later fetch ignores the refused event."""
    manager = manager_of(4)
    context = TextGenerationContext("a", [1, 2, 3])
    manager.claim("a")
    manager.claim("b")
    with pytest.raises(KVCacheError, match=r"wait for an event: .*code 400"):
        manager.release("a", after=Event(12345))
    assert manager.contains("a")
    manager.release("b")
    for _ in range(2):
        manager.fetch([context])
        context.update(1)
        manager.step([context])


def test_a_stream_that_is_captured_is_refused(machine: Machine) -> None:
    manager, stream = manager_of(), KERNELS.Stream(0)
    manager.claim("a")
    KERNELS.emulation.begin_capture(0, stream.ptr)
    with pytest.raises(ValueError, match="after is a stream that is captured into a graph"):
        manager.release("a", after=stream)
    assert manager.contains("a")


@pytest.mark.parametrize("seed", range(10))
def test_an_event_stands_for_what_it_did_when_it_was_given(machine: Machine, seed: int) -> None:
    """The owner may record or destroy the event afterwards."""
    turns = Turns(machine)
    other, slow = KERNELS.Stream(0), KERNELS.Stream(0)
    event = KERNELS.Event(0)
    read = machine.memory((4, 1, 4), np.float32)
    machine.in_any_order(seed)
    manager = turns.manager
    manager.claim("a")
    (inputs,) = manager.fetch([TextGenerationContext("a", [1] * 4)])
    tokens = machine.array(np.full((4, 1, 4), 9, np.float32))
    ops.append(inputs, 0, tokens, tokens, np.array([0, 4], np.uint32))
    KERNELS.record(event.ptr, 0, 0)
    KERNELS.wait(event.ptr, 0, other.ptr)
    out = read, machine.memory((4, 1, 4), np.float32)
    ops.gather(inputs, 0, lengths=np.array([4], np.uint32), out=out, stream=other)
    KERNELS.record(event.ptr, 0, other.ptr)
    manager.release("a", after=event)
    KERNELS.record(event.ptr, 0, slow.ptr)
    del event
    turns.run(0)
    assert (machine.host(read) == 9).all()
