# SPDX-License-Identifier: Apache-2.0
"""Estimate the time to first token that the hits of a replay save."""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.replay import Comparison, ReplayReport
from kvcore.support.byte_sizes import format_size

__all__ = ["saved_head", "saved_row", "saved_rows", "saved_seconds", "saved_title"]


def saved_seconds(report: ReplayReport, prefill_speed: float) -> dict[str, float]:
    """Divide the found tokens of each served request by a prefill speed.

    This is an estimate: it assumes the same speed for every token, and no other request in front.

    Parameters
    ----------
    report : ReplayReport
    prefill_speed : float
        Prompt tokens per second.

    Returns
    -------
    dict
        Seconds per request: "mean", "p50" and "p95".
    """
    return {name: tokens / prefill_speed for name, tokens in vars(report.hit_tokens).items()}


def saved_row(report: ReplayReport, prefill_speed: float) -> list[str]:
    """Write the saved seconds: mean, median, 95th percentile."""
    return [f"{seconds:,.3f} s" for seconds in saved_seconds(report, prefill_speed).values()]


def saved_title(prefill_speed: float) -> str:
    """Return the title of a table of `saved_rows`."""
    return f"first token earlier by, an estimate at {prefill_speed:,.0f} prompt tokens/s"


def saved_head(comparison: Comparison) -> tuple[str, ...]:
    """Return the names of the columns of `saved_rows`."""
    memory = ("memory",) if comparison.page_bytes else ()
    return ("pages", *memory, "cache", "mean", "median", "p95")


def saved_rows(comparison: Comparison, prefill_speed: float) -> Iterator[tuple[str, ...]]:
    """Yield a row for each pool and curve: the saved seconds per request."""
    for i, pages in enumerate(comparison.pages):
        memory = [format_size(each) for each in comparison.memory[i : i + 1]]
        for curve in comparison.curves:
            report = comparison.of(curve)[i].report
            yield (f"{pages:,}", *memory, curve, *saved_row(report, prefill_speed))
