# SPDX-License-Identifier: Apache-2.0
"""Make rows of hit rates from a comparison, for a table or an HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvcore.replay import Comparison
from kvcore.support.byte_sizes import format_size

__all__ = ["RateRow", "rate_head", "rate_rows", "size_labels"]


@dataclass(frozen=True)
class RateRow:
    """A combination of sizes, the hit rate of each cache in it, and the optimum if it exists."""

    sizes: tuple[str, ...]
    rates: tuple[float, ...]
    optimum: float | None


def rate_head(comparison: Comparison) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the sizes in a row, and the names of the caches."""
    sizes = ("pages", "memory") if comparison.page_bytes else ("pages",)
    if len(comparison.tiers) == 1:
        return sizes, comparison.curves
    return (*sizes, *_tier_names(comparison)), comparison.policies


def rate_rows(comparison: Comparison) -> Iterator[RateRow]:
    """Yield a row for each number of pages; with several tiers, for each combination."""
    names = comparison.curves
    kinds = len(comparison.tiers)
    # With tiers, the curves of one policy are next to each other, in the order of the tiers.
    for i, pages in enumerate(comparison.pages):
        memory = [format_size(each) for each in comparison.memory[i : i + 1]]
        best = comparison.optima[i].token_hit_rate if comparison.optima else None
        for kind, tiers in enumerate(comparison.tiers):
            named = _tier_names(comparison) if kinds > 1 else []
            bytes_of = comparison.page_bytes, comparison.state_slot_bytes
            below = [tiers.size(name, *bytes_of) for name in named]
            yield RateRow(
                (f"{pages:,}", *memory, *below),
                tuple(comparison.of(name)[i].report.token_hit_rate for name in names[kind::kinds]),
                best,
            )


def _tier_names(comparison: Comparison) -> list[Literal["host", "disk"]]:
    """Return the tiers that at least one replay has."""
    pages: dict[Literal["host", "disk"], int] = {
        "host": comparison.host_pages,
        "disk": comparison.disk_pages,
    }
    return [name for name, most in pages.items() if most]


def size_labels(comparison: Comparison) -> tuple[list[str], str]:
    """Return the label of each pool on an axis, and the unit: bytes if they are known."""
    if comparison.page_bytes:
        return [format_size(each) for each in comparison.memory], "memory"
    return [f"{pages:,}" for pages in comparison.pages], "pages"
