# SPDX-License-Identifier: Apache-2.0
"""Stores to the host tier on (emulated) GPUs: only calls that need a stored page wait."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from builders import in_groups
from cuda_machine import Machine, emulated, require_emulation
from grouped_traffic import WRITE_POLICIES, params_of, with_host_tier
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext, ops
from kvcore.backends.cuda.mover import GpuMover
from kvcore.backends.cuda.pools import GpuPools
from kvcore.backends.protocol import STORE
from kvcore.device import Device
from kvcore.groups import FullAttention, SlidingWindow
from store_clock import ClockedTraffic

KERNELS = require_emulation()

FLAT = KVCacheParams("float32", 1, 4, num_layers=2, page_size=2, enable_prefix_caching=True)
WINDOWS = params_of(FullAttention([0]), SlidingWindow([1], 4))


class Scene:
    """Prompts of equal tokens on a GPU, with these tokens as K and V, and delayed stores."""

    def __init__(
        self, machine: Machine, params: KVCacheParams = FLAT, num_pages: int = 20, **options: Any
    ) -> None:
        self.machine = machine
        self.manager = PagedKVCacheManager(
            with_host_tier(params, 40), 4, 64, devices=["cuda:0"], num_pages=num_pages,
            enable_runtime_checks=True, **in_groups(options),
        )  # fmt: skip
        self.layers = [i for group in params.attention_groups for i in group.layers]

    @property
    def stream(self) -> int:
        return self.machine.streams.get(0, 0)

    def begin(self, token: int, n: int) -> TextGenerationContext:
        context = TextGenerationContext(token, [token] * n)
        self.manager.claim(token)
        return context

    def fetch(self, context: TextGenerationContext) -> Any:
        (inputs,) = self.manager.fetch([context])
        n = context.active_idx - context.start_idx
        for layer in self.layers:
            rows = self.machine.array(np.full((n, 1, 4), context.request_id, np.float32))
            ops.append(inputs, layer, rows, rows, np.array([0, n], np.uint32))
        return inputs

    def step(self, context: TextGenerationContext) -> None:
        self.fetch(context)
        context.update(int(context.tokens[0]))
        self.manager.step([context])

    def serve(self, token: int, n: int) -> None:
        self.step(self.begin(token, n))
        self.manager.release(token)

    def block_stores(self) -> Callable[[], bool]:
        """Delay the stores beyond all other work; return a function that checks if they ran."""
        mover: Any = self.manager._mover
        lane = mover._stores[0].stream
        slow, event = KERNELS.Stream(0), KERNELS.Event(0)
        address = self.machine.memory((2,), np.uint8).data.ptr
        for _ in range(1000):
            KERNELS.copy(address, address + 1, 1, 0, slow.ptr)
        KERNELS.record(event.ptr, 0, slow.ptr)
        KERNELS.wait(event.ptr, 0, lane.ptr)
        return lambda: bool(KERNELS.query(event.ptr, event.device))

    def finish(self) -> None:
        """Block until the current stream has finished its work."""
        KERNELS.synchronize(0, self.stream)


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("params", [FLAT, WINDOWS], ids=["flat", "windows"])
def test_steps_go_on_while_stores_of_steps_before_wait(
    machine: Machine, params: KVCacheParams, by_layer: bool
) -> None:
    scene = Scene(machine, params, layerwise_loads=by_layer)
    machine.in_any_order(seed=1)
    have_run = scene.block_stores()
    context = scene.begin(1, 5)
    for _ in range(8):  # four steps store pages, four steps take new pages
        scene.step(context)
    assert scene.manager.metrics.d2h_blocks_copied >= 6
    scene.finish()
    assert not have_run()


def test_whoever_is_handed_a_page_waits_for_its_store(machine: Machine) -> None:
    scene = Scene(machine, num_pages=4)
    machine.in_any_order(seed=1)
    have_run = scene.block_stores()
    scene.serve(1, 5)
    scene.finish()
    assert not have_run()  # one page is free and has no store in flight
    scene.fetch(scene.begin(2, 1))
    scene.finish()
    assert not have_run()
    scene.fetch(scene.begin(3, 5))
    scene.finish()
    assert have_run()


def test_one_who_waits_does_not_wait_for_later_stores(machine: Machine) -> None:
    scene = Scene(machine, num_pages=8)
    machine.in_any_order(seed=1)
    scene.serve(1, 9)
    have_run = scene.block_stores()
    scene.serve(2, 7)
    scene.fetch(scene.begin(3, 3))  # takes pages of the first prompt
    assert scene.manager.match_prefix([1] * 9) < 8
    assert scene.manager.match_prefix([2] * 7) == 6
    scene.finish()
    assert not have_run()


def test_a_load_waits_for_the_store_of_its_pages_alone(machine: Machine) -> None:
    scene = Scene(machine, num_pages=8)
    machine.in_any_order(seed=1)
    scene.serve(1, 5)
    scene.serve(9, 15)  # takes the whole pool
    assert scene.manager.match_prefix([1] * 5) == 0
    scene.manager.reset_metrics()
    kept = scene.manager.hold(scene.manager.match_prefix([9] * 15, return_pages=True)[1][:1])
    have_run = scene.block_stores()
    scene.serve(2, 3)
    inputs = scene.fetch(scene.begin(1, 5))
    assert scene.manager.metrics.h2d_blocks_copied == 2
    found = tuple(machine.memory((5, 1, 4), np.float32) for _ in "kv")
    ops.gather(inputs, 0, lengths=np.array([5], np.uint32), out=found)
    scene.finish()
    assert not have_run()
    assert (machine.view(found[0]) == 1).all()
    kept.let_go()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("by_layer", [False, True])
def test_a_page_comes_back_while_its_store_waits(
    machine: Machine, by_layer: bool, seed: int
) -> None:
    scene = Scene(machine, num_pages=4, layerwise_loads=by_layer)
    machine.in_any_order(seed)
    scene.block_stores()
    for token in (1, 2):  # each prompt takes the previous prompt's pages
        scene.serve(token, 7)
    inputs = scene.fetch(scene.begin(1, 7))
    assert scene.manager.metrics.h2d_blocks_copied == 3
    found = tuple(machine.memory((7, 1, 4), np.float32) for _ in "kv")
    ops.gather(inputs, 1, lengths=np.array([7], np.uint32), out=found)
    assert (machine.host(found[0]) == 1).all()


# ---- movers --------------------------------------------------------------------------------------
class Moves:
    """A pool of 8 pages on a GPU, filled with their page ids, and a tier of 8 pages."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        rows = np.arange(8, dtype=np.uint8).repeat(64).reshape(8, 1, 1, 1, 1, 64)
        self.pool = machine.array(rows)
        devices = (Device.parse("cuda:0"),)
        self.mover = GpuMover(
            [[(self.pool, None)]], devices, 8, GpuPools(devices, 1), late_reads=lambda _: 0
        )

    def store(self, pairs: list[tuple[int, int]]) -> int:
        return self.mover.run(np.array([(0, STORE, *pair) for pair in pairs], np.int32))

    def load(self, pairs: list[tuple[int, int]]) -> int:
        return self.mover.run(np.array([(0, 1 - STORE, *pair) for pair in pairs], np.int32))

    def pages(self) -> list[int]:
        return [int(page) for page in self.machine.host(self.pool)[:, 0, 0, 0, 0, 63]]


