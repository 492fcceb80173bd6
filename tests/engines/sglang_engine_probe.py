# SPDX-License-Identifier: Apache-2.0
"""A plug-in of SGLang that writes the cache class of a scheduler, and the tokens in use.

SGLang loads plug-ins in each of its processes; only the process with a scheduler writes. Whenever
the scheduler has no request, the probe appends a line of JSON to the file that ``KVCORE_PROBE``
names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def register() -> None:
    """Make SGLang call the probe at retractions, at evictions and when it is idle."""
    path = os.environ.get("KVCORE_PROBE")
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    probe = Probe(Path(path))
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    evicts = "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.update_eviction_metrics"
    batch = "sglang.srt.managers.schedule_batch.ScheduleBatch"
    HookRegistry.register(evicts, probe.count_evicted, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.on_idle", probe.note, HookType.AFTER)
    HookRegistry.register(f"{batch}.retract_decode", probe.count_retracted, HookType.AFTER)


class Probe:
    """A writer that appends lines to a file, and skips a line equal to the last line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.retracted = 0
        self.evicted = 0
        self.last = ""

    def count_evicted(self, _cache: Any, tokens: int, _start: float) -> None:
        """Count the tokens that a cache evicts."""
        self.evicted += tokens

    def count_retracted(self, result: Any, _batch: Any) -> None:
        """Count the requests that a batch retracts."""
        self.retracted += len(result[0])

    def note(self, _result: Any, scheduler: Any) -> None:
        """Write a line if the scheduler has no request."""
        if not scheduler.is_fully_idle():
            return
        cache, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        line = json.dumps(
            {
                "cache": type(cache).__name__,
                "total": allocator.size,
                "available": allocator.available_size(),
                "evictable": cache.evictable_size(),
                "protected": cache.protected_size(),
                "retracted": self.retracted,
                "evicted": self.evicted,
            }
        )
        if line != self.last:
            self.last = line
            with self.path.open("a") as file:
                file.write(line + "\n")
