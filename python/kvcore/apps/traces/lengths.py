# SPDX-License-Identifier: Apache-2.0
"""Traces of lengths only: Azure's and BurstGPT's CSV files, and JSON lines without block ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcore.apps.replay.workload import Workload
from kvcore.apps.traces.clock import Clock
from kvcore.apps.traces.errors import LineError, shown
from kvcore.apps.traces.read_options import ReadOptions
from kvcore.apps.traces.rows import UnusedFields, csv_rows, json_rows, row_errors
from kvcore.apps.traces.trace import Requests, Trace, output_count, token_count

if TYPE_CHECKING:
    from kvcore.apps.traces.source import Source

__all__ = ["AZURE_COLUMNS", "BURST_COLUMNS", "LengthContent", "read_azure", "read_burstgpt"]
__all__ += ["read_lengths"]

#: Columns with the time, the input tokens and the output tokens.
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
_BURST_OTHERS = frozenset({"Model", "Total tokens", "Log Type"})
_FIELDS = ("timestamp", "input_length", "output_length")
_MOST_DIGITS = 20


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthContent:
    """Prompts of which only the lengths are known.

    Attributes
    ----------
    prefix_share : float or None
        Share of each prompt that is made up to be equal in all prompts; None for no such prefix.
    """

    prefix_share: float | None

    def reordered(self, order: NDArray[np.int64]) -> LengthContent:
        """Return the same content: it does not depend on the order."""
        del order
        return self

    def notes(self) -> list[str]:
        """Say that hits cannot be seen, or that they are made up."""
        if self.prefix_share is None:
            return ["only lengths: no prefix can be seen, so only the occupancy is simulated"]
        return [
            f"only lengths: the hits are made up by --prefix-share {self.prefix_share:g}, the "
            f"share of each prompt that all prompts begin with"
        ]

    def workload(self, trace: Trace) -> LengthWorkload:
        """Make prompts that share the made-up prefix and no other token in the same place."""
        return LengthWorkload(**trace.base_fields(), prefix_share=self.prefix_share or 0.0)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LengthWorkload(Workload):
    """Prompts that differ from each other after a common prefix.

    The first token after the prefix is the number of the request, from 1. All other tokens are 0.

    Attributes
    ----------
    prefix_share : float
        Share of each prompt that is the common prefix.
    """

    prefix_share: float
    _scratch: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_scratch", np.zeros(int(self.prompt_lengths.max()), np.int32))

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Return the prompt of one request (valid until the next call)."""
        length = int(self.prompt_lengths[index])
        tokens = self._scratch[:length]
        tokens[:] = 0
        tokens[int(length * self.prefix_share)] = index + 1
        return tokens

    def output_tokens_at(self, places: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return zeros: an output follows a prompt that no other request has."""
        return np.zeros(places.shape, np.int32)


def _content(options: ReadOptions) -> LengthContent:
    return LengthContent(prefix_share=options.prefix_share)


def _clock(unit: str, options: ReadOptions) -> Clock:
    return Clock(options.time_unit or unit, is_forced=options.time_unit is not None)


def read_azure(source: Source, name: str, options: ReadOptions) -> Trace:
    """Read Azure's traces of 2023 and 2024: ISO times and two numbers of tokens."""
    return _read_csv(source, name, "azure", AZURE_COLUMNS, frozenset(), options)


def read_burstgpt(source: Source, name: str, options: ReadOptions) -> Trace:
    """Read BurstGPT's traces: seconds and two numbers of tokens."""
    return _read_csv(source, name, "burstgpt", BURST_COLUMNS, _BURST_OTHERS, options)


def _read_csv(
    source: Source,
    name: str,
    format_name: str,
    columns: tuple[str, str, str],
    others: frozenset[str],
    options: ReadOptions,
) -> Trace:
    header, rows = csv_rows(source, options.limit)
    by_name = {column.lower(): i for i, column in enumerate(header)}
    if len(by_name) != len(header):
        raise LineError(1, "expected each column once, got a name twice")
    missing = [column for column in columns if column.lower() not in by_name]
    if missing:
        raise LineError(
            1, f"expected the columns {', '.join(columns)}, got {shown(', '.join(header))}"
        )
    time_at, input_at, output_at = (by_name[column.lower()] for column in columns)
    known = {column.lower() for column in (*columns, *others)}
    unused = UnusedFields(frozenset(each for each in header if each.lower() in known))
    unused.look(set(header))
    requests = Requests(_clock("s", options))
    for number, row in rows:
        with row_errors(number):
            inputs = token_count(columns[1], _whole(row[input_at]))
            outputs = output_count(
                columns[2], _whole(row[output_at]) if row[output_at].strip() else None
            )
            requests.clock.add(columns[0], _csv_time(row[time_at]))
            requests.add(inputs, outputs)
    return requests.finish(name, format_name, _content(options), unused.notes())


def _whole(text: str) -> int | str:
    """Return a whole number; any other text stays a text, for an error."""
    text = text.strip()
    return int(text) if text.isdecimal() and text.isascii() and len(text) < _MOST_DIGITS else text


def _csv_time(text: str) -> float | str | None:
    text = text.strip()
    if not text:
        return None
    try:
        return float(text) if len(text) < 64 else text
    except ValueError:
        return text


def read_lengths(source: Source, name: str, options: ReadOptions) -> Trace:
    """Read JSON lines with `timestamp`, `input_length` and `output_length`."""
    unused = UnusedFields(frozenset(_FIELDS))
    requests = Requests(_clock("ms", options))
    for number, row in json_rows(source, options.limit):
        with row_errors(number):
            unused.look(row.keys())
            inputs = token_count("input_length", row.get("input_length"))
            outputs = output_count("output_length", row.get("output_length"))
            requests.clock.add("timestamp", row.get("timestamp"))
            requests.add(inputs, outputs)
    return requests.finish(name, "lengths", _content(options), unused.notes())
