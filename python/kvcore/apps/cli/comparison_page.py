# SPDX-License-Identifier: Apache-2.0
"""Write a comparison of policies as one self-contained HTML page or as a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from itertools import chain

import kvcore
from kvcore.apps.cli.group_figures import NAMES, group_tables, layers_of_page, page_units
from kvcore.apps.cli.miss_figures import MISS_TITLE, has_misses, miss_head, miss_rows
from kvcore.apps.cli.page_style import CHART_STYLE, PAGE_SCRIPT, PAGE_STYLE, SLOTS
from kvcore.apps.cli.rate_figures import rate_head, rate_rows, size_labels
from kvcore.apps.cli.saved_time import saved_head, saved_rows, saved_title
from kvcore.apps.cli.svg_chart import Axis, Chart, Line, linear_axis, log_axis
from kvcore.apps.cli.tier_figures import TIER_NAMES, tier_head, tier_rows, tiers_text
from kvcore.apps.traces.errors import printable
from kvcore.replay import Comparison
from kvcore.support.byte_sizes import format_size

__all__ = ["comparison_page", "comparison_picture"]

_NARROW = (400, 330)  # size of a chart on a narrow screen, in SVG units
_SHORT_NAME = 9  # characters that a narrow chart has room for at the end of a line
_LEFT = ' class="left"'
_NO_NETWORK = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def comparison_page(
    comparison: Comparison, command: str, prefill_speed: float | None = None
) -> str:
    """Write a page: hit rate over capacity, curves over time in a chosen pool, and all numbers.

    Parameters
    ----------
    comparison : Comparison
        The comparison to show.
    command : str
        Command line of the comparison, shown at the end.
    prefill_speed : float, optional
        Prompt tokens per second, for an estimate of the saved time to first token.

    Returns
    -------
    str
        HTML that includes style sheet, script and pictures; it refers to no other file.
    """
    wide = [_capacity_chart(comparison)]
    if comparison.model is not None:
        wide.append(_concurrency_chart(comparison))
    pairs = [(chart, _narrow(chart)) for chart in wide]
    panels = [_time_charts(comparison, i) for i in range(len(comparison.pages))]
    charts = [*chain(*pairs), *chain(*panels)]
    data = json.dumps({chart.key: chart.data() for chart in charts}).replace("<", "\\u003c")
    parts = (
        _header(comparison),
        _capacity_section(comparison, pairs[0]),
        *(_concurrency_section(comparison, pair) for pair in pairs[1:]),
        _time_section(comparison, panels),
        _figures_section(comparison, prefill_speed),
        f"<h2>Command</h2><pre>{escape(printable(command))}</pre>",
        f"<footer>kvcore {escape(kvcore.__version__)}</footer>",
    )
    title = escape(f"{comparison.workload}: kvcore replay")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_NO_NETWORK}">'
        f"<style>{CHART_STYLE}{PAGE_STYLE}{_choice_style(len(panels))}</style></head>\n"
        f"<body><main>{''.join(parts)}</main>\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>{PAGE_SCRIPT}</script></body></html>\n"
    )


def comparison_picture(comparison: Comparison) -> str:
    """Return hit rate over capacity as an SVG file with a light and a dark style."""
    return _capacity_chart(comparison).svg(CHART_STYLE)


def _colour(index: int) -> str:
    return f"s{index % SLOTS}"


def _capacity_chart(comparison: Comparison) -> Chart:
    sizes = _sizes(comparison)
    lines = [
        Line(curve, _colour(i), sizes, [run.report.token_hit_rate for run in comparison.of(curve)])
        for i, curve in enumerate(comparison.curves)
    ]
    if comparison.optima:
        rates = [each.token_hit_rate for each in comparison.optima]
        lines.append(Line(comparison.optimum_name, "limit", sizes, rates))
    highest = max(max(line.ys) for line in lines)
    return Chart(
        key="capacity",
        title="Token hit rate over capacity, for each eviction policy",
        lines=tuple(lines),
        x=_capacity_axis(comparison),
        y=linear_axis("token hit rate", 0.0, highest, _percent, kind="share"),
        is_labelled=True,
    )


def _sizes(comparison: Comparison) -> list[float]:
    """Return the places of the pools on an axis: GiB if the bytes of a page are known."""
    if comparison.page_bytes:
        return [size / 2**30 for size in comparison.memory]
    return [float(pages) for pages in comparison.pages]


def _capacity_axis(comparison: Comparison) -> Axis:
    labels, unit = size_labels(comparison)
    beside = " and state slots" if any(comparison.state_slots) else layers_of_page(comparison)
    name = f"pages of {comparison.page_size:,} tokens{beside}"
    if comparison.page_bytes:
        name = f"memory for {name}"
    if comparison.replicas > 1:
        name += " on each replica"
    return log_axis(name, _sizes(comparison), labels, kind="gib" if unit == "memory" else "pages")


def _narrow(chart: Chart) -> Chart:
    """Return the same chart for a narrow screen; names at the ends only if they are short."""
    return replace(
        chart,
        key=f"{chart.key}-narrow",
        width=_NARROW[0],
        height=_NARROW[1],
        is_labelled=max(len(line.name) for line in chart.lines) <= _SHORT_NAME,
        has_marks=True,
    )


def _cards(pair: tuple[Chart, Chart]) -> str:
    """Write a chart for wide and for narrow screens; the style sheet hides the other chart."""
    wide, narrow = pair
    return f'<div class="card wide">{wide.svg()}</div><div class="card narrow">{narrow.svg()}</div>'


def _concurrency_chart(comparison: Comparison) -> Chart:
    sizes = _sizes(comparison)
    lines = tuple(
        Line(curve, _colour(i), sizes, [run.report.concurrency for run in comparison.of(curve)])
        for i, curve in enumerate(comparison.curves)
    )
    highest = max(max(line.ys) for line in lines) or 1.0
    return Chart(
        key="concurrency",
        title="Requests at a time over capacity, for each cache",
        lines=lines,
        x=_capacity_axis(comparison),
        y=linear_axis("requests at a time", 0.0, highest, _plain, kind="count"),
        is_labelled=True,
    )


def _time_charts(comparison: Comparison, pool: int) -> list[Chart]:
    """Make the charts over time of one pool: hits, occupancy, and the manager's time."""
    runs = [comparison.of(curve)[pool] for curve in comparison.curves]
    bins = [run.timeline for run in runs]
    totals = [run.report.total_pages for run in runs]
    step = "step" if comparison.mode == "online" else "request"
    shares = [[p / total for p in e.cached_pages] for e, total in zip(bins, totals, strict=True)]
    rows = [
        ("Token hit rate", "token hit rate", "share", [each.hit_rates for each in bins]),
        ("Occupancy: cached pages", "share of the pool", "share", shares),
        (f"Time in the manager per {step}, median", "µs", "us", [e.step_us_p50 for e in bins]),
        (f"Time in the manager per {step}, p99", "µs", "us", [e.step_us_p99 for e in bins]),
    ]
    if comparison.mode == "online":
        held = [[p / total for p in e.used_pages] for e, total in zip(bins, totals, strict=True)]
        rows.append(("Occupancy: pages that requests hold", "share of the pool", "share", held))
    ends = [each.ends for each in bins]
    return [_time_chart(comparison, f"{pool}-{i}", row, ends) for i, row in enumerate(rows)]


