# SPDX-License-Identifier: Apache-2.0
"""Print what policies found, for people: curves on a terminal, and always a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcore.cli.curves import COLOURS, Curve, draw_curves
from kvcore.replay import Comparison

__all__ = ["OPTIMUM", "print_comparison"]

OPTIMUM = "optimum"

_NARROWEST_PLOT = 60
_WIDER_THAN_ANY = 10_000


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print the curves, if the console is a terminal with room for them, and the table."""
    console = console or Console()
    title = (
        f"{comparison.workload}, {comparison.mode}: token hit rate by pages of "
        f"{comparison.page_size:,} tokens"
    )
    if comparison.replicas > 1:
        title += f" on each of {comparison.replicas:,} replicas"
    console.print(Text(title, style="italic"))
    can_draw = console.is_terminal and console.width >= _NARROWEST_PLOT
    if can_draw and len(comparison.pages) > 1 and not console.options.ascii_only:
        for line in draw_curves(_curves(comparison), comparison.pages, console.width):
            console.print(line, no_wrap=True)
    table = _wide(comparison)
    unbounded = console.options.update(max_width=_WIDER_THAN_ANY)
    fits = console.measure(table, options=unbounded).minimum <= console.width
    console.print(table if fits else _long(comparison))


def _curves(comparison: Comparison) -> list[Curve]:
    curves = [
        Curve(policy, [run.report.token_hit_rate for run in comparison.of(policy)], colour)
        for policy, colour in zip(comparison.policies, COLOURS, strict=False)
    ]
    if comparison.optima:
        curves.append(Curve(OPTIMUM, [each.token_hit_rate for each in comparison.optima], "dim"))
    return curves


def _wide(comparison: Comparison) -> Table:
    """Make a table with a row for each pool and a column for each policy; the best are bold."""
    table = Table()
    table.add_column("pages", justify="right", no_wrap=True)
    for policy in comparison.policies:
        table.add_column(policy, justify="right", no_wrap=True)
    if comparison.optima:
        table.add_column(OPTIMUM, justify="right", style="dim", no_wrap=True)
    columns = [comparison.of(policy) for policy in comparison.policies]
    for i, pages in enumerate(comparison.pages):
        rates = [column[i].report.token_hit_rate for column in columns]
        best = [comparison.optima[i].token_hit_rate] if comparison.optima else []
        shown = [Text(f"{rate:.2%}", style="bold" * (rate == max(rates))) for rate in rates]
        table.add_row(f"{pages:,}", *shown, *(f"{rate:.2%}" for rate in best))
    return table


def _long(comparison: Comparison) -> Table:
    """Make a table with a row for each pool and policy, for a console without room for more."""
    table = Table()
    for name in ("pages", "policy", "hit rate"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for i, pages in enumerate(comparison.pages):
        for policy in comparison.policies:
            rate = comparison.of(policy)[i].report.token_hit_rate
            table.add_row(f"{pages:,}", policy, f"{rate:.2%}")
        if comparison.optima:
            rate = comparison.optima[i].token_hit_rate
            table.add_row(f"{pages:,}", OPTIMUM, f"{rate:.2%}", style="dim")
        table.add_section()
    return table
