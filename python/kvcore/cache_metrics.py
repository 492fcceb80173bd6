# SPDX-License-Identifier: Apache-2.0
"""What a manager counts: pages, slots, what was reused."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from kvcore import sizing
from kvcore.metrics import (
    EvictionMetrics,
    GroupMetrics,
    KVCacheMetrics,
    ReplicaMetrics,
    StateMetrics,
)
from kvcore.native.engine import StepEngine
from kvcore.params import KVCacheParams
from kvcore.tenants import TenantMetrics

__all__ = ["CacheMetrics"]

_log = logging.getLogger("kvcore")

#: Checkpoints evicted for each slot and each hit, from which on slots are too few.
_MANY_EVICTIONS = 4

_Counts = TypeVar("_Counts", EvictionMetrics, GroupMetrics, StateMetrics)


def _summed(kind: type[_Counts], stats: Sequence[Any]) -> _Counts:
    """Sum the core's counts, which have the fields of a kind, over replicas."""
    names = [field.name for field in fields(kind)]
    return kind(**{name: sum(getattr(each, name) for each in stats) for name in names})


class CacheMetrics(StepEngine):
    """Count over all replicas."""

    params: KVCacheParams
    _quotas: Mapping[str, tuple[int, int | None]]
    _host_states: int
    _has_warned = False  # of slots that are too few for checkpoints

    @property
    def num_replicas(self) -> int:
        """Data parallel replicas."""
        return self.params.data_parallel_degree

    @property
    def total_num_pages(self) -> int:
        """Pages of each replica."""
        return self._core.stats(0).total_pages

    @property
    def num_free_blocks(self) -> int:
        """Pages that a request could get, over all replicas; evictable cached ones count."""
        return sum(self._core.stats(r).available_pages for r in range(self.num_replicas))

    @property
    def num_cached_blocks(self) -> int:
        """Pages in the prefix cache, over all replicas; those that requests share count too."""
        return sum(self._core.stats(r).cached_pages for r in range(self.num_replicas))

    @property
    def free_blocks_pct(self) -> float:
        """Share of pages that a request could get, 0..1, mean over replicas."""
        return self.num_free_blocks / (self.total_num_pages * self.num_replicas)

    @property
    def used_blocks_pct(self) -> float:
        """Share of pages that requests and pins hold, 0..1, mean over replicas."""
        return 1.0 - self.free_blocks_pct

    @property
    def total_num_host_pages(self) -> int:
        """Pages that the host tier's space holds, over all replicas; 0 without a host tier."""
        return sizing.host_pages(self.params, self._host_states)

    @property
    def host_committed_block_pct(self) -> float:
        """Share of host pages that hold cached pages, 0..1; 0.0 without a host tier."""
        stats = [self._core.stats(r) for r in range(self.num_replicas)]
        cached = sum(each.host_cached_pages for each in stats)
        return cached / max(1, sum(each.host_pages for each in stats))

    @property
    def metrics(self) -> KVCacheMetrics:
        """Counters summed over replicas; a copy. O(replicas + requests)."""
        return self._counters()

    @property
    def replica_metrics(self) -> tuple[ReplicaMetrics, ...]:
        """Pages of each replica, in their order. O(replicas)."""
        names = [field.name for field in fields(ReplicaMetrics)]
        each = [self._core.stats(r) for r in range(self.num_replicas)]
        return tuple(
            ReplicaMetrics(**{name: getattr(stats, name) for name in names}) for stats in each
        )

    @property
    def eviction_metrics(self) -> dict[str, EvictionMetrics]:
        """Cached pages that went, "device" and "host" for a host tier, by reason. O(replicas)."""
        found = self._core.metrics
        kept = {"device": found.evicted}
        if self.total_num_host_pages:
            kept["host"] = found.host_evicted
        return {tier: _summed(EvictionMetrics, [counts]) for tier, counts in kept.items()}

    @property
    def group_metrics(self) -> tuple[GroupMetrics, ...]:
        """Pages of each attention group, in their order; empty without groups. O(pages).

        Of models where every page is one of all layers, ``metrics`` counts what went to the host
        tier and back.
        """
        each = [self._core.group_stats(r) for r in range(self.num_replicas)]
        return tuple(_summed(GroupMetrics, of_group) for of_group in zip(*each, strict=True))

    @property
    def tenant_metrics(self) -> dict[str, TenantMetrics]:
        """Pages of each tenant that has a quota; empty without quotas. O(tenants + requests)."""
        each = [self._core.tenant_stats(r) for r in range(self.num_replicas)]
        summed = [TenantMetrics.summed(of_tenant) for of_tenant in zip(*each, strict=True)]
        return dict(zip(self._quotas, summed, strict=True))

    @property
    def state_metrics(self) -> StateMetrics:
        """Slots of states here and in the host tier, and what was done with checkpoints. O(1).

        Zeros without State groups. The log of "kvcore" warns once where most checkpoints are
        evicted before a request begins with one.
        """
        stats = [self._core.state_stats(r) for r in range(self.num_replicas)]
        found = _summed(StateMetrics, stats)
        if not self._has_warned:
            self._warn_of_evictions(found)
        return found

    def _warn_of_evictions(self, found: StateMetrics) -> None:
        evicted, hits = found.evicted_checkpoints, found.checkpoint_hits
        if evicted < _MANY_EVICTIONS * max(hits, found.total_slots, 1):
            return
        self._has_warned = True
        _log.warning(
            "%d checkpoints of states were evicted for others, and %d requests began with one: "
            "%d slots are too few for the prompts that come again; give more num_states",
            evicted,
            hits,
            found.total_slots,
        )

    def check_integrity(self) -> None:
        """Check every conservation law: O(everything).

        Raises
        ------
        AssertionError
            Names the law that does not hold.
        """
        self._core.check_integrity()
