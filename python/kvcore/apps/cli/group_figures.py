# SPDX-License-Identifier: Apache-2.0
"""Make rows from the group results of a comparison, for a table or an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcore.apps.replay.pool import flat_page_bytes
from kvcore.replay import Comparison, GroupReport, ReplayReport
from kvcore.support.byte_sizes import format_size

__all__ = ["GROUP_HEAD", "NAMES", "POOL_HEAD", "group_rows", "page_units", "pool_rows"]

POOL_HEAD = ("memory", "cache", "hit rate", "refused", "at a time", "a request holds")
GROUP_HEAD = ("memory", "policy", "group", "held", "cached", "holes", "filled", "given back")
NAMES = ("cache", "policy", "group")  # columns of text

Row = Sequence[str]


def page_units(comparison: Comparison) -> str:
    """Return a sentence with the size of a page without and with groups."""
    model = comparison.model
    assert model is not None
    tokens, size = f"{model.page_size:,} tokens", format_size(flat_page_bytes(model))
    return (
        f"A flat page has {tokens} of all {model.num_layers} layers: {size}. A page of the groups "
        f"has up to {model.layers_per_page} layers: {format_size(model.bytes_per_page)}."
    )


def pool_rows(comparison: Comparison) -> Iterator[Row]:
    """Yield a row for each pool and curve: hit rate, refused requests, requests at a time."""
    for i, memory in enumerate(comparison.memory):
        for curve in comparison.curves:
            report = comparison.of(curve)[i].report
            held = report.mean_used_pages * _page_bytes(comparison, report)
            if comparison.mode == "online":
                held /= max(report.concurrency, 1e-9)
            yield (
                format_size(memory),
                curve,
                f"{report.token_hit_rate:.2%}",
                f"{report.refused:,}",
                f"{report.concurrency:,.1f}",
                format_size(round(held)),
            )


def group_rows(comparison: Comparison) -> Iterator[Row]:
    """Yield a row for each pool, policy and group, with the columns of `GROUP_HEAD` in bytes."""
    for i, memory in enumerate(comparison.memory):
        for curve in comparison.curves:
            report = comparison.of(curve)[i].report
            size = _page_bytes(comparison, report)
            for group in report.groups:
                pages = (
                    *(group.held_pages, group.cached_pages, group.holes),
                    *(group.filled, group.given_back),
                )
                yield (
                    format_size(memory),
                    report.policy,
                    _name(group),
                    *(format_size(round(each * size)) for each in pages),
                )


def _page_bytes(comparison: Comparison, report: ReplayReport) -> int:
    model = comparison.model
    assert model is not None
    return model.bytes_per_page if report.groups else flat_page_bytes(model)


def _name(group: GroupReport) -> str:
    kept = "" if group.keeps is None else f" {group.keeps:,}"
    return f"{group.layers} {group.kind}{kept}"
