# SPDX-License-Identifier: Apache-2.0
"""Count the pages of each group of layers in a replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcore.layers.kinds import described
from kvcore.layers.packing import bundles_of
from kvcore.metrics import GroupMetrics

if TYPE_CHECKING:
    from kvcore import KVCacheParams, PagedKVCacheManager

__all__ = ["GroupReport", "GroupSamples"]

_SAMPLES = 64  # a sample reads every page of the pool


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """The results of one group of layers in a replay, over all replicas.

    Attributes
    ----------
    kind : str
        "full", "window" or "chunk".
    keeps : int or None
        Tokens of the window or chunk.
    layers, bundles : int
        Number of layers, and number of page tables.
    held_pages : float
        Mean number of pages that requests held, from up to 64 samples. In admission mode a sample
        is one request whose prompt is computed.
    cached_pages, holes : int
        Pages in the prefix cache at the end; pages missing at the end for cached tokens.
    given_back, filled : int
        Pages that requests freed after the window passed them; holes that were filled again.
    """

    kind: str
    keeps: int | None
    layers: int
    bundles: int
    held_pages: float
    cached_pages: int
    holes: int
    given_back: int
    filled: int

    def to_dict(self) -> dict[str, Any]:
        """List every field by name, ready for JSON."""
        return dict(vars(self))


class GroupSamples:
    """Sample the pages that requests hold of each group.

    Parameters
    ----------
    manager : PagedKVCacheManager
    model : KVCacheParams
        Model with groups.
    requests : int
        Number of requests in the replay.
    """

    def __init__(self, manager: PagedKVCacheManager, model: KVCacheParams, requests: int) -> None:
        self._manager = manager
        self._model = model
        self._every = -(-requests // _SAMPLES)
        self._next = 0
        self._held = [0] * len(model.attention_groups)
        self._count = 0

    def look(self, request: int) -> None:
        """Take a sample if it is due; request number `request` holds its pages now."""
        if request < self._next:
            return
        self._next = request + self._every
        self._count += 1
        for i, each in enumerate(self._metrics()):
            self._held[i] += each.held_pages

    def reports(self) -> tuple[GroupReport, ...]:
        """Return a report for each group, in the order of the groups."""
        metrics = self._metrics()
        groups = self._model.attention_groups
        return tuple(
            GroupReport(
                **described(group),
                bundles=len(bundles_of(self._model, group)),
                held_pages=held / max(1, self._count),
                cached_pages=found.cached_pages,
                holes=found.holes,
                given_back=found.given_back,
                filled=found.filled,
            )
            for group, held, found in zip(groups, self._held, metrics, strict=True)
        )

    def _metrics(self) -> tuple[GroupMetrics, ...]:
        """Return the metrics of each group; a pool of full-attention pages has one group."""
        manager = self._manager
        if manager.group_metrics:
            return manager.group_metrics
        held = manager.total_num_pages * manager.num_replicas - manager.num_free_blocks
        no_windows = dict.fromkeys(("holes", "given_back", "filled"), 0)
        no_tier = dict.fromkeys(("stored_pages", "loaded_pages"), 0)
        cached = manager.num_cached_blocks
        return (GroupMetrics(held_pages=held, cached_pages=cached, **no_windows, **no_tier),)
