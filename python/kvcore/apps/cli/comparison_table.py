# SPDX-License-Identifier: Apache-2.0
"""Print a comparison of policies: a table, and on a terminal also curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcore.apps.cli.curves import COLOURS, Curve, draw_curves
from kvcore.apps.cli.group_figures import NAMES, group_tables, layers_of_page, page_units
from kvcore.apps.cli.miss_figures import MISS_TITLE, has_misses, miss_head, miss_rows
from kvcore.apps.cli.rate_figures import rate_head, rate_rows, size_labels
from kvcore.apps.cli.saved_time import saved_head, saved_rows, saved_title
from kvcore.apps.cli.tier_figures import TIER_NAMES, tier_head, tier_rows, tiers_text
from kvcore.replay import Comparison

__all__ = ["print_comparison"]

_NARROWEST_PLOT = 60
_WIDER_THAN_ANY = 10_000


def print_comparison(
    comparison: Comparison,
    console: Console | None = None,
    *,
    prefill_speed: float | None = None,
) -> None:
    """Print the table and the decision; before them the curves, if a terminal is wide enough."""
    console = console or Console()
    title = (
        f"{comparison.workload}, {comparison.mode}: token hit rate by pages of "
        f"{comparison.page_size:,} tokens{layers_of_page(comparison)}"
    )
    if comparison.replicas > 1:
        title += f" on each of {comparison.replicas:,} replicas"
    if comparison.host_pages:
        title += f", with {tiers_text(comparison)}"
    title += f", {len(comparison.runs):,} replays"
    console.print(Text(title, style="italic"))
    can_draw = console.is_terminal and console.width >= _NARROWEST_PLOT
    if can_draw and len(comparison.pages) > 1 and not console.options.ascii_only:
        labels, unit = size_labels(comparison)
        curves = _curves(comparison)
        for line in draw_curves(curves, comparison.pages, console.width, labels, unit):
            console.print(line, no_wrap=True)
    table = _wide(comparison)
    unbounded = console.options.update(max_width=_WIDER_THAN_ANY)
    fits = console.measure(table, options=unbounded).maximum <= console.width
    console.print(table if fits else _long(comparison))
    if comparison.model is not None:
        _print_groups(comparison, console)
    if comparison.host_pages:
        title = "where prompt tokens were found"
        _print_rows(console, title, tier_head(comparison), TIER_NAMES, tier_rows(comparison))
    if has_misses(comparison):
        _print_rows(console, MISS_TITLE, miss_head(comparison), NAMES, miss_rows(comparison))
    if prefill_speed is not None:
        _print_saved(comparison, prefill_speed, console)
    console.print(Text(comparison.decision.text), soft_wrap=not console.is_terminal)


def _print_saved(comparison: Comparison, prefill_speed: float, console: Console) -> None:
    """Print an estimate of the saved time to first token for each replay."""
    title = saved_title(prefill_speed)
    _print_rows(
        console, title, saved_head(comparison), NAMES, saved_rows(comparison, prefill_speed)
    )


def _print_groups(comparison: Comparison, console: Console) -> None:
    """Print the served requests of each cache, the kept bytes of each group, and checkpoints."""
    console.print(Text(page_units(comparison), style="italic"))
    for table in group_tables(comparison):
        _print_rows(console, table.title, table.head, NAMES, table.rows)


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
        for curve, colour in zip(comparison.curves, cycle(COLOURS), strict=False)
    ]
    if comparison.optima:
        rates = [each.token_hit_rate for each in comparison.optima]
        curves.append(Curve(comparison.optimum_name, rates, "dim"))
    return curves


def _wide(comparison: Comparison) -> Table:
    """Make a table with a row for each pool and a column for each curve; best rates are bold."""
    table = Table()
    sizes, names = rate_head(comparison)
    for name in (*sizes, *names):
        table.add_column(name, justify="right", no_wrap=True)
    if comparison.optima:
        table.add_column(comparison.optimum_name, justify="right", style="dim", no_wrap=True)
    for row in rate_rows(comparison):
        best = [] if row.optimum is None else [f"{row.optimum:.2%}"]
        most = max(row.rates)
        shown = [Text(f"{rate:.2%}", style="bold" * (rate == most)) for rate in row.rates]
        table.add_row(*row.sizes, *shown, *best)
    return table


def _long(comparison: Comparison) -> Table:
    """Make a table with a row for each pool and curve, for a narrow console."""
    table = Table()
    sizes, names = rate_head(comparison)
    for name in (*sizes, "cache", "hit rate"):
        table.add_column(name, justify="left" if name == "cache" else "right", no_wrap=True)
    for row in rate_rows(comparison):
        for curve, rate in zip(names, row.rates, strict=True):
            table.add_row(*row.sizes, curve, f"{rate:.2%}")
        if row.optimum is not None:
            name = comparison.optimum_name
            table.add_row(*row.sizes, name, f"{row.optimum:.2%}", style="dim")
        table.add_section()
    return table
