# SPDX-License-Identifier: Apache-2.0
"""Threads run their own requests, and release, fork, truncate and reset other threads' requests."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import make_manager, with_host
from foreign_context import Context
from meddling_copies import Pages, copied_by
from together import THREADS, run_together, switch_often

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

__all__ = ["switch_often"]

pytestmark = pytest.mark.usefixtures("switch_often")

TURNS = 250  # per thread

GONE = (kvcore.RequestNotFoundError, kvcore.InvalidHandleError)


class CopyFailedError(OSError):
    """A copy that fails."""


class Served:
    """A request, and the changes that other threads made to it.

    If a thread freed the request's pages while the owner writes, the owner would write into another
    request's pages; so both threads hold the lock. Calls that copy run without the lock.
    """

    def __init__(self, context: Any) -> None:
        self.context = context
        self.lock = threading.Lock()
        self.cut: int | None = None  # tokens left by a truncation


class Shop:
    """The state that the threads share."""

    def __init__(self, manager: Any, replicas: int, turns: int) -> None:
        self.manager, self.replicas = manager, replicas
        self.pages = Pages(manager)
        self.open: list[Served] = []
        self.lock = threading.Lock()
        self.turns = turns

    def add(self, served: Served) -> None:
        with self.lock:
            self.open.append(served)

    def any(self, draw: random.Random) -> Served | None:
        with self.lock:
            contains = self.manager.contains
            self.open = [s for s in self.open if contains(s.context.request_id)]
            return draw.choice(self.open) if self.open else None


class Worker:
    """Serves its own requests, and changes other threads' requests."""

    def __init__(self, shop: Shop, number: int) -> None:
        self.shop, self.number = shop, number
        self.manager, self.pages = shop.manager, shop.pages
        self.draw = random.Random(number)
        self.running: list[Served] = []
        self.count = 0

    def work(self) -> None:
        for _ in range(self.shop.turns):
            self.turn()
        for served in self.running:
            self.let_go(served)

    def turn(self) -> None:
        if len(self.running) < 3:
            self.arrive()
        chosen = [s for s in self.running if self.draw.random() < 0.7]
        if self.draw.random() < 0.4:
            chosen = [s for s in chosen if self.reserve(s)]
        self.iterate([s for s in chosen if self.keep_up(s)])
        self.meddle()
        if self.running and self.draw.random() < 0.3:
            self.let_go(self.running.pop(self.draw.randrange(len(self.running))))
        self.running = [s for s in self.running if self.manager.contains(s.context.request_id)]

    def name(self) -> tuple[int, int]:
        self.count += 1
        return self.number, self.count

    def arrive(self) -> None:
        draw = self.draw
        prompt = [draw.randrange(2)] * draw.randint(1, 15) + [draw.randrange(3, 9)] * 3
        kind = Context if draw.random() < 0.3 else kvcore.TextGenerationContext
        served = Served(kind(self.name(), prompt))
        replica = draw.randrange(self.shop.replicas)
        self.manager.external_claim(served.context.request_id, replica_idx=replica)
        self.adopt(served)

    def adopt(self, served: Served) -> None:
        self.running.append(served)
        self.shop.add(served)

    def let_go(self, served: Served) -> None:
        with served.lock, contextlib.suppress(*GONE):
            self.manager.release(served.context.request_id)

    def keep_up(self, served: Served) -> bool:
        """Rewind a truncated context; return false if the request is gone."""
        with served.lock:
            if served.cut is not None:
                served.context.rewind(max(1, min(served.cut, served.context.end_idx)))
                served.cut = None
            return bool(self.manager.contains(served.context.request_id))

    def reserve(self, served: Served) -> bool:
        try:
            return bool(self.manager.maybe_reserve(served.context, self.draw.randint(1, 2)))
        except (*GONE, CopyFailedError):
            return False

    def iterate(self, batch: list[Served]) -> None:
        """Fetch a batch, then write and commit the requests that still exist."""
        try:
            self.manager.fetch([served.context for served in batch])
        except (*GONE, kvcore.InsufficientBlocksError, CopyFailedError):
            return
        for served in batch:
            with served.lock:
                if served.cut is None and self.manager.contains(served.context.request_id):
                    self.write(served.context)

    def write(self, context: Any) -> None:
        self.pages.check(context)
        self.pages.write(context)
        self.pages.check(context, context.active_idx)
        context.update(self.draw.randrange(2))
        swaps = self.manager.step([context])
        assert swaps.shape[1] == 3
        self.pages.check(context)

    # -- changes by other threads ----------------------------------------------------------------
    def meddle(self) -> None:
        draw, served = self.draw, self.shop.any(self.draw)
        if served is None:
            return
        verb = draw.choice(["release", "fork", "fork", "truncate", "truncate", "reset", "look"])
        try:
            getattr(self, verb)(served)
        except (*GONE, kvcore.CapacityError, CopyFailedError):
            pass

    def release(self, served: Served) -> None:
        if self.draw.random() < 0.3:
            self.let_go(served)

    def fork(self, parent: Served) -> None:
        """Fork a request; this thread owns the child."""
        if len(self.running) > 4:
            return
        kind = Context if self.draw.random() < 0.3 else kvcore.TextGenerationContext
        with parent.lock:
            if parent.cut is not None:
                return
            tokens = [*parent.context.tokens.tolist(), self.draw.randrange(3)]
            child = Served(kind(self.name(), tokens))
            self.manager.fork(parent.context.request_id, child.context)
        self.adopt(child)

    def truncate(self, served: Served) -> None:
        with served.lock:
            n = self.draw.randint(0, served.context.start_idx)
            try:
                self.manager.truncate(served.context.request_id, n)
            except GONE:
                raise
            except ValueError as error:  # the request has no written tokens yet
                assert "cannot be truncated" in str(error)
            else:
                served.cut = n if served.cut is None else min(n, served.cut)

    def reset(self, served: Served) -> None:
        if self.draw.random() < 0.03:
            self.manager.reset_prefix_cache()

    def look(self, served: Served) -> None:
        name = served.context.request_id
        pages = self.manager.get_req_blocks(name)
        assert len(set(pages)) == len(pages)
        self.manager.get_replica(served.context)
        if self.draw.random() < 0.1:
            self.manager.check_integrity()


