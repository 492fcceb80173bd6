# SPDX-License-Identifier: Apache-2.0
"""Draw curves over a logarithmic axis as braille characters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

__all__ = ["COLOURS", "Curve", "draw_curves"]

#: A colour for each curve, distinct also with colour blindness; each curve also ends in its name.
COLOURS = (
    "dodger_blue1", "dark_orange", "spring_green3", "medium_purple1",
    "deep_sky_blue1", "gold1", "hot_pink", "tan",
)  # fmt: skip

_HEIGHT = 16  # rows of characters
_WIDEST = 100
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bits of the dots by column and row
_BRAILLE = 0x2800
_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.25)
_MOST_STEPS = 6
_LABEL = 7  # characters before the axis


@dataclass(frozen=True)
class Curve:
    """A name, a value between 0 and 1 at each place of the axis, and a style for rich."""

    name: str
    values: Sequence[float]
    style: str


def draw_curves(
    curves: Sequence[Curve],
    places: Sequence[int],
    width: int,
    labels: Sequence[str] | None = None,
    unit: str = "pages",
) -> list[Text]:
    """Draw curves with a common axis, each with its name at its end.

    Parameters
    ----------
    curves : sequence of Curve
        The first curves are drawn on top of the others.
    places : sequence of int
        Rising values of the axis, at least two.
    width : int
        Characters of a line.
    labels : sequence of str, optional
        Label of each place; the number by default.
    unit : str
        Name of the axis.

    Returns
    -------
    list of rich.text.Text
        The lines, from the top down.
    """
    names = max(len(curve.name) for curve in curves) + 2
    columns = min(width, _WIDEST) - _LABEL - 1 - names
    step, top = _scale(max(max(curve.values) for curve in curves))
    grid = _Grid(columns, _HEIGHT)
    first, last = math.log(places[0]), math.log(places[-1])
    xs = [(math.log(place) - first) / (last - first) for place in places]
    for curve in reversed(curves):
        grid.add(xs, [value / top for value in curve.values], curve.style)
    names_by_row = _end_labels(curves, top)
    lines = []
    for row in range(_HEIGHT):
        line = Text().append(_axis_label(row, step, top), style="dim")
        line.append_text(grid.line(row))
        if row in names_by_row:
            line.append(f" {names_by_row[row].name}", style=names_by_row[row].style)
        lines.append(line)
    texts = [f"{place:,}" for place in places] if labels is None else labels
    return [*lines, *_axis(texts, xs, columns, unit)]


def _scale(highest: float) -> tuple[float, float]:
    """Return the distance between the labels of the axis, and the end of the axis."""
    for step in _STEPS:
        count = max(1, math.ceil(highest / step - 1e-9))
        if count <= _MOST_STEPS:
            break
    return step, step * count


def _row_of(value: float, top: float) -> int:
    return min(_HEIGHT - 1, int((1 - value / top) * _HEIGHT))


def _axis_label(row: int, step: float, top: float) -> str:
    values = [step * i for i in range(round(top / step) + 1)]
    here = [value for value in values if _row_of(value, top) == row]
    return f"{here[0]:>{_LABEL - 1}.0%} ┤" if here else " " * _LABEL + "│"


def _end_labels(curves: Sequence[Curve], top: float) -> dict[int, Curve]:
    """Give each name its own row near the end of its curve, the highest curve first."""
    highest_first = sorted(curves, key=lambda curve: -curve.values[-1])[:_HEIGHT]
    rows = [_row_of(curve.values[-1], top) for curve in highest_first]
    for i in range(1, len(rows)):
        rows[i] = max(rows[i], rows[i - 1] + 1)
    for i in reversed(range(len(rows))):
        rows[i] = min(rows[i], _HEIGHT - len(rows) + i)
    return dict(zip(rows, highest_first, strict=True))


def _axis(texts: Sequence[str], xs: Sequence[float], columns: int, unit: str) -> Iterator[Text]:
    """Yield the axis and its labels; leave out a label that would touch another label."""
    rule = ["─"] * columns
    labels = [" "] * (columns + _LABEL + 1)
    free_from = 0
    for text, x in zip(texts, xs, strict=True):
        column = round(x * (columns - 1))
        rule[column] = "┬"
        start = min(max(column + _LABEL + 1 - len(text) // 2, 0), len(labels) - len(text))
        if start >= free_from:
            labels[start : start + len(text)] = text
            free_from = start + len(text) + 1
    yield Text(" " * _LABEL + "└" + "".join(rule), style="dim")
    yield Text("".join(labels).rstrip() + f"  {unit}", style="dim")


class _Grid:
    """Characters of 2 x 4 dots each; a character has the style of the last curve drawn in it."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns = columns
        self._rows = rows
        self._cells = [[0] * columns for _ in range(rows)]
        self._styles = [[""] * columns for _ in range(rows)]

    def add(self, xs: Sequence[float], ys: Sequence[float], style: str) -> None:
        """Draw a line through points whose coordinates are between 0 and 1."""
        across, up = self._columns * 2 - 1, self._rows * 4 - 1
        dots = [(x * across, (1 - y) * up) for x, y in zip(xs, ys, strict=True)]
        for (x0, y0), (x1, y1) in pairwise(dots):
            count = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0))))
            for i in range(count + 1):
                part = i / count
                self._set(round(x0 + (x1 - x0) * part), round(y0 + (y1 - y0) * part), style)

    def _set(self, x: int, y: int, style: str) -> None:
        row, column = y // 4, x // 2
        self._cells[row][column] |= _DOTS[x % 2][y % 4]
        self._styles[row][column] = style

    def line(self, row: int) -> Text:
        """Return a row of characters."""
        text = Text()
        for dots, style in zip(self._cells[row], self._styles[row], strict=True):
            text.append(chr(_BRAILLE + dots) if dots else " ", style=style or None)
        return text
