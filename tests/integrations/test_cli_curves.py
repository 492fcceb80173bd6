# SPDX-License-Identifier: Apache-2.0
"""Curves on a terminal: their positions, and the output for narrow and plain terminals."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvcore.apps.cli.comparison_table import print_comparison
from kvcore.apps.cli.curves import COLOURS, Curve, draw_curves
from kvcore.replay import POLICIES, Comparison, PoolSettings, compare, read_trace
from trace_files import random_rows, write_trace

BRAILLE = range(0x2801, 0x2900)


def drawn(*curves: Curve, places: tuple[int, ...] = (10, 100, 1000), width: int = 80) -> list[str]:
    return [line.plain for line in draw_curves(curves, places, width)]


def rows_with_dots(lines: list[str]) -> list[int]:
    return [i for i, line in enumerate(lines) if any(ord(c) in BRAILLE for c in line)]


def test_a_constant_lies_in_one_row_and_its_name_at_the_end() -> None:
    lines = drawn(Curve("lru", [0.5, 0.5, 0.5], "red"))
    (row,) = rows_with_dots(lines)
    assert lines[row].endswith(" lru")
    assert lines[row].startswith("   50%")


def test_a_rising_curve_fills_the_rows_from_the_bottom_to_the_top() -> None:
    lines = drawn(Curve("lru", [0.0, 0.5, 1.0], "red"))
    assert rows_with_dots(lines) == list(range(16))
    assert lines[0].startswith("  100%")
    assert lines[15].startswith("    0%")
    assert len({len(line) for line in lines[:15]}) <= 2


def test_places_are_labelled_where_they_lie() -> None:
    *_, rule, labels = drawn(Curve("lru", [0.1, 0.2, 0.3], "red"))
    ticks = [i for i, c in enumerate(rule) if c == "┬"]
    assert len(ticks) == 3
    assert ticks[1] - ticks[0] == pytest.approx(ticks[2] - ticks[1], abs=1)
    for text in ("10", "100", "1,000", "pages"):
        assert text in labels


def test_labels_that_would_touch_are_left_out() -> None:
    *_, labels = drawn(Curve("lru", [0.1] * 4, "red"), places=(10_000, 10_001, 10_002, 20_000))
    assert labels.split() == ["10,000", "20,000", "pages"]


def test_equal_curves_have_all_their_names() -> None:
    lines = drawn(*(Curve(f"p{i}", [0.2, 0.2, 0.2], "red") for i in range(8)))
    for i in range(8):
        assert sum(line.endswith(f" p{i}") for line in lines) == 1


def test_names_come_in_the_order_of_their_curves() -> None:
    ends = [0.70, 0.71, 0.02, 0.90, 0.0, 0.01]
    lines = drawn(*(Curve(f"p{end}", [0.1, 0.2, end], "red") for end in ends))
    shown = [line.split()[-1] for line in lines if line.split()[-1].startswith("p0")]
    assert shown == [f"p{end}" for end in sorted(ends, reverse=True)]


@pytest.mark.parametrize("highest", [0.0, 0.004, 0.03, 0.11, 0.37, 0.61, 0.99, 1.0])
def test_no_value_leaves_the_picture(highest: float) -> None:
    lines = drawn(Curve("lru", [0.0, highest / 2, highest], "red"))
    assert rows_with_dots(lines)
    assert max(rows_with_dots(lines)) == 15


def test_there_is_a_colour_for_each_policy() -> None:
    assert len(POLICIES) <= len(COLOURS)


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    workload = read_trace(write_trace(tmp_path, *random_rows(7, requests=60, depth=6, fan_out=2)))
    pools = [PoolSettings(page_size=512, pages=pages) for pages in (8, 30, 90)]
    return compare(workload, pools, POLICIES)


def shown(comparison: Comparison, *, width: int, is_terminal: bool = True) -> str:
    file = io.StringIO()
    options = {"force_terminal": is_terminal, "width": width, "color_system": None}
    print_comparison(comparison, Console(file=file, **options))  # type: ignore[arg-type]
    return file.getvalue()


def has_curves(text: str) -> bool:
    return any(ord(c) in BRAILLE for c in text)


@pytest.mark.parametrize("width", [60, 80, 120, 300])
def test_a_terminal_shows_curves_and_the_table(comparison: Comparison, width: int) -> None:
    text = shown(comparison, width=width)
    assert has_curves(text)
    assert max(map(len, text.splitlines())) <= width
    for run in comparison.runs:
        assert f"{run.report.token_hit_rate:.2%}" in text


@pytest.mark.parametrize("width", [36, 44, 59])
def test_a_narrow_terminal_shows_the_table_alone(comparison: Comparison, width: int) -> None:
    text = shown(comparison, width=width)
    assert not has_curves(text)
    assert "…" not in text
    for run in comparison.runs:
        assert f"{run.report.token_hit_rate:.2%}" in text


def test_a_file_gets_the_table_alone(comparison: Comparison) -> None:
    text = shown(comparison, width=80, is_terminal=False)
    assert not has_curves(text)
    assert "optimum" in text


def test_one_pool_has_no_curve(comparison: Comparison, tmp_path: Path) -> None:
    workload = read_trace(write_trace(tmp_path, *random_rows(7, requests=9, depth=3, fan_out=2)))
    alone = compare(workload, [PoolSettings(page_size=512, pages=50)], POLICIES)
    assert not has_curves(shown(alone, width=80))