def _time_chart(
    comparison: Comparison,
    key: str,
    row: tuple[str, str, str, list[list[float]]],
    ends: list[list[float]],
) -> Chart:
    title, unit, kind, series = row
    policies = enumerate(zip(comparison.curves, ends, series, strict=True))
    lines = tuple(Line(name, _colour(i), xs, ys) for i, (name, xs, ys) in policies)
    found = [y for ys in series for y in ys if not math.isnan(y)]
    write = _percent if kind == "share" else _plain
    is_online = comparison.mode == "online"
    x_title = "simulated seconds" if is_online else "requests served"
    last = max((xs[-1] for xs in ends if xs), default=1.0)
    return Chart(
        key=key,
        title=title,
        lines=lines,
        x=_time_axis(x_title, last, "seconds" if is_online else "requests"),
        y=linear_axis(unit, 0.0, max(found, default=1.0) or 1.0, write, kind=kind),
        width=440,
        height=250,
    )


def _time_axis(title: str, last: float, kind: str) -> Axis:
    """Make an axis that ends at `last`, the end of the curves."""
    axis = linear_axis(title, 0.0, max(last, 1.0), _plain, kind=kind)
    high = max(last, 1.0)
    return Axis(title, 0.0, high, tuple(t for t in axis.ticks if t[0] <= high), kind=kind)


