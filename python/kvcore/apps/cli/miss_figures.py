# SPDX-License-Identifier: Apache-2.0
"""Make rows of missed tokens by reason from a comparison, for a table or an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcore.replay import Comparison, ReplayReport
from kvcore.support.byte_sizes import format_size

__all__ = ["MISS_TITLE", "has_misses", "miss_head", "miss_rows", "reason_name"]

MISS_TITLE = "prompt tokens that were not cached, by reason"


def reason_name(reason: str, report: ReplayReport) -> str:
    """Return the words for a reason; cached tokens are unreachable without a window or state."""
    lacks = dict.fromkeys(
        f"behind a {group.kind}" for group in report.groups if group.keeps is not None
    )
    if report.states is not None:
        lacks["without a checkpoint"] = None
    if reason == "unreachable" and lacks:
        return " or ".join(lacks)
    return reason.replace("_", " ")


def has_misses(comparison: Comparison) -> bool:
    """Return whether the replays found out why prompt tokens were not cached."""
    return comparison.runs[0].report.misses is not None


def miss_head(comparison: Comparison) -> tuple[str, ...]:
    """Return the names of the columns of `miss_rows`."""
    memory = ("memory",) if comparison.page_bytes else ()
    report = comparison.runs[-1].report  # with groups, if they are compared with a flat cache
    reasons = (reason_name(reason, report) for reason in _reasons(comparison))
    return ("pages", *memory, "cache", *reasons)


def miss_rows(comparison: Comparison) -> Iterator[Sequence[str]]:
    """Yield a row for each pool and curve: the share of the prompt tokens for each reason."""
    reasons = _reasons(comparison)
    for i, pages in enumerate(comparison.pages):
        memory = [format_size(size) for size in comparison.memory[i : i + 1]]
        for curve in comparison.curves:
            report = comparison.of(curve)[i].report
            yield (f"{pages:,}", *memory, curve, *_shares(report, reasons))


def _reasons(comparison: Comparison) -> list[str]:
    """Return the reasons that have tokens in at least one replay."""
    found = [run.report.misses.by_reason for run in comparison.runs if run.report.misses]
    return [reason for reason in found[0] if any(each[reason] for each in found)]


def _shares(report: ReplayReport, reasons: Sequence[str]) -> Iterator[str]:
    assert report.misses is not None
    tokens, counts = max(1, report.misses.prompt_tokens), report.misses.by_reason
    return (f"{counts[reason] / tokens:.2%}" for reason in reasons)
