# SPDX-License-Identifier: Apache-2.0
"""Put a host tier and a disk below the pool of a replay, and count the hits of each tier."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from kvcore.layers.layer_map import column_tokens
from kvcore.stores import DiskStore, DiskTier

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvcore import PagedKVCacheManager, TextGenerationContext

__all__ = ["PATIENCE", "GroupTierHits", "TierHits", "TierReport", "temporary_disk"]

#: Seconds that a replay waits for its disk; an engine would continue without the disk.
PATIENCE = 86_400.0

_BLOCK = 4096  # bytes; a slot is a header of one block, and the page in whole blocks
_NO_MODEL = bytes(32)
_SHARES = ("device_share", "host_share", "disk_share", "computed_share")


@dataclass(frozen=True, kw_only=True)
class TierReport:
    """The tiers in which a replay found the tokens of its prompts.

    Attributes
    ----------
    host_pages, disk_pages : int
        Pages of each replica's host tier, and of the disk for all replicas; 0 for no disk.
    host_state_slots : int
        State slots of each replica's host tier, for checkpoints; 0 without states.
    prompt_tokens : int
        Prompt tokens of all requests, including refused requests; the shares are relative to it.
    device_tokens, host_tokens, disk_tokens : int
        Prompt tokens found when a request was first admitted: on the device; loaded from the host
        tier; loaded from the disk through the host tier.
    computed_tokens : int
        Prompt tokens of served requests that were in no tier.
    host_written_pages, disk_written_pages : int
        Pages copied to the host tier; pages written to the disk.
    disk_errors : int
        Failed calls and timeouts of the disk, and corrupt pages. If it is not 0, for example
        because the disk is full, hits are missing.
    flush_seconds : float
        Time that the replay waited between requests until the disk had all stored pages; 0 in
        online mode.
    """

    host_pages: int
    disk_pages: int
    host_state_slots: int = 0
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    computed_tokens: int
    host_written_pages: int
    disk_written_pages: int
    disk_errors: int
    flush_seconds: float

    @property
    def device_share(self) -> float:
        """Share of `prompt_tokens` found on the device."""
        return self._share(self.device_tokens)

    @property
    def host_share(self) -> float:
        """Share of `prompt_tokens` found in the host tier."""
        return self._share(self.host_tokens)

    @property
    def disk_share(self) -> float:
        """Share of `prompt_tokens` found on the disk."""
        return self._share(self.disk_tokens)

    @property
    def computed_share(self) -> float:
        """Share of `prompt_tokens` computed; tokens of refused requests are in no share."""
        return self._share(self.computed_tokens)

    def to_dict(self) -> dict[str, Any]:
        """List every field and share by name, ready for JSON."""
        return vars(self) | {name: getattr(self, name) for name in _SHARES}

    def _share(self, tokens: int) -> float:
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@contextmanager
def temporary_disk(pages: int, page_bytes: int) -> Iterator[DiskStore]:
    """Open a disk store in a new directory, and remove the directory at the end in any case.

    Only one thread reads and writes, so the order of evictions does not depend on timing.

    Parameters
    ----------
    pages : int
        Exact capacity of the store.
    page_bytes : int
    """
    slot_bytes = _BLOCK + -(-page_bytes // _BLOCK) * _BLOCK
    with TemporaryDirectory(prefix="kvcore-replay-") as folder:
        tier = DiskTier(((folder, _BLOCK + pages * slot_bytes),))
        store = DiskStore(
            tier,
            page_bytes=page_bytes,
            fingerprint=_NO_MODEL,
            threads=1,
            slow_seconds=PATIENCE,
        )
        with closing(store):
            yield store


class TierHits:
    """Count the hits of admitted requests by tier.

    Parameters
    ----------
    manager : PagedKVCacheManager
        A manager with a host tier. No other caller may use it.
    host_pages, disk_pages, host_state_slots : int
        As in `TierReport`.
    """

    def __init__(
        self,
        manager: PagedKVCacheManager,
        host_pages: int,
        disk_pages: int,
        host_state_slots: int = 0,
    ) -> None:
        self._manager = manager
        self._host_pages, self._disk_pages = host_pages, disk_pages
        self._host_state_slots = host_state_slots
        self._page_size = manager.params.page_size
        self._host_tokens = self._disk_tokens = 0
        self._flush_ns = 0
        self._counts = 0, 0
        self._brought: dict[Hashable, int | None] = {}  # None after the first admission

    def begin(self, tokens: NDArray[np.int32], replica: int) -> None:  # noqa: ARG002
        """Read the counters before the attempt to admit a prompt on a replica."""
        self._counts = self._look()

    def end(self, name: Hashable, hit: int, *, fits: bool) -> None:  # noqa: ARG002
        """Count the pages loaded for a request since `begin`, if this is its first admission.

        `hit` is the number of cached tokens. If a request does not fit, a later attempt finds the
        pages from the disk in the host tier. They still count as hits of the disk.
        """
        before = self._brought.get(name, 0)
        if before is None:
            return
        loaded, brought = (now - then for now, then in zip(self._look(), self._counts, strict=True))
        brought += before
        self._brought[name] = None if fits else brought
        if fits:
            of_disk = min(brought, loaded)
            self._disk_tokens += of_disk * self._page_size
            self._host_tokens += (loaded - of_disk) * self._page_size

    def watching(self, reserve: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """Wrap ``maybe_reserve`` with `begin` before each call and `end` after it."""

        def watched(context: TextGenerationContext) -> bool:
            self.begin(context.tokens, self._manager.get_replica(context))
            fits = reserve(context)
            self.end(context.request_id, context.start_idx, fits=fits)
            return fits

        return watched

    def flush(self) -> None:
        """Wait until the disk has all stored pages."""
        started = perf_counter_ns()
        self._manager.flush()
        self._flush_ns += perf_counter_ns() - started

    def report(self, *, prompt_tokens: int, served_tokens: int, cached_tokens: int) -> TierReport:
        """Make the report from the numbers of all, served and cached prompt tokens."""
        tiers = self._manager.tier_metrics
        page_bytes = self._manager.params.bytes_per_page
        disk = tiers.get("disk")
        return TierReport(
            host_pages=self._host_pages,
            disk_pages=self._disk_pages,
            host_state_slots=self._host_state_slots,
            prompt_tokens=prompt_tokens,
            device_tokens=cached_tokens - self._host_tokens - self._disk_tokens,
            host_tokens=self._host_tokens,
            disk_tokens=self._disk_tokens,
            computed_tokens=served_tokens - cached_tokens,
            host_written_pages=self._written_pages(),
            disk_written_pages=0 if disk is None else disk.bytes_in // page_bytes,
            disk_errors=0 if disk is None else disk.errors + disk.corrupt + disk.timeouts,
            flush_seconds=self._flush_ns / 1e9,
        )

    def _written_pages(self) -> int:
        """Return the pages copied to the host tier until now."""
        page_bytes: int = self._manager.params.bytes_per_page
        return self._manager.tier_metrics["host"].bytes_in // page_bytes

    def _look(self) -> tuple[int, int]:
        """Return the pages loaded to the device and the pages loaded from the disk until now."""
        brought = self._manager.tier_metrics["disk"].hits if self._disk_pages else 0
        return self._manager.metrics.h2d_blocks_copied, brought


class GroupTierHits(TierHits):
    """Count the hits of admitted requests of a model with windows or states, without a disk.

    The pages of a hit come from both tiers, and a state from one of them. So a hit counts for the
    device up to the tokens that the device finds without its host tier, and the rest counts for the
    host tier.
    """

    def begin(self, tokens: NDArray[np.int32], replica: int) -> None:
        """Find the hit of the device in the attempt to admit a prompt on a replica."""
        ahead = column_tokens(self._manager.params)
        found = self._manager.match_prefix(tokens[:-1], replica_idx=replica, lookahead=ahead)
        self._of_device = sum(found)

    def end(self, name: Hashable, hit: int, *, fits: bool) -> None:
        """Count the tokens beyond the hit of the device, if this is the first admission."""
        if fits and name not in self._brought:
            self._brought[name] = None
            self._host_tokens += max(0, hit - self._of_device)

    def _written_pages(self) -> int:
        """Return the pages copied to the host tier until now, without states."""
        return self._manager.metrics.d2h_blocks_copied
