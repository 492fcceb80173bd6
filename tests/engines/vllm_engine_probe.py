# SPDX-License-Identifier: Apache-2.0
"""A plug-in of vLLM that writes the manager class of a scheduler, and its blocks in use.

vLLM loads plug-ins in each of its processes; only the process with a scheduler writes. Whenever no
request is left, the probe appends a line of JSON to the file that ``KVCORE_PROBE`` names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def register() -> None:
    """Wrap the methods of vLLM's scheduler that may end requests."""
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
    """Call `then(self)` after each call of a method."""
    original = getattr(made, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        then(self)
        return answer

    setattr(made, name, call)


class Probe:
    """A writer that appends lines to a file, and skips a line equal to the last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.preempted = 0
        self.last = ""

    def count_preemption(self) -> None:
        """Count a preempted request."""
        self.preempted += 1

    def note(self, scheduler: Any) -> None:
        """Write a line if the scheduler has no unfinished request."""
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
