# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG: axes with round labels, and every point at its value."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from kvcore.apps.cli.svg_chart import Chart, Line, linear_axis, log_axis


def chart(*lines: Line, is_labelled: bool = True) -> Chart:
    x = log_axis("pages", [10.0, 100.0, 1000.0], kind="pages")
    y = linear_axis("rate", 0.0, 0.5, "{:.1f}".format, kind="share")
    return Chart("key", "title", lines, x, y, width=600, height=300, is_labelled=is_labelled)


def paths(picture: ET.Element, kind: str) -> list[str]:
    return [each.attrib["d"] for each in picture.iter("path") if each.get("class") == kind]


@pytest.mark.parametrize("high", [1e-6, 0.004, 0.037, 0.37, 0.5, 1.0, 7, 99, 12_031, 3.3e9])
def test_an_axis_ends_at_a_round_value_above(high: float) -> None:
    axis = linear_axis("", 0.0, high, "{:.3g}".format)
    assert high <= axis.high * (1 + 1e-9) <= high * 1.5
    assert 3 <= len(axis.ticks) <= 7
    digits = f"{axis.ticks[1][0]:.6e}".split("e")[0].rstrip("0").rstrip(".")
    assert digits in ("1", "2", "2.5", "5")
    assert axis.ticks[-1][0] == pytest.approx(axis.high)


def test_points_lie_on_a_logarithmic_axis() -> None:
    picture = ET.fromstring(chart(Line("lru", "s0", [10, 100, 1000], [0, 0.25, 0.5])).svg())
    (line,) = paths(picture, "line")
    points = [tuple(map(float, p.split())) for p in re.split("[ML]", line)[1:]]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert (x1 - x0, y0 - y1) == pytest.approx((x2 - x1, y1 - y2), abs=0.2)
    assert len(paths(picture, "mark")) == 3


def test_points_without_a_value_are_left_out() -> None:
    drawn = chart(Line("lru", "s0", [10, 100, 1000], [0.1, math.nan, 0.2]), is_labelled=False)
    (line,) = paths(ET.fromstring(drawn.svg()), "line")
    assert line.count("L") == 1
    told = json.loads(json.dumps(drawn.data()))["lines"]
    assert [each["points"] for each in told] == [[[10, 0.1], [1000, 0.2]]]


def test_a_line_without_any_value_is_drawn_as_nothing() -> None:
    ET.fromstring(chart(Line("lru", "s0", [10.0], [math.nan])).svg())


def test_names_at_the_ends_do_not_touch() -> None:
    lines = [Line(f"p{i}", f"s{i}", [10, 1000], [0.1, 0.001 * i]) for i in range(8)]
    picture = ET.fromstring(chart(*lines).svg())
    names = [each for each in picture.iter("text") if each.get("class") == "end-name"]
    assert {each.text for each in names} == {f"p{i}" for i in range(8)}
    ys = sorted(float(each.attrib["y"]) for each in names)
    assert min(b - a for a, b in pairwise(ys)) >= 13.9
    assert ys[-1] <= 300 - 46 + 4.1


def test_text_is_escaped() -> None:
    drawn = chart(Line("<b>&", "s0", [10, 1000], [0, 0.1])).svg()
    assert "<b>" not in drawn
    assert "<b>&" in "".join(ET.fromstring(drawn).itertext())


def test_one_value_alone_lies_in_the_middle() -> None:
    assert log_axis("", [50.0]).part(50) == pytest.approx(0.5)


def test_labels_that_would_touch_are_left_out() -> None:
    x = log_axis("pages", [1_000_000.0, 1_000_001.0, 9_000_000.0])
    y = linear_axis("", 0.0, 1.0, str)
    line = Line("lru", "s0", [1e6, 9e6], [0, 1])
    picture = ET.fromstring(Chart("k", "t", (line,), x, y, 400, 200).svg())
    told = [each.text for each in picture.iter("text")]
    assert "1,000,000" in told
    assert "1,000,001" not in told