def _header(comparison: Comparison) -> str:
    report = comparison.runs[0].report
    labels, _ = size_labels(comparison)
    sizes = labels if comparison.page_bytes else [f"{label} pages" for label in labels]
    rate, size = max(
        (run.report.token_hit_rate, size)
        for curve in comparison.curves
        for run, size in zip(comparison.of(curve), sizes, strict=True)
    )
    tiles = [
        ("requests", f"{report.requests + report.refused:,}"),
        ("prompt tokens", _short(report.prompt_tokens)),
        ("tokens per page", f"{comparison.page_size:,}"),
        ("replays", f"{len(comparison.runs):,}"),
        (f"highest hit rate, {size}", f"{rate:.2%}"),
    ]
    if comparison.optima:
        most = comparison.optima[-1]
        tiles.append((f"{comparison.optimum_name}, {sizes[-1]}", f"{most.token_hit_rate:.2%}"))
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in tiles
    )
    how = (
        "Requests run together in an engine with continuous batching, in simulated time."
        if comparison.mode == "online"
        else "One prompt after another: each request is released before the next request claims."
    )
    return (
        f"<h1>{escape(comparison.workload)}</h1><p>Hits of the prefix cache with each eviction "
        f"policy, measured with the real manager. {how}</p>"
        f'<div class="decision"><h2>Decision</h2><p>{escape(comparison.decision.text)}</p></div>'
        f'{_assumed(comparison)}<div class="tiles">{shown}</div>'
    )


def _assumed(comparison: Comparison) -> str:
    """Write what the reader of the trace found or assumed."""
    if not comparison.assumptions:
        return ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in comparison.assumptions)
    return f'<ul class="assumed">{lines}</ul>'


def _capacity_section(comparison: Comparison, pair: tuple[Chart, Chart]) -> str:
    has_curves = len(comparison.pages) > 1
    limit = (
        f"The dashed {'curve' if has_curves else 'bar'} is Belady's optimum, which no policy "
        "exceeds: it evicts the page whose next use is farthest in the future."
        if comparison.optima
        else "In online mode the order of the requests depends on the policy, so there is no "
        "single optimum."
    )
    if comparison.has_flat:
        limit += " The optimum is for the flat cache: groups may find more." * bool(
            comparison.optima
        )
        limit += f" {page_units(comparison)} Both caches have the same memory."
    elif comparison.model is not None:
        limit += _model_text(comparison)
    if comparison.host_pages:
        limit += " The optimum is only for the device: tiers find more." * bool(comparison.optima)
        limit += f" Below the device are {tiers_text(comparison)}"
        bytes_of = comparison.page_bytes, comparison.state_slot_bytes
        names = [each.name(*bytes_of) for each in comparison.tiers]
        limit += f": {', '.join(names)}." if len(names) > 1 else "."
    name = "Hit rate over capacity" if has_curves else "Hit rate"
    over = ", over the size of the pool" if has_curves else f", in {_only_size(comparison)}"
    return (
        f"<h2>{name}</h2><p>Share of all prompt tokens found in the cache{over}. "
        f"{escape(limit)}</p>{_legend(pair[0])}"
        f"{_cards(pair) if has_curves else _bars(pair[0])}"
    )


