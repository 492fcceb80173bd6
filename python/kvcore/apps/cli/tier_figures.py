# SPDX-License-Identifier: Apache-2.0
"""Make rows from the tier results of a replay, for a table or an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from kvcore.replay import Comparison, ReplayReport, TierReport, TierSizes
from kvcore.support.byte_sizes import format_size

__all__ = ["TIER_NAMES", "found_in", "tier_head", "tier_rows", "tier_sizes", "tiers_text"]

TIER_NAMES = ("cache",)  # columns of text


def tier_sizes(tiers: TierSizes, page_bytes: int = 0, slot_bytes: int = 0) -> str:
    """Return a phrase with the pages of the host tier and the disk, and their bytes if known."""

    def size(tier: Literal["host", "disk"]) -> str:
        return f" ({tiers.size(tier, page_bytes, slot_bytes)})" if page_bytes else ""

    disk = f" and {tiers.disk_pages:,}{size('disk')} on disk" if tiers.disk_pages else ""
    slots = f" and {tiers.host_state_slots:,} state slots" if tiers.host_state_slots else ""
    return f"{tiers.host_pages:,} pages{slots}{size('host')} of a host tier{disk}"


def tiers_text(comparison: Comparison) -> str:
    """Return a phrase with all tiers of a comparison."""
    if len(comparison.tiers) == 1:
        bytes_of = comparison.page_bytes, comparison.state_slot_bytes
        return tier_sizes(comparison.tiers[0], *bytes_of)
    return f"{len(comparison.tiers)} combinations of tiers"


def found_in(tiers: TierReport) -> Iterator[tuple[str, float, int]]:
    """Yield each tier with the share and number of the prompt tokens found in it."""
    yield "on the device", tiers.device_share, tiers.device_tokens
    yield "in the host tier", tiers.host_share, tiers.host_tokens
    if tiers.disk_pages:
        yield "on disk", tiers.disk_share, tiers.disk_tokens


def tier_head(comparison: Comparison) -> tuple[str, ...]:
    """Return the names of the columns of `tier_rows`."""
    memory = ("memory",) if comparison.page_bytes else ()
    return ("pages", *memory, "cache", "device", "host", "disk", "computed")


def tier_rows(comparison: Comparison) -> Iterator[Sequence[str]]:
    """Yield a row for each pool and curve: the shares of prompt tokens found in each tier."""
    for i, pages in enumerate(comparison.pages):
        memory = [format_size(size) for size in comparison.memory[i : i + 1]]
        for curve in comparison.curves:
            yield (f"{pages:,}", *memory, curve, *_shares(comparison.of(curve)[i].report))


def _shares(report: ReplayReport) -> Iterator[str]:
    tiers = report.tiers
    if tiers is not None:
        shares = (tiers.device_share, tiers.host_share, tiers.disk_share, tiers.computed_share)
    else:
        computed = report.served_prompt_tokens - report.cached_tokens
        shares = (report.token_hit_rate, 0.0, 0.0, computed / max(report.prompt_tokens, 1))
    return (f"{share:.2%}" for share in shares)
