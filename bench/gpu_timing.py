# SPDX-License-Identifier: Apache-2.0
"""Time work on a GPU by events, each call beside its limit.

What is timed is queued behind other work, so that the GPU never waits for Python between the two
events around a call. Each call is followed by its limit over as many bytes; calls go round over
memory that is larger than the caches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from time import perf_counter
from typing import Any

from harness import Row, make_row

Call = Callable[[], object]

BLOCKER_BYTES = 1 << 30
_MARGIN = 3.0  # the blocker lasts so much longer than queueing is expected to


@cache
def library() -> Any:
    """Return cupy, which a machine without a GPU need not have."""
    import cupy

    return cupy


@cache
def _blocker() -> tuple[Any, Any]:
    pair = [library().zeros(BLOCKER_BYTES, library().uint8) for _ in range(2)]
    return pair[0], pair[1]


def copy_call(target: Any, source: Any) -> Call:
    """Return a copy of the bytes of an array by the driver, on the current stream."""
    cp = library()
    pointers, size = (target.data.ptr, source.data.ptr), source.nbytes
    kind = cp.cuda.runtime.memcpyDefault

    def copy() -> None:
        cp.cuda.runtime.memcpyAsync(*pointers, size, kind, cp.cuda.get_current_stream().ptr)

    return copy


def _elapsed(begin: Any, end: Any) -> float:
    return float(library().cuda.get_elapsed_time(begin, end)) * 1e3


def _block(seconds: float) -> None:
    """Keep the current stream busy for at least so long."""
    target, source = _blocker()
    rate = 8e12  # bytes per second, more than any GPU has
    for _ in range(1 + int(seconds * rate / (2 * BLOCKER_BYTES))):
        copy_call(target, source)()


def gpu_us(calls: Sequence[Call]) -> list[float]:
    """Return the us that the GPU spends on each call, without a gap between them."""
    cp = library()
    for call in calls:
        call()  # what is compiled and loaded then is there
    stream = cp.cuda.get_current_stream()
    stream.synchronize()
    start = perf_counter()
    for call in calls:
        call()
    host = perf_counter() - start
    stream.synchronize()
    events = [[cp.cuda.Event() for _ in range(2)] for _ in calls]
    _block(_MARGIN * host)
    for call, (begin, end) in zip(calls, events, strict=True):
        begin.record(stream)
        call()
        end.record(stream)
    stream.synchronize()
    return [_elapsed(*pair) for pair in events]


def against(key: str, work: str, calls: Sequence[Call], limits: Sequence[Call], name: str) -> Row:
    """Time calls and their limits by turns; the row's limit is their median."""
    both = [call for pair in zip(calls, limits, strict=True) for call in pair]
    spent = gpu_us(both)
    limit = statistics.median(spent[1::2])
    return make_row(key, work, spent[::2], limit=limit, limit_name=name)


def captured(calls: Sequence[Call]) -> Any:
    """Return calls as one graph, captured on the current stream, which is not the default one."""
    stream = library().cuda.get_current_stream()
    calls[0]()  # what it loads and takes is there when it is captured
    stream.synchronize()
    stream.begin_capture()
    for call in calls:
        call()
    return stream.end_capture()
