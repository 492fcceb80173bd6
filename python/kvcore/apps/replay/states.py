# SPDX-License-Identifier: Apache-2.0
"""Count the state slots and the checkpoints of a replay."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore import KVCacheParams, PagedKVCacheManager

__all__ = ["StateReport", "state_report"]


@dataclass(frozen=True, kw_only=True)
class StateReport:
    """The results of the layers that keep a state, over all replicas.

    Attributes
    ----------
    layers : int
        Number of layers that keep a state.
    slots : int
        State slots of each replica. A request takes a slot, and so does each checkpoint.
    slot_bytes : int
        Bytes of a slot, for all layers.
    every : int or None
        Tokens between checkpoints, in addition to the ends of prompts and the branches; None if
        there are no further checkpoints.
    checkpoints : int
        Checkpoints in the slots at the end.
    checkpoint_hits, checkpoints_made, evicted_checkpoints : int
        Requests that began with a checkpoint; checkpoints stored; checkpoints evicted because
        their slots were needed. A preempted request may begin with a checkpoint again.
    loaded_checkpoints : int
        Part of `checkpoint_hits`: requests that began with a checkpoint of the host tier.
    leaked_slots : int
        Slots that a request holds after every request was released; 0 unless the manager is
        broken.
    """

    layers: int
    slots: int
    slot_bytes: int
    every: int | None
    checkpoints: int
    checkpoint_hits: int
    checkpoints_made: int
    evicted_checkpoints: int
    loaded_checkpoints: int
    leaked_slots: int

    @property
    def memory(self) -> int:
        """Bytes of the slots of one replica."""
        return self.slots * self.slot_bytes

    def to_dict(self) -> dict[str, Any]:
        """List every field by name, ready for JSON."""
        return vars(self) | {"memory": self.memory}


def state_report(manager: PagedKVCacheManager, model: KVCacheParams | None) -> StateReport | None:
    """Return the report of a manager after all requests were released; None without states."""
    if model is None or not model.state_groups:
        return None
    with _without_warnings():
        found = manager.state_metrics
    layers = {layer for group in model.state_groups for layer in group.layers}
    intervals = [group.interval for group in model.state_groups if group.interval]
    return StateReport(
        layers=len(layers),
        slots=found.total_slots // manager.num_replicas,
        slot_bytes=model.bytes_per_state_slot,
        every=min(intervals, default=None),
        checkpoints=found.checkpoints,
        checkpoint_hits=found.checkpoint_hits,
        checkpoints_made=found.checkpoints_made,
        evicted_checkpoints=found.evicted_checkpoints,
        loaded_checkpoints=found.loaded_checkpoints,
        leaked_slots=found.used_slots,
    )


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Drop the manager's warning about too few slots: the report has its numbers."""
    log = logging.getLogger("kvcore")

    def drop(_record: logging.LogRecord) -> bool:
        return False

    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)
