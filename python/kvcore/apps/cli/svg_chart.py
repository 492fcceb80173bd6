# SPDX-License-Identifier: Apache-2.0
"""Draw line charts as SVG without a library; the style sheet sets the colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Axis", "Chart", "Line", "linear_axis", "log_axis"]

_LEFT, _TOP, _BOTTOM = 62, 14, 46
_RIGHT = 16
_END_LABELS = 86  # to the right of the curves, at least
_CHARACTER = 6.6  # approximate width in a label
_LABEL_HEIGHT = 14
_MARKS = (  # paths of 8 x 8 units, around the origin
    "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0z",
    "M-3.3-3.3h6.6v6.6h-6.6z",
    "M0-4.4L4.2 3.2h-8.4z",
    "M0-4.6L4.6 0 0 4.6-4.6 0z",
    "M0 4.4L4.2-3.2h-8.4z",
    "M-1.4-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",
    "M-4.2-2.2L-2.2-4.2 0-2 2.2-4.2 4.2-2.2 2 0 4.2 2.2 2.2 4.2 0 2-2.2 4.2-4.2 2.2-2 0z",
    "M0-4.6L1.4-1.4H4.6L2 .8 3 4.2 0 2.2-3 4.2-2 .8-4.6-1.4H-1.4z",
)


@dataclass(frozen=True)
class Axis:
    """A range of values with a title and labelled values."""

    title: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False
    kind: str = ""  # format of a value in the script of the page

    def part(self, value: float) -> float:
        """Return the position of a value on the axis, 0 to 1."""
        low, high, at = self.low, self.high, value
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return (at - low) / (high - low)


@dataclass(frozen=True)
class Line:
    """A name, the CSS class of the colour, and the points; points with NaN are not drawn."""

    name: str
    colour: str
    xs: Sequence[float]
    ys: Sequence[float]


def linear_axis(
    title: str, low: float, high: float, write: Callable[[float], str], *, kind: str = ""
) -> Axis:
    """Make an axis from `low` with labels at round values, the last label at or above `high`."""
    span = max(high - low, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / 5))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= span / 5.01)
    count = max(1, math.ceil(span / step - 1e-9))
    ticks = tuple((low + step * i, write(low + step * i)) for i in range(count + 1))
    return Axis(title, low, low + step * count, ticks, kind=kind)


def log_axis(
    title: str, values: Sequence[float], labels: Sequence[str] | None = None, *, kind: str = ""
) -> Axis:
    """Make an axis with a label at each of the rising `values`; a single value is in the middle."""
    low, high = values[0], values[-1]
    if low == high:
        low, high = low / 2, high * 2
    texts = [f"{value:,.0f}" for value in values] if labels is None else labels
    ticks = tuple(zip(values, texts, strict=True))
    return Axis(title, low, high, ticks, is_log=True, kind=kind)


@dataclass(frozen=True)
class Chart:
    """Lines over common axes.

    Attributes
    ----------
    key : str
        Name of the chart in the script of the HTML page.
    title : str
        Description of the chart for screen readers.
    lines : tuple of Line
        The first lines are drawn on top of the others, and a line of the class "limit" on top of
        all.
    x, y : Axis
        The axes.
    width, height : int
        Size of the picture, in SVG units.
    is_labelled : bool
        Draw marks at the points, and write the name of each line at its end.
    has_marks : bool
        Draw marks at the points, also without names.
    """

    key: str
    title: str
    lines: tuple[Line, ...]
    x: Axis
    y: Axis
    width: int = 960
    height: int = 420
    is_labelled: bool = False
    has_marks: bool = False

    @property
    def right(self) -> float:
        """Right end of the curves, in SVG units."""
        if not self.is_labelled:
            return self.width - _RIGHT
        longest = max(len(line.name) for line in self.lines)
        return self.width - max(_END_LABELS, math.ceil(22 + longest * _CHARACTER * 1.08))

    @property
    def bottom(self) -> float:
        """Height of the x axis, in SVG units from the top."""
        return self.height - _BOTTOM

    def svg(self, style: str = "") -> str:
        """Return the picture as SVG; with a `style` sheet it is a complete file."""
        own = f' xmlns="http://www.w3.org/2000/svg"><style>{style}</style' if style else ""
        parts = [
            f'<svg class="chart" data-key="{escape(self.key)}" role="img" '
            f'viewBox="0 0 {self.width} {self.height}"{own}><title>{escape(self.title)}</title>',
            *self._grid(),
            *(self._line(i) for i in self._order()),
        ]
        if self.is_labelled:
            parts += self._end_labels()
        return "".join([*parts, '<g class="cursor"></g></svg>'])

    def _order(self) -> list[int]:
        """Return the lines in the order of drawing: the last is on top."""
        places = reversed(range(len(self.lines)))
        return sorted(places, key=lambda i: self.lines[i].colour == "limit")

    def data(self) -> dict[str, object]:
        """Return the data that the script of the page needs to show values, ready for JSON."""
        return {
            "box": [_LEFT, _TOP, self.right, self.bottom],
            "x": _scale(self.x),
            "y": _scale(self.y),
            "lines": [
                {
                    "name": line.name,
                    "colour": line.colour,
                    "points": [[_short(x), _short(y)] for x, y in _points(line)],
                }
                for line in self.lines
            ],
        }

    def _place(self, x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + self.x.part(x) * (self.right - _LEFT),
            self.bottom - self.y.part(y) * (self.bottom - _TOP),
        )

    def _grid(self) -> Iterable[str]:
        for value, label in self.y.ticks:
            y = self._place(self.x.low, value)[1]
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{self.right}"/>'
            yield _text(_LEFT - 8, y + 4, label, "tick end")
        free_from = -math.inf
        for value, label in self.x.ticks:
            x = self._place(value, self.y.low)[0]
            yield f'<path class="axis" d="M{x:.1f} {self.bottom}v4"/>'
            half = len(label) * _CHARACTER / 2
            x = min(x, self.width - half - 1)
            if x - half >= free_from:
                yield _text(x, self.bottom + 18, label, "tick middle")
                free_from = x + half + 6
        yield f'<path class="axis" d="M{_LEFT} {self.bottom}H{self.right}"/>'
        yield _text((_LEFT + self.right) / 2, self.height - 8, self.x.title, "name middle")
        middle = (_TOP + self.bottom) / 2
        yield (
            f'<text class="name middle" transform="translate(11 {middle:.0f}) rotate(-90)">'
            f"{escape(self.y.title)}</text>"
        )

    def _line(self, index: int) -> str:
        line = self.lines[index]
        places = [self._place(x, y) for x, y in _points(line)]
        d = "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(places))
        drawn = f'<path class="line" d="{d}"/>'
        if (self.is_labelled or self.has_marks) and line.colour.startswith("s"):
            # Lines of the same colour have different marks.
            mark = _MARKS[(index + index // len(_MARKS)) % len(_MARKS)]
            drawn += "".join(
                f'<path class="mark" d="{mark}" transform="translate({x:.1f} {y:.1f})"/>'
                for x, y in places
            )
        return f'<g class="curve {line.colour} c{index}">{drawn}</g>'

    def _end_labels(self) -> Iterable[str]:
        ends = [
            (self._place(*_points(line)[-1])[1], i, line)
            for i, line in enumerate(self.lines)
            if _points(line)
        ]
        ends.sort(key=lambda end: end[0])
        places = _spread([y for y, *_ in ends], self.bottom)
        for (y, i, line), place in zip(ends, places, strict=True):
            yield (
                f'<g class="curve {line.colour} c{i}"><path class="lead" '
                f'd="M{self.right + 5} {y:.1f}'
                f'L{self.right + 13} {place:.1f}"/>{_text(self.right + 17, place + 4, line.name)}'
                "</g>"
            )


def _points(line: Line) -> list[tuple[float, float]]:
    return [(x, y) for x, y in zip(line.xs, line.ys, strict=True) if not math.isnan(y)]


def _spread(wanted: Sequence[float], lowest: float) -> list[float]:
    """Move rising places apart, but not below `lowest`, so that their labels do not touch."""
    places = list(wanted)
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + _LABEL_HEIGHT)
    highest = lowest
    for i in reversed(range(len(places))):
        places[i] = min(places[i], highest)
        highest = places[i] - _LABEL_HEIGHT
    return places


def _scale(axis: Axis) -> dict[str, object]:
    return {"low": axis.low, "high": axis.high, "log": axis.is_log, "kind": axis.kind}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _text(x: float, y: float, text: str, kind: str = "end-name") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
