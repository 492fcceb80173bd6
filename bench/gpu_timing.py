# SPDX-License-Identifier: Apache-2.0
"""Time calls on a GPU and their limits with CUDA events.

The timed calls are queued after other work, so that the GPU never waits for Python between the two
events around a call. Each call is followed by its limit, for the same number of bytes. Successive
calls use different memory, which together is larger than the caches.
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
_MARGIN = 3.0  # time of the blocking work / expected time of queueing the calls


@cache
def library() -> Any:
    """Return cupy, imported here because machines without a GPU may lack it."""
    import cupy

    return cupy


@cache
def _blocker() -> tuple[Any, Any]:
    pair = [library().zeros(BLOCKER_BYTES, library().uint8) for _ in range(2)]
    return pair[0], pair[1]


def copy_call(target: Any, source: Any) -> Call:
    """Return a call that copies an array with the driver, on the current stream."""
    cp = library()
    pointers, size = (target.data.ptr, source.data.ptr), source.nbytes
    kind = cp.cuda.runtime.memcpyDefault

    def copy() -> None:
        cp.cuda.runtime.memcpyAsync(*pointers, size, kind, cp.cuda.get_current_stream().ptr)

    return copy


def _elapsed(begin: Any, end: Any) -> float:
    return float(library().cuda.get_elapsed_time(begin, end)) * 1e3


def _block(seconds: float) -> None:
    """Keep the current stream busy for at least ``seconds``."""
    target, source = _blocker()
    rate = 8e12  # bytes per second, more than any GPU reaches
    for _ in range(1 + int(seconds * rate / (2 * BLOCKER_BYTES))):
        copy_call(target, source)()


def gpu_us(calls: Sequence[Call]) -> list[float]:
    """Return the us that the GPU spends on each call, without a gap between them."""
    cp = library()
    for call in calls:
        call()  # compiles and loads kernels, which is not timed
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
    """Time calls and their limits in turn; the row's limit is the median of the limits."""
    both = [call for pair in zip(calls, limits, strict=True) for call in pair]
    spent = gpu_us(both)
    limit = statistics.median(spent[1::2])
    return make_row(key, work, spent[::2], limit=limit, limit_name=name)


def captured(calls: Sequence[Call]) -> Any:
    """Return the calls as one graph, captured on the current stream, not the default stream."""
    stream = library().cuda.get_current_stream()
    calls[0]()  # loads kernels and allocates memory before the capture
    stream.synchronize()
    stream.begin_capture()
    for call in calls:
        call()
    return stream.end_capture()
