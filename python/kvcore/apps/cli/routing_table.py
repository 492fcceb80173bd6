# SPDX-License-Identifier: Apache-2.0
"""Print a table that compares routing policies."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcore.replay import RoutingReport
from kvcore.support.byte_sizes import format_size

__all__ = ["print_routing"]

_HEAD = ("route", "hit rate", "computed", "max / mean", "idle", "choice")


def print_routing(workload: str, reports: Sequence[RoutingReport]) -> None:
    """Print a row for each policy; all have the same workers."""
    first = reports[0]
    title = f"{workload}: {first.replicas:,} x {first.pages:,} pages of {first.page_size:,} tokens"
    if first.page_bytes:
        title += f", {format_size(first.pages * first.page_bytes)} each"
    if first.refused:
        title += f", {first.refused:,} requests larger than a pool"
    table = Table(title=Text(title), title_justify="left")
    for i, name in enumerate(_HEAD):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for each in reports:
        table.add_row(
            each.route,
            f"{each.token_hit_rate:.2%}",
            f"{each.computed_tokens:,}",
            f"{each.imbalance:.2f}",
            f"{each.idle_replicas:,}",
            f"{each.route_us_p50:,.0f} us",
        )
    console = Console()
    console.print(table)
    if first.misses is not None:
        console.print(_missed(reports))


def _missed(reports: Sequence[RoutingReport]) -> Table:
    """Make a table of the tokens that were not cached: a row for each reason."""
    table = Table(title="tokens not cached, by reason", title_justify="left")
    table.add_column("reason", no_wrap=True)
    for each in reports:
        table.add_column(each.route, justify="right", no_wrap=True)
    counts = [each.misses.by_reason for each in reports if each.misses is not None]
    for reason in counts[0]:
        found = [count[reason] for count in counts]
        if any(found):
            table.add_row(reason.replace("_", " "), *(f"{n:,}" for n in found))
    return table