def _model_text(comparison: Comparison) -> str:
    """Write what the pages of a model are, and what its bound is."""
    bound = (
        " Here it is the optimum of the full-attention layers with all pages of the pool. It is a "
        "bound: windows and checkpoints only shorten hits, and their pages take room."
    )
    return f"{bound * bool(comparison.optima)} {page_units(comparison)}"


def _only_size(comparison: Comparison) -> str:
    pages = f"{comparison.pages[0]:,} pages"
    return f"{size_labels(comparison)[0][0]} ({pages})" if comparison.page_bytes else pages


def _legend(chart: Chart) -> str:
    """Write a button for each curve; the optimum has no button, because it is always visible."""
    entries = "".join(
        f'<span class="limit"><i></i>{escape(line.name)}</span>'
        if line.colour == "limit"
        else f'<button type="button" class="{line.colour}" data-line="{i}" aria-pressed="true">'
        f"<i></i>{escape(line.name)}</button>"
        for i, line in enumerate(chart.lines)
    )
    return f'<div class="legend">{entries}</div>'


def _bars(chart: Chart) -> str:
    """Write a bar for each line of a chart with one place."""
    most = max(line.ys[0] for line in chart.lines) or 1.0
    rows = "".join(
        f'<div class="{line.colour}"><span>{escape(line.name)}</span>'
        f'<i style="width:{line.ys[0] / most:.2%}"></i><b>{line.ys[0]:.2%}</b></div>'
        for line in chart.lines
    )
    return f'<div class="card bars">{rows}</div>'


def _concurrency_section(comparison: Comparison, pair: tuple[Chart, Chart]) -> str:
    how = (
        "The mean over simulated time."
        if comparison.mode == "online"
        else "The number of requests that fit without shared pages, each with a computed prompt."
    )
    if any(comparison.state_slots):
        how += " Each request has two state slots: its own and a checkpoint."
    shown = _cards(pair) if len(comparison.pages) > 1 else ""
    return f"<h2>Requests at a time over capacity</h2><p>{how}</p>{shown}" if shown else ""


def _time_section(comparison: Comparison, panels: Sequence[Sequence[Chart]]) -> str:
    chosen = len(panels) // 2
    hidden = " hidden" * (len(panels) == 1)
    labels, unit = size_labels(comparison)
    choices = "".join(
        f'<input type="radio" name="pool" id="pool{i}"{" checked" * (i == chosen)}{hidden}>'
        f'<label for="pool{i}"{hidden}>{escape(label)}</label>'
        for i, label in enumerate(labels)
    )
    how = f", in a pool with this {'memory' if unit == 'memory' else 'number of pages'}:"
    shown = "".join(
        '<div class="panel">'
        + "".join(
            f'<div class="card"><h3>{escape(chart.title)}</h3>{chart.svg()}</div>'
            for chart in panel
        )
        + "</div>"
        for panel in panels
    )
    return (
        "<h2>Over time</h2><p>The same replays from the first request to the last"
        f'{"." if hidden else how}</p><div class="cut">{choices}'
        f'<div class="panels">{shown}</div></div>'
    )


def _choice_style(count: int) -> str:
    """Return the style that shows the panel of the chosen input, without a script."""
    return "".join(
        f"#pool{i}:checked~.panels .panel:nth-child({i + 1}){{display:grid}}" for i in range(count)
    )


