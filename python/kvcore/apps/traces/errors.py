# SPDX-License-Identifier: Apache-2.0
"""The errors of bad traces, and short texts of the values in them."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["LineError", "TraceError", "counted", "printable", "shown", "shown_value"]

_SHOWN_CHARACTERS = 40


class TraceError(ValueError):
    """Raised for a bad trace; the text has the file, the row, the field and the expected value."""

    def __init__(self, path: str, line: int | None, what: str) -> None:
        place = printable(path) if line is None else f"{printable(path)}:{line}"
        super().__init__(f"{place}: {what}")
        self.path = path
        self.line = line


class LineError(ValueError):
    """Raised for a line that cannot be read; the text gives the reason."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


def counted(count: int, what: str) -> str:
    """Return a number of things, such as "1 row" and "2 rows"."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """Return a text with escapes for characters that are not printable, such as control characters.

    The names of files may have any characters, also bytes that are not UTF-8.
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def shown(text: str) -> str:
    """Return the beginning of a text on one line, with escapes for control characters."""
    text = printable(" ".join(text[: 4 * _SHOWN_CHARACTERS].split()))
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def shown_value(value: Any) -> str:
    """Return the beginning of a JSON value on one line."""
    if isinstance(value, list):
        value = value[:_SHOWN_CHARACTERS]
    elif isinstance(value, str):
        value = value[: 2 * _SHOWN_CHARACTERS]
    elif isinstance(value, int) and not -(10**30) < value < 10**30:
        return "a number of more than 30 digits"
    return shown(json.dumps(value))
