# SPDX-License-Identifier: Apache-2.0
"""Make rows from the tier results of a replay, for a table or an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcore.replay import Comparison, TierReport

__all__ = ["TIER_HEAD", "TIER_NAMES", "found_in", "tier_rows", "tier_sizes"]

TIER_HEAD = ("pages", "cache", "device", "host", "disk", "computed")
TIER_NAMES = ("cache",)  # columns of text


def tier_sizes(host_pages: int, disk_pages: int) -> str:
    """Return a phrase with the pages of the host tier and the disk."""
    disk = f" and {disk_pages:,} on disk" if disk_pages else ""
    return f"{host_pages:,} pages of a host tier{disk}"


def found_in(tiers: TierReport) -> Iterator[tuple[str, float, int]]:
    """Yield each tier with the share and number of the prompt tokens found in it."""
    yield "on the device", tiers.device_share, tiers.device_tokens
    yield "in the host tier", tiers.host_share, tiers.host_tokens
    if tiers.disk_pages:
        yield "on disk", tiers.disk_share, tiers.disk_tokens


def tier_rows(comparison: Comparison) -> Iterator[Sequence[str]]:
    """Yield a row for each pool and curve: the shares of prompt tokens found in each tier."""
    for i, pages in enumerate(comparison.pages):
        for curve in comparison.curves:
            tiers = comparison.of(curve)[i].report.tiers
            assert tiers is not None
            shares = (
                *(tiers.device_share, tiers.host_share, tiers.disk_share),
                tiers.computed_share,
            )
            yield (f"{pages:,}", curve, *(f"{share:.2%}" for share in shares))
