# SPDX-License-Identifier: Apache-2.0
"""The one form of a trace in memory: arrays of the requests, and the content of the prompts."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcore.apps.traces.errors import counted, shown_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcore.apps.replay.workload import Workload
    from kvcore.apps.traces.clock import Clock

__all__ = ["MAX_REQUEST_TOKENS", "Content", "Requests", "Trace", "output_count", "token_count"]

#: Maximum tokens of a prompt, and of an output; no model has a longer context. The bound limits the
#: memory, because a short row can contain any number, and each prompt token takes four bytes.
MAX_REQUEST_TOKENS = 2**24
_COUNT = f"a positive integer, at most {MAX_REQUEST_TOKENS} tokens"
_NONE = -1

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


class Content(Protocol):
    """The tokens of the prompts, or what a trace has in place of tokens."""

    def reordered(self, order: _Ints) -> Content:
        """Return the content of the requests in another order."""

    def notes(self) -> list[str]:
        """Return the lines of a report about the content."""

    def workload(self, trace: Trace) -> Workload:
        """Return the requests of a replay."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """The requests of a trace, in the order of their arrival.

    Attributes
    ----------
    name, format : str
        Name of the file, name of its format.
    arrivals : numpy.ndarray
        float64 ``[n]``, seconds. For a request with a delay the time only orders the requests.
    input_lengths, output_lengths : numpy.ndarray
        int64 ``[n]``, tokens, at least 1.
    sessions, parents : numpy.ndarray
        int64 ``[n]``: number of the session, and index of the request that this request continues,
        which is smaller than its own index; -1 for none.
    waits : numpy.ndarray
        int64 ``[m, 2]``, pairs: the first request also waits for the answer of the second request,
        which is a sub-agent's last request, or the request that starts a sub-agent.
    delays : numpy.ndarray
        float64 ``[n]``, seconds between the last of these answers and this request; NaN for a
        request that arrives at its own time. A request has at most one follower with a delay.
    content : Content
        Tokens or blocks of the prompts.
    notes : tuple of str
        One line for each thing that the reader found or assumed.
    """

    name: str
    format: str
    arrivals: _Floats
    input_lengths: _Ints
    output_lengths: _Ints
    sessions: _Ints
    parents: _Ints
    waits: _Ints
    delays: _Floats
    content: Content
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.arrivals)

    def sorted(self) -> Trace:
        """Return the trace with its requests in the order of their arrivals.

        A request that arrives before its parent, which only a request without a delay can do,
        continues no request.
        """
        order = np.argsort(self.arrivals, kind="stable")
        places = np.arange(len(self))
        rank = np.empty(len(self) + 1, np.int64)
        rank[order], rank[_NONE] = places, _NONE
        parents = rank[self.parents[order]]
        return replace(
            self,
            arrivals=self.arrivals[order],
            input_lengths=self.input_lengths[order],
            output_lengths=self.output_lengths[order],
            sessions=self.sessions[order],
            parents=np.where(parents < places, parents, _NONE),
            waits=rank[self.waits],
            delays=self.delays[order],
            content=self.content.reordered(order),
        )

    def workload(self) -> Workload:
        """Return the requests of a replay."""
        return self.content.workload(self)

    def base_fields(self) -> dict[str, Any]:
        """Return the fields that all kinds of workloads have."""
        next_turns = np.full(len(self), _NONE, np.int64)
        follows = np.flatnonzero(~np.isnan(self.delays) & (self.parents != _NONE))
        next_turns[self.parents[follows]] = follows
        return {
            "name": self.name,
            "assumptions": self.notes,
            "arrivals": self.arrivals,
            "prompt_lengths": self.input_lengths,
            "output_lengths": self.output_lengths,
            "output_starts": np.cumsum(self.output_lengths) - self.output_lengths,
            "next_turns": next_turns,
            "think_times": np.nan_to_num(self.delays),
            "waits": self.waits,
            "sessions": self.sessions,
        }


def token_count(name: str, value: Any, *, least: int = 1) -> int:
    """Check a number of tokens; ValueError for any other value."""
    if type(value) is not int or not least <= value <= MAX_REQUEST_TOKENS:
        raise ValueError(f"{name}: expected {_COUNT}, got {shown_value(value)}")
    return value


def output_count(name: str, value: Any) -> int:
    """Check a number of output tokens; 0 for no output, also if the field is missing."""
    return 0 if value is None else token_count(name, value, least=0)


class Requests:
    """Collect the requests of a trace in the order of the file.

    Parameters
    ----------
    clock : Clock
        Times of the rows; the reader adds a time for each request that it adds here.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._inputs = array("q")
        self._outputs = array("q")
        # Most traces have no sessions, so these arrays have an item for each row with a link.
        self._linked = array("q")
        self._sessions = array("q")
        self._parents = array("q")
        self._delays = array("d")
        self._waits: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._inputs)

    def add(
        self,
        inputs: int,
        outputs: int,
        *,
        session: int = _NONE,
        parent: int = _NONE,
        delay: float = np.nan,
        waits: Sequence[int] = (),
    ) -> None:
        """Append a request; 0 outputs for a request without an output.

        With a delay, the request follows the answers to its parent and to the requests in `waits`.
        """
        if waits:
            self._waits[len(self)] = tuple(waits)
        if session != _NONE or parent != _NONE or not math.isnan(delay):
            self._linked.append(len(self))
            self._sessions.append(session)
            self._parents.append(parent)
            self._delays.append(delay)
        self._inputs.append(inputs)
        self._outputs.append(outputs)

    def told(self) -> str:
        """Return a phrase with the number of requests and the longest prompt."""
        longest = max(self._inputs, default=0)
        return f"{len(self._inputs)} requests of up to {longest} tokens"

    def finish(
        self,
        name: str,
        format_name: str,
        content: Content,
        notes: list[str],
        *,
        has_rows_in_order: bool = True,
    ) -> Trace:
        """Sort the requests by their arrival, and return the trace.

        With `has_rows_in_order`, the report counts the rows that come too late in the file.

        Raises
        ------
        ValueError
            There is no request, or the named unit of the times has no effect.
        """
        if not len(self):
            raise ValueError("expected at least one request, got none")
        self.clock.check_unit()
        parents, delays = self._links(self._parents, _NONE), self._links(self._delays, math.nan)
        outputs = np.frombuffer(self._outputs, np.int64)
        arrivals, missing = self._arrivals(parents, delays)
        late = int((np.diff(arrivals) < 0).sum())
        empty = len(outputs) - int(np.count_nonzero(outputs))
        said = [*self.clock.notes(), *content.notes(), *notes]
        if missing and np.isnan(self.clock.seconds()).all():
            said.append("no row has a time: all requests arrive at once, in the order of the file")
        elif missing:
            said.append(f"{counted(missing, 'row')} without a time: at the time of the row before")
        if late and has_rows_in_order:
            said.append(
                f"{counted(late, 'row')} earlier than the row before: all are sorted by time"
            )
        if empty:
            said.append(f"{counted(empty, 'row')} without an output: 1 token is generated")
        trace = Trace(
            name=name,
            format=format_name,
            arrivals=arrivals,
            input_lengths=np.frombuffer(self._inputs, np.int64),
            output_lengths=np.maximum(outputs, 1) if empty else outputs,
            sessions=self._links(self._sessions, _NONE),
            parents=parents,
            waits=self._pairs(),
            delays=delays,
            content=content,
            notes=tuple(said),
        )
        return trace.sorted() if late else trace

    def _links(self, values: array[Any], default: float) -> NDArray[Any]:
        """Return a value for each row; read-only, and without memory if no row has a link."""
        given = np.array(values)
        if not len(given):
            return np.broadcast_to(np.array(default, given.dtype), len(self))
        all_rows = np.full(len(self), default, given.dtype)
        all_rows[np.frombuffer(self._linked, np.int64)] = given
        return all_rows

    def _arrivals(self, parents: _Ints, delays: _Floats) -> tuple[_Floats, int]:
        """Return the arrivals, and the number of rows with neither a time nor a delay."""
        times = self.clock.seconds()
        is_missing = np.isnan(times)
        missing = int(np.count_nonzero(is_missing))
        if not missing:
            filled = times
        else:
            if missing == len(times):
                times[:1] = 0
            known = np.maximum.accumulate(np.where(np.isnan(times), -1, np.arange(len(times))))
            first = int(np.argmax(~np.isnan(times)))
            filled = times[np.where(known < 0, first, known)]
        follows = ~np.isnan(delays)
        for index in np.flatnonzero(follows).tolist():
            parent = () if parents[index] == _NONE else (int(parents[index]),)
            before = max(filled[each] for each in (*parent, *self._waits.get(index, ())))
            after = before + delays[index] if is_missing[index] else filled[index]
            filled[index] = max(before, after)
        return filled, int((is_missing & ~follows).sum())

    def _pairs(self) -> _Ints:
        """Return the pairs of `Trace.waits`, in the order of the file."""
        pairs = [(index, other) for index, others in self._waits.items() for other in others]
        return np.array(pairs, np.int64).reshape(-1, 2)
