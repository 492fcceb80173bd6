# SPDX-License-Identifier: Apache-2.0
"""Print a comparison of policies: a table, and on a terminal also curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcore.apps.cli.curves import COLOURS, Curve, draw_curves
from kvcore.apps.cli.group_figures import (
    GROUP_HEAD,
    NAMES,
    POOL_HEAD,
    group_rows,
    page_units,
    pool_rows,
)
from kvcore.apps.cli.tier_figures import TIER_HEAD, TIER_NAMES, tier_rows, tier_sizes
from kvcore.replay import Comparison
from kvcore.support.byte_sizes import format_size

__all__ = ["print_comparison"]

_NARROWEST_PLOT = 60
_WIDER_THAN_ANY = 10_000


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print the table, after the curves if the console is a terminal with enough columns."""
    console = console or Console()
    title = (
        f"{comparison.workload}, {comparison.mode}: token hit rate by pages of "
        f"{comparison.page_size:,} tokens"
    )
    if comparison.model is not None:
        title += f" of all {comparison.model.num_layers} layers"
    if comparison.replicas > 1:
        title += f" on each of {comparison.replicas:,} replicas"
    if comparison.host_pages:
        title += f", with {tier_sizes(comparison.host_pages, comparison.disk_pages)}"
    console.print(Text(title, style="italic"))
    can_draw = console.is_terminal and console.width >= _NARROWEST_PLOT
    if can_draw and len(comparison.pages) > 1 and not console.options.ascii_only:
        for line in draw_curves(_curves(comparison), comparison.pages, console.width):
            console.print(line, no_wrap=True)
    table = _wide(comparison)
    unbounded = console.options.update(max_width=_WIDER_THAN_ANY)
    fits = console.measure(table, options=unbounded).maximum <= console.width
    console.print(table if fits else _long(comparison))
    if comparison.model is not None:
        _print_groups(comparison, console)
    if comparison.host_pages:
        title = "where prompt tokens were found"
        _print_rows(console, title, TIER_HEAD, TIER_NAMES, tier_rows(comparison))


def _print_groups(comparison: Comparison, console: Console) -> None:
    """Print the served requests of each cache, and the kept bytes of each group."""
    console.print(Text(page_units(comparison), style="italic"))
    for title, head, rows in (
        ("the same memory without and with groups", POOL_HEAD, pool_rows(comparison)),
        ("bytes of each group", GROUP_HEAD, group_rows(comparison)),
    ):
        _print_rows(console, title, head, NAMES, rows)


def _print_rows(
    console: Console,
    title: str,
    head: Sequence[str],
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
) -> None:
    """Print a table; the columns in `names` contain text."""
    table = Table(title=Text(title), title_justify="left")
    for name in head:
        table.add_column(name, justify="left" if name in names else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _curves(comparison: Comparison) -> list[Curve]:
    curves = [
        Curve(curve, [run.report.token_hit_rate for run in comparison.of(curve)], colour)
        for curve, colour in zip(comparison.curves, COLOURS, strict=False)
    ]
    if comparison.optima:
        rates = [each.token_hit_rate for each in comparison.optima]
        curves.append(Curve(comparison.optimum_name, rates, "dim"))
    return curves


def _wide(comparison: Comparison) -> Table:
    """Make a table with a row for each pool and a column for each curve; best rates are bold."""
    table = Table()
    table.add_column("pages", justify="right", no_wrap=True)
    if comparison.model is not None:
        table.add_column("memory", justify="right", no_wrap=True)
    for curve in comparison.curves:
        table.add_column(curve, justify="right", no_wrap=True)
    if comparison.optima:
        table.add_column(comparison.optimum_name, justify="right", style="dim", no_wrap=True)
    columns = [comparison.of(curve) for curve in comparison.curves]
    for i, pages in enumerate(comparison.pages):
        rates = [column[i].report.token_hit_rate for column in columns]
        best = [comparison.optima[i].token_hit_rate] if comparison.optima else []
        shown = [Text(f"{rate:.2%}", style="bold" * (rate == max(rates))) for rate in rates]
        memory = [format_size(each) for each in comparison.memory[i : i + 1]]
        table.add_row(f"{pages:,}", *memory, *shown, *(f"{rate:.2%}" for rate in best))
    return table


def _long(comparison: Comparison) -> Table:
    """Make a table with a row for each pool and curve, for a narrow console."""
    table = Table()
    for name in ("pages", "cache", "hit rate"):
        table.add_column(name, justify="left" if name == "cache" else "right", no_wrap=True)
    for i, pages in enumerate(comparison.pages):
        for curve in comparison.curves:
            rate = comparison.of(curve)[i].report.token_hit_rate
            table.add_row(f"{pages:,}", curve, f"{rate:.2%}")
        if comparison.optima:
            rate = comparison.optima[i].token_hit_rate
            table.add_row(f"{pages:,}", comparison.optimum_name, f"{rate:.2%}", style="dim")
        table.add_section()
    return table
