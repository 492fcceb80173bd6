# SPDX-License-Identifier: Apache-2.0
"""A record of the requests that schedulers preempt."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.scheduler import Request, Scheduler


def preemptions(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Return a list that grows by each request that any scheduler preempts."""
    preempted: list[Request] = []
    original = Scheduler.next_batch

    def counted(self: Scheduler, **options: bool) -> Any:
        batch = original(self, **options)
        preempted.extend(batch.preempted if batch else [])
        return batch

    monkeypatch.setattr(Scheduler, "next_batch", counted)
    return preempted