def _figures_section(comparison: Comparison, prefill_speed: float | None) -> str:
    sizes, names = rate_head(comparison)
    best = [comparison.optimum_name] * bool(comparison.optima)
    rows = []
    for row in rate_rows(comparison):
        cells = [_cell(size) for size in row.sizes]
        if row.optimum is not None:
            cells.append(_cell(f"{row.optimum:.2%}", "far"))
        most = max(row.rates)
        rows.append(cells + [_cell(f"{rate:.2%}", "best" * (rate == most)) for rate in row.rates])
    return (
        "<h2>Figures</h2><p>Token hit rate; the highest rate of each row is bold. The decision "
        "says whether it is higher by more than the noise.</p>"
        f"{_table([*sizes, *best, *names], rows)}"
        f"{_groups_figures(comparison)}{_tier_figures(comparison)}"
        f"{_miss_figures(comparison)}{_saved_figures(comparison, prefill_speed)}"
        f"<details><summary>Every replay</summary>{_runs(comparison)}</details>"
    )


def _groups_figures(comparison: Comparison) -> str:
    """Write the served requests of each cache, the kept bytes of each group, and checkpoints."""
    return "".join(
        _titled(table.title.capitalize(), table.head, NAMES, table.rows)
        for table in group_tables(comparison)
    )


def _tier_figures(comparison: Comparison) -> str:
    """Write the tiers in which prompt tokens were found."""
    if not comparison.host_pages:
        return ""
    title = "Where prompt tokens were found"
    return _titled(title, tier_head(comparison), TIER_NAMES, tier_rows(comparison))


def _miss_figures(comparison: Comparison) -> str:
    """Write why prompt tokens were not cached."""
    if not has_misses(comparison):
        return ""
    rows = miss_rows(comparison)
    return _titled(MISS_TITLE.capitalize(), miss_head(comparison), NAMES, rows)


def _saved_figures(comparison: Comparison, prefill_speed: float | None) -> str:
    """Write an estimate of the saved time to first token."""
    if prefill_speed is None:
        return ""
    rows = saved_rows(comparison, prefill_speed)
    return _titled(saved_title(prefill_speed).capitalize(), saved_head(comparison), NAMES, rows)


def _titled(
    title: str, head: Sequence[str], names: Sequence[str], rows: Iterable[Sequence[str]]
) -> str:
    """Write a table with a title; the columns in `names` contain text."""
    kinds = ["left" if name in names else "" for name in head]
    cells = [[_cell(text, kind) for text, kind in zip(row, kinds, strict=True)] for row in rows]
    return f"<h3>{escape(title)}</h3>{_table(head, cells, names)}"


def _runs(comparison: Comparison) -> str:
    memory = ["memory"] * bool(comparison.page_bytes)
    head = ["cache", "pages", *memory, "served", "refused", "token hits", "token hits, served"]
    head += ["page hits", "evicted pages", "peak pages", "µs, median", "µs, p99", "M tokens/s"]
    rows = []
    found = [(curve, run.report) for curve in comparison.curves for run in comparison.of(curve)]
    for curve, each in found:
        size = [_cell(format_size(each.pages * each.page_bytes))] * bool(each.page_bytes)
        rates = (each.token_hit_rate, each.served_token_hit_rate, each.page_hit_rate)
        rows.append(
            [
                _cell(curve, "left"),
                _cell(f"{each.pages:,}"),
                *size,
                *(_cell(f"{count:,}") for count in (each.requests, each.refused)),
                *(_cell(f"{rate:.2%}") for rate in rates),
                *(_cell(f"{count:,}") for count in (each.evicted_pages, each.peak_used_pages)),
                *(_cell(f"{us:,.1f}") for us in (each.step_us_p50, each.step_us_p99)),
                _cell(f"{each.tokens_per_second / 1e6:,.0f}"),
            ]
        )
    return _table(head, rows)


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ("cache",)
) -> str:
    """Write a table; the heads in `left` are above text."""
    names = "".join(f'<th scope="col"{_LEFT * (name in left)}>{escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return f'<div class="scroll"><table><tr>{names}</tr>{body}</table></div>'


def _cell(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def _percent(value: float) -> str:
    return f"{value * 100:.3g}%"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"


def _short(count: int) -> str:
    """Write a number of tokens in short form, such as 144.8 M."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count}"
