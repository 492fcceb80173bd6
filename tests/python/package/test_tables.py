# SPDX-License-Identifier: Apache-2.0
"""Tests that are one table report every row that fails."""

from __future__ import annotations

import pytest

from tables import table

ROWS = [(1, "1"), (2, "x"), (3, "3"), (4, "y")]


@table(("number", "text"), ROWS)
def check(number: int, text: str) -> None:
    with pytest.raises(KeyError, match=text):
        raise KeyError(number)


@table("number", [1, 2])
def raises_in_some_rows(number: int) -> None:
    with pytest.raises(KeyError):
        [{1: 1}, {}][number % 2][1]


def test_every_row_that_fails_is_reported() -> None:
    with pytest.raises(AssertionError, match="2 of 4 rows fail") as caught:
        check()
    assert "'number': 2, 'text': 'x'" in str(caught.value)
    assert "'number': 4, 'text': 'y'" in str(caught.value)
    assert "'number': 1" not in str(caught.value)


def test_a_row_that_raises_nothing_fails() -> None:
    with pytest.raises(AssertionError, match=r"1 of 2 rows fail(?s:.*)DID NOT RAISE"):
        raises_in_some_rows()


def test_columns_are_arguments() -> None:
    with pytest.raises(AssertionError, match="a column has no argument"):
        table("other", [1])(lambda number: None)


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(AssertionError, match="a table needs rows"):
        table("number", [])


def test_a_row_that_skips_fails() -> None:
    @table("number", [1, 2])
    def skips(number: int) -> None:
        if number == 2:
            pytest.skip("no such number")

    with pytest.raises(AssertionError, match="a row skips"):
        skips()