class InPieces:
    """Copies page by page, so that other threads run in between; sometimes a copy fails."""

    def __init__(self, run: Any, fails: float) -> None:
        self._run, self.fails = run, fails
        self.draw = random.Random(0)

    def run(self, orders: Any) -> None:
        for order in orders:
            if self.draw.random() < self.fails:
                raise CopyFailedError
            self._run(np.array([order]))
            time.sleep(0)


@dataclasses.dataclass(frozen=True)
class Case:
    replicas: int = 1
    host_pages: int = 0
    fails: float | None = None  # None: the library's own copier
    head_dim: int = 2  # from 2048 on, other threads run during a copy

    def __str__(self) -> str:
        return "-".join(map(str, dataclasses.astuple(self)))


def serve(case: Case, turns: int) -> None:
    replicas, host_pages, fails = case.replicas, case.host_pages, case.fails
    with copied_by(lambda copier: copier if fails is None else InPieces(copier.run, fails)):
        manager: Any = make_manager(
            4,
            48,
            replicas=replicas,
            blocks="allocate",
            max_batch_size=THREADS * 16 * replicas,
            params=with_host(4, host_pages, head_dim=case.head_dim),
            enable_runtime_checks=False,
        )
    shop = Shop(manager, replicas, turns)
    if fails is not None and host_pages:
        manager._mover.run = InPieces(manager._mover.run, fails).run
    workers = [Worker(shop, number) for number in range(THREADS)]
    run_together(lambda number: workers[number].work())
    manager.check_integrity()
    metrics = manager.metrics
    assert metrics.copied_tokens > 0
    assert bool(host_pages) == (metrics.d2h_blocks_copied > 0)
    assert manager.num_free_blocks == 48 * replicas
    manager.reset_prefix_cache()
    manager.check_integrity()
    assert manager.host_committed_block_pct == 0
    assert "0 requests" in repr(manager)


CASES = [
    Case(),
    Case(head_dim=2048),
    Case(fails=0.0),
    Case(replicas=2, fails=0.1),
    Case(host_pages=40, fails=0.0),
    Case(replicas=2, host_pages=200),
    Case(host_pages=40, fails=0.1),
]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.CRITICAL, "kvcore")  # hides warnings of unstored pages
    return request.param


def test_threads_meddle_with_each_others_requests(case: Case) -> None:
    serve(case, TURNS)


@pytest.mark.slow
def test_threads_meddle_for_long(case: Case) -> None:
    serve(case, 15 * TURNS)
