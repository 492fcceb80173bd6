# SPDX-License-Identifier: Apache-2.0
"""Counters of a manager."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from kvcore.exporting import Exporter, export

__all__ = [
    "EvictionMetrics",
    "Exporter",
    "GroupMetrics",
    "KVCacheMetrics",
    "ReplicaMetrics",
    "StateMetrics",
    "TierMetrics",
    "export",
]


@dataclass(frozen=True, slots=True)
class EvictionMetrics:
    """Count the cached pages of a tier that went, since the metrics were reset.

    On the device the first three together are ``KVCacheMetrics.evicted_pages``.

    Attributes
    ----------
    policy : int
        For new pages: they were next in the order of the eviction policy.
    window : int
        For new pages: requests had left them behind the windows of a group.
    unreachable : int
        For new pages: no hit could end where they are, for want of a checkpoint or of pages of
        another group.
    reset : int
        ``reset_prefix_cache`` forgot them.
    """

    policy: int
    window: int
    unreachable: int
    reset: int


@dataclass(frozen=True, slots=True)
class GroupMetrics:
    """Count the pages of one attention group at one moment, summed over replicas.

    Attributes
    ----------
    held_pages : int
        That requests, pins and copies read.
    cached_pages : int
        That the prefix cache has, those that requests hold there included.
    holes : int
        That the prefix cache lacks for tokens that it has: they are behind windows, and were
        evicted.
    given_back : int
        That requests gave back behind their windows, since the metrics were reset.
    filled : int
        Holes that have pages again, since the metrics were reset: a request computed their tokens,
        or they came back from the host tier.
    stored_pages, loaded_pages : int
        Copied to the host tier, and back, since the metrics were reset.
    """

    held_pages: int
    cached_pages: int
    holes: int
    given_back: int
    filled: int
    stored_pages: int
    loaded_pages: int


@dataclass(frozen=True, slots=True)
class ReplicaMetrics:
    """Count the pages of one replica at one moment.

    Attributes
    ----------
    total_pages : int
    free_pages : int
        Of nobody, not cached either.
    cached_pages : int
        In the prefix cache, those that requests share included.
    evictable_pages : int
        Cached ones that nobody holds; the rest of the pages is held by requests, pins and copies.
    num_sequences : int
        Requests that are claimed.
    host_pages, host_cached_pages : int
        Of its host tier, and of these those that hold cached pages; 0 without one.
    """

    total_pages: int
    free_pages: int
    cached_pages: int
    evictable_pages: int
    num_sequences: int
    host_pages: int
    host_cached_pages: int


@dataclass(frozen=True, slots=True)
class StateMetrics:
    """Count the slots of states at one moment, summed over replicas.

    Attributes
    ----------
    total_slots : int
    used_slots : int
        Of requests, and those that only a copy under way still holds.
    checkpoints : int
        Of cached prefixes. The rest of the slots is free.
    available_slots : int
        That a request could get: free ones, and checkpoints that nobody holds.
    checkpoint_hits : int
        Requests that began with a checkpoint, since the metrics were reset.
    checkpoints_made : int
        Since then.
    host_slots : int
        Of the host tier, for checkpoints alone; they count nowhere above.
    host_checkpoints : int
        Of prefixes that the tier has.
    stored_checkpoints : int
        That the tier got, since the metrics were reset.
    loaded_checkpoints : int
        Of `checkpoint_hits`, those whose checkpoint came from the tier.
    evicted_checkpoints : int
        Checkpoints on the device that were given up since their slots were needed, since the
        metrics were reset. Where they are more than the hits, give more `num_states`.
    """

    total_slots: int
    used_slots: int
    checkpoints: int
    available_slots: int
    checkpoint_hits: int
    checkpoints_made: int
    host_slots: int
    host_checkpoints: int
    stored_checkpoints: int
    loaded_checkpoints: int
    evicted_checkpoints: int = 0


@dataclass(frozen=True, slots=True)
class KVCacheMetrics:
    """Hold the counters of a manager at one moment, summed over its replicas.

    Attributes
    ----------
    input_tokens : int
        Prompt tokens to compute; each token of a request counts once.
    cache_tokens : int
        Prompt tokens taken from the prefix cache instead.
    generated_tokens : int
        Tokens appended behind prompts, as of the last ``step``; of tokens that ``extend`` appended,
        those that were written. Also the one token that a fork has more than its parent.
    resumed_tokens, recomputed_tokens : int
        Of requests that come back after a preemption, tokens that ran before: the cache still had
        them; they run again. Both are part of no other number.
    h2d_blocks_copied, d2h_blocks_copied : int
        Pages moved between host tier and device.
    evicted_pages : int
        Cached pages given up for new ones.
    copied_tokens : int
        Of `cache_tokens` and `resumed_tokens`, those copied out of a page that was equal in part.
    peak_used_pages : int
        Most pages held or pinned at a time.
    """

    input_tokens: int = 0
    cache_tokens: int = 0
    h2d_blocks_copied: int = 0
    d2h_blocks_copied: int = 0
    evicted_pages: int = 0
    copied_tokens: int = 0
    peak_used_pages: int = 0
    generated_tokens: int = 0
    resumed_tokens: int = 0
    recomputed_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens: `input_tokens` and `cache_tokens` together, no generated ones."""
        return self.input_tokens + self.cache_tokens

    @property
    def cache_hit_rate(self) -> float:
        """Share of `prompt_tokens` taken from the cache, 0..1; 0.0 when there are none."""
        return self.cache_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class TierMetrics:
    """Hold the counters of one tier at one moment; ``metrics["hits"]`` is ``metrics.hits``.

    A page of a model with groups is one with all that the tier has of its tokens.

    Attributes
    ----------
    hits : int
        Pages that were read and were right.
    misses : int
        Pages that prompts lacked, in the device and the tiers above, and that this tier did not
        have, or could not give. Counted when a request first runs; every page of a prompt that a
        hit could have counts, so that hits and misses together are all pages asked for.
    bytes_in, bytes_out : int
        Written to the tier, and read from it.
    corrupt : int
        Pages whose bytes were not those that were stored; they were removed.
    timeouts : int
        Calls of the store that took too long.
    errors : int
        Calls that failed, or answered what makes no sense.
    breaker : str
        ``"closed"``: the tier is used; ``"open"``: it failed and is not asked for some time;
        ``"half-open"``: one call at a time shows whether it works again.
    pages_waiting : int
        In the host tier, to be written to this one.
    read_p50, read_p99, write_p50, write_p99 : float
        Seconds that batches took, of the last 512 each; 0.0 where there were none.
    tokens : int
        Of the host tier, that hits were longer by because of it, those that stores brought
        included; of a store, those of the pages that it brought.
    """

    hits: int = 0
    misses: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    corrupt: int = 0
    timeouts: int = 0
    errors: int = 0
    breaker: Literal["closed", "open", "half-open"] = "closed"
    pages_waiting: int = 0
    read_p50: float = 0.0
    read_p99: float = 0.0
    write_p50: float = 0.0
    write_p99: float = 0.0
    tokens: int = 0

    def __getitem__(self, name: str) -> Any:
        """Return a field by its name."""
        if name not in self.keys():
            raise KeyError(f"{name!r} is none of {', '.join(self.keys())}")
        return getattr(self, name)

    def keys(self) -> list[str]:
        """Return the names of the fields, so that ``dict(metrics)`` has them all."""
        return [field.name for field in fields(self)]