def test_marks_rise_with_stores_and_loads_have_none(machine: Machine) -> None:
    moves = Moves(machine)
    assert [moves.store([(i, i)]) for i in range(3)] == [1, 2, 3]
    assert moves.load([(0, 0)]) == 0
    assert moves.store([(3, 3)]) == 4


@pytest.mark.parametrize("seed", range(8))
def test_loads_are_behind_the_stores_that_wrote_their_pages(machine: Machine, seed: int) -> None:
    moves = Moves(machine)
    machine.in_any_order(seed)
    moves.store([(1, 0), (2, 1)])
    moves.store([(3, 2), (4, 0)])
    moves.load([(6, 0), (7, 1)])
    moves.load([(5, 2)])
    assert moves.pages() == [0, 1, 2, 3, 4, 3, 4, 2]


def test_a_second_store_does_not_come_in_between() -> None:
    """Threads with their own streams share the event that the stores wait for."""
    assert stored_beside_another(seed=1) == 99


def stored_beside_another(seed: int) -> int:
    """Write and store a page in the middle of another thread's store, if the lock allows it."""
    with emulated() as machine, pytest.MonkeyPatch.context() as patch:
        moves = Moves(machine)
        machine.in_any_order(seed)
        mine, others = KERNELS.Stream(0), KERNELS.Stream(0)
        ready, record = moves.mover._ready[0].ptr, KERNELS.record
        is_recorded, is_overwritten = Event(), Event()
        threads: list[Thread] = []

        def store_mine() -> None:
            machine.streams[0] = mine.ptr
            for value in range(100):
                KERNELS.fill(moves.pool.data.ptr + 64, value, 64, 0, mine.ptr)
            moves.store([(1, 1)])

        def recorded(event: int, device: int, stream: int) -> None:
            if event == ready and not threads:
                threads.append(Thread(target=store_mine))
                threads[0].start()
                is_recorded.wait(0.05)  # the lock prevents the second record
                record(event, device, stream)
                is_overwritten.set()
                return
            record(event, device, stream)
            if event == ready:
                is_recorded.set()
                is_overwritten.wait()

        machine.streams[0] = others.ptr
        patch.setattr(KERNELS, "record", recorded)
        moves.store([(2, 2)])
        threads[0].join()
        moves.mover.wait(0)
        return int(moves.mover.memory(0)[1, 63])


# ---- random traffic ------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_fetches_are_behind_what_they_have_to_be(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, policy: str, by_layer: bool, seed: int
) -> None:
    params = with_host_tier(FLAT, 60)
    traffic = ClockedTraffic(
        machine, params, seed, monkeypatch, layerwise_loads=by_layer, write_policy=policy
    )
    machine.in_any_order(seed)
    traffic.act(["claim", "step", "step", "step", "release", "crowd_out"], 250)
    traffic.look()
    assert traffic.read > 500
    assert traffic.clock.stores >= 8
    assert traffic.handed_out > 0
    if policy == "write_through":
        assert traffic.lags > 20
    traffic.end()
