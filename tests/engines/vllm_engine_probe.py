# SPDX-License-Identifier: Apache-2.0
"""A plug-in of vLLM that writes which manager a scheduler has, and its blocks in use.

vLLM loads plug-ins in each of its processes; only the process with a scheduler writes. A line of
JSON is appended to the file that ``KVCORE_PROBE`` names, whenever no request is left.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def register() -> None:
    """Wrap the methods of vLLM's scheduler after which requests may have ended."""
    path = os.environ.get("KVCORE_PROBE")
    if not path:
        return
    from vllm.v1.core.sched import scheduler

    made = scheduler.Scheduler
    if hasattr(made, "kvcore_probe"):
        return
    made.kvcore_probe = Probe(Path(path))
    wrap(made, "_preempt_request", lambda self: made.kvcore_probe.count_preemption())
    for name in ("update_from_output", "finish_requests", "reset_prefix_cache"):
        wrap(made, name, lambda self: made.kvcore_probe.note(self))


def wrap(made: Any, name: str, then: Any) -> None:
    """Have `then(self)` called after each call of a method."""
    original = getattr(made, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        then(self)
        return answer

    setattr(made, name, call)


class Probe:
    """Appends lines to a file; a line that says the same as the last one is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.preempted = 0
        self.last = ""

    def count_preemption(self) -> None:
        """Count a preempted request."""
        self.preempted += 1

    def note(self, scheduler: Any) -> None:
        """Write a line where the scheduler has no unfinished request."""
        if scheduler.has_unfinished_requests():
            return
        manager = scheduler.kv_cache_manager
        core = getattr(manager, "core", None)
        if core is not None:
            core.check_integrity()
        pool = manager.block_pool
        line = json.dumps(
            {
                "manager": type(manager).__name__,
                "in_use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
                "preempted": self.preempted,
            }
        )
        if line != self.last:
            self.last = line
            with self.path.open("a") as file:
                file.write(line + "\n")
