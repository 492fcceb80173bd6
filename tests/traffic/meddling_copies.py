# SPDX-License-Identifier: Apache-2.0
"""Hooks before, during and after a manager's copies, and scenes in which it copies."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

import kvcore
from builders import make_manager, make_params
from foreign_context import Context
from kvcore.pools import whole_pages
from same_arrays import assert_same
from written_pool import WrittenPool, codes

PAGE = 4
PHASES = ("before", "middle", "after")
Hook = Callable[[], object]


class Aside:
    """A call in another thread; the thread never outlives a failing test."""

    def __init__(self, call: Hook) -> None:
        self.answer: object = None
        self.error: BaseException | None = None
        self.call = call
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.answer = self.call()
        except BaseException as error:  # noqa: BLE001
            self.error = error

    def still_waits(self) -> bool:
        """Return true if the call still waits after 4 ms; other calls end earlier."""
        self.thread.join(0.004)
        return self.thread.is_alive()

    def result(self) -> object:
        self.thread.join(60)
        assert not self.thread.is_alive(), "a call in another thread waits forever"
        if self.error is not None:
            raise self.error
        return self.answer


def aside(call: Hook) -> object:
    """Return the answer of a call in another thread, which must not wait for this thread."""
    return Aside(call).result()


class Meddler:
    """A wrapper of a copier or mover that calls each hook once."""

    def __init__(self, run: Callable[[Any], Any], spoil: Callable[[Any], None]) -> None:
        self._run, self._spoil = run, spoil
        self.hooks: dict[str, Hook] = {}
        self.runs: list[npt.NDArray[np.int32]] = []

    def run(self, orders: npt.NDArray[np.int32]) -> Any:
        self.runs.append(np.array(orders))
        self._spoil(orders)  # old bytes in the target must not pass for a copy
        self._call("before")
        first = np.array(orders[:1])
        if len(orders) == 1 and orders[0, 3] > 1:
            first[0, 3] //= 2
        self._run(first)
        self._call("middle")
        self._run(orders)
        self._call("after")

    def _call(self, phase: str) -> None:
        hook = self.hooks.pop(phase, None)
        if hook is not None:
            hook()


def copied_by(wrap: Callable[[Any], Any]) -> Any:
    """Return a context in which managers are made whose copier is `wrap` of their own."""
    return mock.patch.object(kvcore.paged, "whole_pages", lambda *of: wrap(whole_pages(*of)))


class MeddlingMover(Meddler):
    """A meddler for the host tier: "middle" is the time after the first page is moved."""

    def run(self, orders: npt.NDArray[np.int32]) -> Any:
        self.runs.append(np.array(orders))
        self._spoil(orders)
        self._call("before")
        self._run(orders[:1])
        self._call("middle")
        mark = self._run(orders)
        self._call("after")
        return mark


class Pages:
    """The expected contents of requests, in the pools of all replicas and shards."""

    def __init__(self, manager: kvcore.PagedKVCacheManager) -> None:
        self.manager = manager
        inputs, shards = manager.fetch([]), manager.params.tensor_parallel_degree
        self.shards = [WrittenPool(manager) for _ in range(shards)]
        for number, shard in enumerate(self.shards):
            shard.blocks = [entry.blocks for entry in inputs[number::shards]]

    def check(self, context: Any, end: int | None = None) -> None:
        """Check that each slot holds the value of its prefix; of long rows, check some elements."""
        end = context.start_idx if end is None else end
        expected = codes(context)[:end, None, None, None, None]
        for shard in self.shards:
            pool, pages, offsets = shard.slots(context, 0, end)
            found = pool[pages, :, :, offsets, :, :: max(1, pool.shape[-1] // 8)]
            assert_same(found, np.broadcast_to(expected, found.shape))

    def write(self, context: Any) -> None:
        begin, end = context.start_idx, context.active_idx
        for shard in self.shards:
            pool, pages, offsets = shard.slots(context, begin, end)
            pool[pages, :, :, offsets] = codes(context)[begin:end, None, None, None, None]

    def spoil(self, replica: int, page: int, tokens: int = PAGE) -> None:
        for shard in self.shards:
            shard.blocks[replica][page, :, :, :tokens] = -1

    def run(self, batch: Sequence[Any], sampled: int = 0) -> None:
        """Run one step of an engine; check the cached tokens before and after the writes."""
        self.manager.fetch(batch)
        for verb in (self.check, self.write):
            for context in batch:
                verb(context)
        for context in batch:
            self.check(context, context.active_idx)
            context.update(sampled)
        self.manager.step(batch)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The kind of contexts and the number of pools."""

    foreign: bool = False
    replicas: int = 1
    shards: int = 1

    def __str__(self) -> str:
        kind = "foreign" if self.foreign else "own"
        return f"{kind}-{self.replicas}-replicas-{self.shards}-shards"


