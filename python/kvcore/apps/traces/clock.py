# SPDX-License-Identifier: Apache-2.0
"""Read the times of a trace: numbers of a unit, or ISO 8601 texts."""

from __future__ import annotations

import math
import re
from array import array
from datetime import date
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.apps.traces.errors import shown_value
from kvcore.apps.traces.read_options import require_used

__all__ = ["UNITS", "Clock"]

#: Units of a second, by the short name of the unit.
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_LONG = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
#: Times from here on are dates, counted from 1970, and not times since the start of the trace.
_FIRST_DATE = 1e8  # seconds: three years
_MOST = 1e300
_ISO = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(\.\d{1,12})? ?(Z|[+-]\d\d:?\d\d)?"
)
_MISSING = math.nan


class Clock:
    """Collect the times of the rows, and convert them to seconds from the start.

    Parameters
    ----------
    unit : str
        Unit of numbers, a key of `UNITS`.
    is_forced : bool
        The user has named the unit.
    """

    def __init__(self, unit: str, *, is_forced: bool = False) -> None:
        self.unit = unit
        self._is_forced = is_forced
        self._times = array("d")
        self._is_iso: bool | None = None
        self._uses_unit = False
        self._base = 0  # whole seconds of the first ISO time: a float has too few digits for a date
        self._last_day = ("", 0)

    def __len__(self) -> int:
        return len(self._times)

    def add(self, name: str, value: Any) -> None:
        """Append the time of a row, None for a row without a time; ValueError for a bad time."""
        self._times.append(_MISSING if value is None else self._read(name, value))
        self._uses_unit |= self._is_iso is False and value is not None

    def add_seconds(self, name: str, value: float) -> None:
        """Append a time in seconds, whatever the unit of other times."""
        self._times.append(self._read(name, value * UNITS[self.unit]))

    def duration(self, name: str, value: Any) -> float:
        """Convert a duration to seconds; ValueError for a bad number."""
        if not _is_time(value):
            raise ValueError(self._expected(name, value))
        self._uses_unit = True
        return float(value) / UNITS[self.unit]

    def check_unit(self) -> None:
        """Raise ValueError if the user has named a unit that no time has."""
        is_used = self._uses_unit or not self._is_forced
        require_used("time_unit", "the times of this trace", is_used=is_used)

    def _read(self, name: str, value: Any) -> float:
        is_iso = type(value) is str
        found = self._iso_seconds(value) if is_iso else value
        if found is None or not (is_iso or _is_time(value)):
            raise ValueError(self._expected(name, value))
        if self._is_iso is None:
            self._is_iso = is_iso
        if self._is_iso is not is_iso:
            kind = "an ISO time" if self._is_iso else f"a number of {_LONG[self.unit]}"
            raise ValueError(
                f"{name}: expected {kind} as in the rows before, got {shown_value(value)}"
            )
        return float(found)

    def _expected(self, name: str, value: Any) -> str:
        return f"{name}: expected a number of {_LONG[self.unit]} >= 0, got {shown_value(value)}"

    def _iso_seconds(self, text: str) -> float | None:
        found = _ISO.fullmatch(text.strip()) if len(text) < 64 else None
        if found is None:
            return None
        year, month, day, hour, minute, second, fraction, zone = found.groups()
        key = f"{year}{month}{day}"
        if self._last_day[0] != key:
            try:
                self._last_day = (key, date(int(year), int(month), int(day)).toordinal())
            except ValueError:
                return None
        if int(hour) > 23 or int(minute) > 59 or int(second) > 60:
            return None
        whole = ((self._last_day[1] * 24 + int(hour)) * 60 + int(minute)) * 60 + int(second)
        if zone not in (None, "Z"):
            minutes = int(zone[1:3]) * 60 + int(zone[-2:])
            whole -= 60 * (minutes if zone[0] == "+" else -minutes)
        if self._base == 0:
            self._base = whole
        return whole - self._base + float(fraction or 0)

    def seconds(self) -> NDArray[np.float64]:
        """Return the times in seconds, NaN for rows without a time.

        Dates are counted from the first arrival; other times stay as they are.
        """
        times = np.array(self._times, np.float64)
        first = self._first()
        if first is None:
            return times
        if self._is_iso:
            times -= first
            return times
        if first / UNITS[self.unit] >= _FIRST_DATE:
            times -= first
        times /= UNITS[self.unit]
        return times

    def _first(self) -> float | None:
        """Return the earliest time in its unit; None if no row has a time."""
        times = np.frombuffer(self._times, np.float64)
        first = np.fmin.reduce(times, initial=np.inf)
        return None if np.isinf(first) else float(first)

    def notes(self) -> list[str]:
        """Return the lines of a report about the unit, and about the start of the clock."""
        if self._is_iso is None:
            return []
        if self._is_iso:
            return ["times are ISO dates, counted from the first arrival"]
        first = self._first() or 0.0
        by = "as --time-unit says" if self._is_forced else "the unit of the format"
        line = f"times are in {self.unit}, {by}" if self._uses_unit else "times are in s"
        if first / UNITS[self.unit] >= _FIRST_DATE:
            line += "; they are dates, counted from the first arrival"
        elif self.unit == "ms" and first >= 1e9:
            line += "; if they are seconds since 1970, --time-unit s reads them so"
        return [line]


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MOST and math.isfinite(value)
