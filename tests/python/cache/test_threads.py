# SPDX-License-Identifier: Apache-2.0
"""Any number of threads may call any method of one manager."""

from __future__ import annotations

import random
from typing import Any

import pytest

import kvcore
from builders import make_manager
from seen_resets import SeenResets
from together import THREADS, run_together, switch_often

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

__all__ = ["switch_often"]

pytestmark = pytest.mark.usefixtures("switch_often")


class Worker:
    """Serves its own requests; all threads share the prompts."""

    def __init__(self, resets: SeenResets, number: int, replicas: int) -> None:
        self.manager: kvcore.PagedKVCacheManager = resets.manager
        self.resets, self.number, self.replicas = resets, number, replicas
        self.draw = random.Random(number)
        self.running: list[Any] = []
        self.finished = 0

    def turn(self, n: int) -> None:
        draw, manager = self.draw, self.manager
        if len(self.running) < 4:
            prompt = [draw.randrange(3)] * draw.randint(1, 20) + [draw.randrange(50)] * 3
            context = kvcore.TextGenerationContext((self.number, n), prompt)
            manager.external_claim(context.request_id, replica_idx=draw.randrange(self.replicas))
            self.running.append(context)
        batch = sorted(self.running, key=manager.get_replica)
        if n % 2:
            batch = [c for c in batch if manager.maybe_reserve(c, 2)]
        try:
            self.check(manager.fetch(batch, 2), batch)
        except kvcore.InsufficientBlocksError:
            assert n % 2 == 0, "reserved, yet fetch failed"
            batch = []
        for context in batch:
            context.update(draw.randrange(3))
        manager.step(batch)
        for _ in range(draw.randint(0, 2)):
            if self.running:
                manager.release(self.running.pop(draw.randrange(len(self.running))).request_id)
                self.finished += 1
        self.look(n)

    def check(self, inputs: Any, batch: list[Any]) -> None:
        for replica, entry in enumerate(inputs):
            rows = [c for c in batch if self.manager.get_replica(c) == replica]
            assert entry.cache_lengths.tolist() == [c.start_idx for c in rows]
            for row, context in zip(entry.lookup_table.tolist(), rows, strict=True):
                pages = list(self.manager.get_req_blocks(context.request_id))
                assert row[: len(pages)] == pages

    def look(self, n: int) -> None:
        """Make queries that other threads' work must not upset."""
        manager = self.manager
        self.resets.check_pin([1] * 12)
        assert 0 <= manager.num_free_blocks <= manager.total_num_pages * self.replicas
        if n % 50 == self.number:
            self.resets.reset()
            manager.check_integrity()
            assert manager.metrics.input_tokens > 0


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("blocks", ["allocate", None])
def test_threads_with_their_own_requests(replicas: int, blocks: Any) -> None:
    manager = make_manager(
        4, 120, replicas=replicas, blocks=blocks, max_batch_size=300, enable_runtime_checks=False
    )

    resets = SeenResets(manager)

    def work(number: int) -> None:
        worker = Worker(resets, number, replicas)
        for n in range(250):
            worker.turn(n)
        for context in worker.running:
            manager.release(context.request_id)

    run_together(work)
    manager.check_integrity()
    assert manager.num_free_blocks == 120 * replicas
    assert manager.metrics.cache_tokens > 0


def test_threads_race_for_one_name() -> None:
    manager = make_manager(max_batch_size=300, enable_runtime_checks=False)
    won = [0] * THREADS
    refused = [0] * THREADS

    def work(number: int) -> None:
        for n in range(2000):
            try:
                manager.external_claim(n % 7)
            except kvcore.AlreadyClaimedError:
                refused[number] += 1
            else:
                won[number] += 1
                manager.release(n % 7)

    run_together(work)
    assert sum(won) + sum(refused) == 2000 * THREADS
    manager.check_integrity()
    assert not any(manager.contains(n) for n in range(7))


def test_threads_race_for_the_last_pages() -> None:
    manager = make_manager(1, 20, max_batch_size=300, enable_runtime_checks=False)
    held = [0] * THREADS

    def work(number: int) -> None:
        for n in range(300):
            context = kvcore.TextGenerationContext((number, n), [number] * 5)
            manager.external_claim(context.request_id)
            if manager.maybe_reserve(context):
                held[number] += 1
                manager.fetch([context])
            manager.release(context.request_id)

    run_together(work)
    manager.check_integrity()
    assert manager.num_free_blocks == 20
    assert sum(held) > 0