SETUPS = [Setup(), Setup(foreign=True), Setup(replicas=2), Setup(foreign=True, shards=2)]


class Stage:
    """A manager with bytes in its pages, its requests, and meddlers around its copies."""

    def __init__(self, setup: Setup, num_pages: int = 24, host_pages: int = 0) -> None:
        self.setup = setup
        layout: dict[str, Any] = {"replicas": setup.replicas, "shards": setup.shards}
        tier: dict[str, Any] = {}
        if host_pages:
            size = host_pages * make_params(PAGE, **layout).bytes_per_page
            tier = {"host_kvcache_swap_space_gb": size / (1 << 30)}
            tier["enable_kvcache_swapping_to_host"] = True
        with copied_by(self._meddler):
            self.manager: Any = make_manager(
                PAGE, num_pages, blocks="allocate", params=tier, **layout
            )
        self.pages = Pages(self.manager)
        self.replica = setup.replicas - 1
        self.contexts: list[Any] = []
        mover: Any = self.manager._mover
        if mover is not None:
            self.mover = MeddlingMover(mover.run, self._spoil_loads)
            mover.run = self.mover.run

    def _meddler(self, copier: Any) -> Meddler:
        self.copier = Meddler(copier.run, self._spoil_copies)
        return self.copier

    def _spoil_copies(self, orders: Any) -> None:
        for replica, _, target, tokens in orders.tolist():
            self.pages.spoil(replica, target, tokens)

    def _spoil_loads(self, orders: Any) -> None:
        for replica, direction, page, _ in orders.tolist():
            if direction == 1:
                self.pages.spoil(replica, page)

    # -- requests --------------------------------------------------------------------------------
    def new(self, tokens: Sequence[int]) -> Any:
        """Return a context that is not claimed yet."""
        kind = Context if self.setup.foreign else kvcore.TextGenerationContext
        context: Any = kind(f"r{len(self.contexts)}", list(tokens))
        self.contexts.append(context)
        return context

    def claimed(self, tokens: Sequence[int]) -> Any:
        context = self.new(tokens)
        self.manager.external_claim(context.request_id, replica_idx=self.replica)
        return context

    def served(self, tokens: Sequence[int]) -> Any:
        """Return a request whose prompt has run."""
        context = self.claimed(tokens)
        self.pages.run([context])
        return context

    def cached(self, tokens: Sequence[int]) -> None:
        self.manager.release(self.served(tokens).request_id)

    def fork(self, parent: Any, *, more: Sequence[int] = (70,)) -> Any:
        child = self.new([*parent.tokens[: parent.start_idx].tolist(), *more])
        self.manager.fork(parent.request_id, child)
        return child

    def live(self) -> list[Any]:
        return [c for c in self.contexts if self.manager.contains(c.request_id)]

    # -- conditions that must hold ---------------------------------------------------------------
    def state(self) -> dict[str, tuple[int, int, int]]:
        """Return of each claimed request: pages, start, active."""
        return {c.request_id: self.state_of(c) for c in self.live()}

    def state_of(self, context: Any) -> tuple[int, int, int]:
        pages = self.manager.get_req_blocks(context.request_id)
        return len(pages), context.start_idx, context.active_idx

    def close(self) -> None:
        """Run every request to its end and release it; check that all pages are free."""
        self.manager.check_integrity()
        for context in self.live():
            self.pages.run([context])
        for context in self.live():
            self.pages.check(context)
            again = self.claimed([*context.tokens.tolist(), 3])
            self.pages.run([again])
            self.manager.release(context.request_id)
            self.manager.release(again.request_id)
        self.manager.check_integrity()
        total = self.manager.total_num_pages * self.manager.num_replicas
        assert self.manager.num_free_blocks == total
        self.manager.reset_prefix_cache()
        for context in self.contexts:
            tokens = context.tokens.tolist()
            assert self.manager.match_prefix(tokens, replica_idx=self.replica) == 0
        assert self.manager.host_committed_block_pct == 0


