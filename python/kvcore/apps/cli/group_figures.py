# SPDX-License-Identifier: Apache-2.0
"""Make rows from the results of the groups of a comparison, for a table or an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvcore.apps.replay.pool import flat_page_bytes
from kvcore.replay import Comparison, GroupReport, ReplayReport
from kvcore.support.byte_sizes import format_size

__all__ = [
    "NAMES",
    "GroupTable",
    "group_name",
    "group_tables",
    "layers_of_page",
    "page_units",
]

NAMES = ("cache", "group")  # columns of text

_POOL_HEAD = ("memory", "cache", "hit rate", "refused", "at a time", "a request holds")
_GROUP_HEAD = ("memory", "cache", "group", "held", "cached", "holes", "filled", "given back")
_STATE_HEAD = ("memory", "cache", "slots", "bytes", "kept", "hits", "made", "evicted")

Row = Sequence[str]


class GroupTable(NamedTuple):
    """A table: its title, the names of its columns, and its rows."""

    title: str
    head: Row
    rows: Iterator[Row]


def group_tables(comparison: Comparison) -> Iterator[GroupTable]:
    """Yield the tables of a model with groups: requests, bytes of each group, checkpoints."""
    model = comparison.model
    if model is None:
        return
    same = "the same memory without and with groups"
    yield GroupTable(
        same if comparison.has_flat else "requests", _POOL_HEAD, _pool_rows(comparison)
    )
    yield GroupTable("bytes of each group", _GROUP_HEAD, _group_rows(comparison))
    if model.state_groups:
        yield GroupTable("state slots and checkpoints", _STATE_HEAD, _state_rows(comparison))


def layers_of_page(comparison: Comparison) -> str:
    """Return a phrase with the layers in a page, to follow its number of tokens; may be empty."""
    model = comparison.model
    if model is None:
        return ""
    if comparison.has_flat:
        return f" of all {model.num_layers} layers"
    return f" of up to {model.layers_per_page} layers"


def page_units(comparison: Comparison) -> str:
    """Return a sentence with the size of a page, without and with groups."""
    model = comparison.model
    assert model is not None
    if not comparison.has_flat:
        return (
            f"A page has {model.page_size:,} tokens{layers_of_page(comparison)}: "
            f"{format_size(model.bytes_per_page)}."
        )
    tokens, size = f"{model.page_size:,} tokens", format_size(flat_page_bytes(model))
    return (
        f"A flat page has {tokens} of all {model.num_layers} layers: {size}. A page of the groups "
        f"has up to {model.layers_per_page} layers: {format_size(model.bytes_per_page)}."
    )


def _pool_rows(comparison: Comparison) -> Iterator[Row]:
    """Yield a row for each pool and curve: hit rate, refused requests, requests at a time."""
    for i, memory in enumerate(comparison.memory):
        for curve in comparison.curves:
            report = comparison.of(curve)[i].report
            held = report.mean_used_pages * _page_bytes(comparison, report)
            if comparison.mode == "online":
                held /= max(report.concurrency, 1e-9)
            if report.states is not None:
                held += report.states.slot_bytes
            yield (
                format_size(memory),
                curve,
                f"{report.token_hit_rate:.2%}",
                f"{report.refused:,}",
                f"{report.concurrency:,.1f}",
                format_size(round(held)),
            )


def _group_rows(comparison: Comparison) -> Iterator[Row]:
    """Yield a row for each pool, cache and group, in bytes."""
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
                    curve,
                    group_name(group),
                    *(format_size(round(each * size)) for each in pages),
                )


def _state_rows(comparison: Comparison) -> Iterator[Row]:
    """Yield a row for each pool and cache: slots of a replica, and counts of checkpoints.

    "kept" are the checkpoints at the end.
    """
    for i, memory in enumerate(comparison.memory):
        for curve in comparison.curves:
            report = comparison.of(curve)[i].report
            found = report.states
            assert found is not None
            counts = (
                *(found.checkpoints, found.checkpoint_hits),
                *(found.checkpoints_made, found.evicted_checkpoints),
            )
            yield (
                format_size(memory),
                curve,
                f"{found.slots:,}",
                format_size(found.memory),
                *(f"{each:,}" for each in counts),
            )


def _page_bytes(comparison: Comparison, report: ReplayReport) -> int:
    model = comparison.model
    assert model is not None
    return model.bytes_per_page if report.groups else flat_page_bytes(model)


def group_name(group: GroupReport) -> str:
    """Return the number of layers of a group, its kind, and the tokens that it keeps."""
    kept = "" if group.keeps is None else f" {group.keeps:,}"
    return f"{group.layers} {group.kind}{kept}"
