# SPDX-License-Identifier: Apache-2.0
"""Walk through the rows of a trace: JSON lines, the values of a JSON array, or CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from kvcore.apps.traces.errors import LineError, shown, shown_value
from kvcore.apps.traces.json_values import JsonDocument, parsed_row
from kvcore.apps.traces.source import Source

__all__ = ["UnusedFields", "csv_rows", "json_rows", "row_errors"]

_MOST_NAMES = 8


class UnusedFields:
    """Collect the names of fields that a reader does not know."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        self._names: dict[str, None] = {}

    def look(self, names: Any) -> None:
        """Note the names that are not known."""
        for name in names - self._known:
            if len(self._names) <= _MOST_NAMES:
                self._names[name] = None

    def notes(self) -> list[str]:
        """Return at most one line of a report."""
        names = sorted(self._names)[:_MOST_NAMES]
        if not names:
            return []
        more = ", and more" if len(self._names) > _MOST_NAMES else ""
        listed = ", ".join(shown_value(name) for name in names)
        return [f"fields that are not used: {listed}{more}"]


@contextmanager
def row_errors(number: int) -> Iterator[None]:
    """Add the number of the row to the ValueError of a bad field."""
    try:
        yield
    except LineError:
        raise
    except ValueError as error:
        raise LineError(number, str(error)) from None


def json_rows(source: Source, limit: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each JSON line, or of each value of a JSON array."""
    if source.beginning.lstrip()[:1] == b"[":
        yield from islice(_array_rows(source), limit)
        return
    for number, text in islice(source.lines(), limit):
        with row_errors(number):
            row = parsed_row(text)
        yield number, row


def _array_rows(source: Source) -> Iterator[tuple[int, dict[str, Any]]]:
    document = JsonDocument(source.chunks())
    for row in document.items():
        if not isinstance(row, dict):
            raise LineError(document.number, f"expected a JSON object, got {shown_value(row)}")
        yield document.number, row
    document.end()


def csv_rows(
    source: Source, limit: int | None
) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the names of the columns, and an iterator over the numbers and values of the rows."""
    lines = source.lines()
    number = 1

    def texts() -> Iterator[str]:
        nonlocal number
        for at, text in lines:
            number = at
            yield text

    reader = csv.reader(texts(), strict=True)

    def rows() -> Iterator[tuple[int, list[str]]]:
        try:
            for row in islice(reader, limit):
                if len(row) != len(header):
                    raise LineError(
                        number, f"expected {len(header)} values, got {len(row)}: {shown(str(row))}"
                    )
                yield number, row
        except csv.Error as error:
            raise LineError(number, f"expected CSV, got an error: {error}") from None

    try:
        header = [name.strip() for name in next(reader, [])]
    except csv.Error as error:
        raise LineError(number, f"expected CSV, got an error: {error}") from None
    return header, rows()