@dataclasses.dataclass
class Scene:
    """A call that copies pages, and the request that owns the pages."""

    stage: Stage
    target: Any
    other: Any  # a request that has run; the parent of a fork
    act: Callable[[], Any]
    meddler: Meddler
    #: Other calls on the target wait until the copies are complete.
    blocks: bool = True
    #: After a failed call, the next calls find the state unchanged.
    holds: bool = True


def partial_hit(setup: Setup) -> Scene:
    stage = Stage(setup)
    stage.cached(range(12))
    other = stage.served(range(20, 27))
    target = stage.claimed([*range(7), 50, 51])
    return Scene(stage, target, other, lambda: stage.manager.reserve(target), stage.copier)


def write_after_fork(setup: Setup) -> Scene:
    stage = Stage(setup)
    other = stage.served(range(7))
    target = stage.fork(other)
    return Scene(stage, target, other, lambda: stage.manager.reserve(target), stage.copier)


def write_into_committed(setup: Setup) -> Scene:
    stage = Stage(setup)
    other = stage.served(range(20, 27))
    target = stage.served(range(12))
    stage.manager.truncate(target.request_id, 6)
    target.rewind(6)
    target.update(60)
    return Scene(stage, target, other, lambda: stage.manager.reserve(target), stage.copier)


def host_load(setup: Setup) -> Scene:
    stage = Stage(setup, num_pages=10, host_pages=32)
    stage.cached(range(18))
    stage.cached(range(100, 138))  # evicts the cached prompt
    other = stage.served(range(20, 27))
    target = stage.claimed([*range(14), 50])
    return Scene(stage, target, other, lambda: stage.manager.reserve(target), stage.mover)


def host_store(setup: Setup) -> Scene:
    stage = Stage(setup, host_pages=32)
    other = stage.served(range(20, 27))
    target = stage.claimed(range(13))
    stage.manager.fetch([target])
    stage.pages.write(target)
    target.update(0)
    act = lambda: stage.manager.step([target])  # noqa: E731
    return Scene(stage, target, other, act, stage.mover, blocks=False)


def batch(setup: Setup, verb: str) -> Scene:
    """Return a batch of two rows with copies and one row without; the first is the target."""
    stage = Stage(setup)
    stage.cached(range(12))
    other = stage.served(range(20, 27))
    target = stage.claimed([*range(7), 50, 51])
    rows = [target, stage.fork(other), stage.claimed(range(30, 35))]
    act = lambda: getattr(stage.manager, verb)(rows)  # noqa: E731
    return Scene(stage, target, other, act, stage.copier)


SCENES: dict[str, Callable[[Setup], Scene]] = {
    "partial hit": partial_hit,
    "write after a fork": write_after_fork,
    "write into a committed page": write_into_committed,
    "load from the host": host_load,
    "store to the host": host_store,
    "batch that is reserved": lambda setup: batch(setup, "maybe_reserve_batch"),
    "batch that is fetched": lambda setup: batch(setup, "fetch"),
}
