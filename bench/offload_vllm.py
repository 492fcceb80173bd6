# SPDX-License-Identifier: Apache-2.0
"""Measure the calls of an offloading manager: vLLM's manager for host memory, and kvcore's.

Times are CPU time of the thread. The managers run in turn, and no sample is left out. The tier is
full. A request stores its `CHUNKS` chunks, which evicts `CHUNKS` other chunks, and ends. A second
request looks up the same chunks, loads them and ends. The bench has the same requirements as
``bench/engine_vllm.py``.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from statistics import median
from time import thread_time_ns
from typing import Any

from engine_vllm import prepare
from harness import Row, main, make_row, quiet

CHUNKS = 512
SLOTS = 32_768


class Side:
    """A full tier, and the time of each kind of call, in us per chunk."""

    def __init__(self, who: str, slots: int) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        from kvcore.integrations.vllm.offload_manager import KVCoreOffloadingManager

        self.who = who
        self.manager: Any = {"vLLM": CPUOffloadingManager, "kvcore": KVCoreOffloadingManager}[who](
            slots
        )
        self.count = 0
        self.spent: dict[str, float] = {}
        for _ in range(slots // CHUNKS + 2):
            self.run()

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = thread_time_ns()
        yield
        self.spent[what] = (thread_time_ns() - start) / 1e3 / CHUNKS

    def begin(self, count: int) -> tuple[Any, list[Any]]:
        """Return a request and the keys of its chunks."""
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key

        context = ReqContext(f"{count} {self.count}")
        keys = [make_offload_key(sha256(b"%d %d" % (count, i)).digest(), 0) for i in range(CHUNKS)]
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (i + 1))
        self.manager.on_new_request(context)
        return context, keys

    def run(self) -> dict[str, float]:
        """Store a new request, then load it; return the times."""
        self.count += 1
        context, keys = self.begin(self.count)
        with self.timed("miss"):
            for key in keys:
                self.manager.lookup(key, context)
        with self.timed("store"):
            taken = self.manager.prepare_store(keys, context)
            self.manager.complete_store({*taken.keys_to_store}, context)
            self.manager.on_request_finished(context)
        context, keys = self.begin(self.count)
        with self.timed("hit"):
            for key in keys:
                self.manager.lookup(key, context)
        with self.timed("load"):
            self.manager.prepare_load(keys, context)
            self.manager.complete_load({*keys}, context)
            self.manager.on_request_finished(context)
        return dict(self.spent)


WORK = {
    "miss": "lookup of a chunk that is not there",
    "hit": "lookup of a chunk that is there",
    "store": "store and evict, of each chunk",
    "load": "load, of each chunk",
}


def measure(options: Namespace) -> list[Row]:
    """Measure both sides in turn."""
    prepare()
    slots, rounds = (2048, 6) if options.quick else (SLOTS, 60)
    sides = [Side(who, slots) for who in ("vLLM", "kvcore")]
    with quiet():
        found = [
            (side.who, side.run()) for i in range(rounds) for side in sides[:: 1 - 2 * (i % 2)]
        ]
    rows: list[Row] = []
    for key, work in WORK.items():
        times = {
            side.who: [spent[key] for who, spent in found if who == side.who] for side in sides
        }
        for who, each in times.items():
            limit = {"limit": median(times["vLLM"]), "limit_name": "vLLM"} if who != "vLLM" else {}
            rows.append(make_row(f"offload.{key}.{who.lower()}", f"{work}: {who}", each, **limit))
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
