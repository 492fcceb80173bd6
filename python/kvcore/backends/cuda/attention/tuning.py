# SPDX-License-Identifier: Apache-2.0
"""Measure sizes of tiles on a GPU, for one size of heads and kind of pool."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from triton.runtime.errors import OutOfResources

from kvcore.backends.cuda.attention.call import Call, Rule, attend, plan_with
from kvcore.backends.cuda.attention.settings import Settings, no_more_than_needed
from kvcore.backends.protocol import Place
from kvcore.support.dtypes import NARROW, numpy_dtype

__all__ = ["Model", "best", "candidates", "decoding", "microseconds", "prompts"]

_ROUNDS = 9
_SPLITS = 4  # of decoding


class Model(NamedTuple):
    """Hold the shapes and dtypes of a layer's attention."""

    dim: int = 128
    heads: int = 8
    q_heads: int = 32
    dtype: str = "bfloat16"
    pool_dtype: str = "bfloat16"
    page_size: int = 16


def candidates(*, is_prompt: bool) -> Iterator[Settings]:
    """Return the settings to try; decoding uses no more query rows than its batch has."""
    if is_prompt:
        sizes = product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3))
    else:
        sizes = product((64,), (16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4))
    return (Settings(*each) for each in sizes)


def decoding(model: Model, place: Place, rows: int = 32, length: int = 4096) -> Call:
    """Return a call with one new token in each of `rows` long rows."""
    return _call(model, place, np.ones(rows, np.int64), length - 1)


def prompts(model: Model, place: Place, rows: int = 2, length: int = 4096) -> Call:
    """Return a call with whole prompts."""
    return _call(model, place, np.full(rows, length), 0)


def best(
    call: Call,
    tried: Iterator[Settings],
    measure: Callable[[Call, Settings], float],
    report: Callable[[Settings, float], None],
) -> Settings:
    """Return the fastest settings that fit the GPU.

    Raises
    ------
    ValueError
        No settings fit the GPU.
    """
    found: list[tuple[float, Settings]] = []
    for each in tried:
        try:
            found.append((measure(call, each), each))
        except OutOfResources:
            continue
        report(each, found[-1][0])
    if not found:
        raise ValueError("the GPU is too small for every one of the settings that were tried")
    return min(found)[1]


def microseconds(place: Any, call: Call, settings: Settings) -> float:
    """Return the median time of a call on a GPU, in microseconds."""
    from kvcore.backends.cuda.availability import cupy

    tokens, rows = call.q.shape[0], call.table.shape[0]
    splits = 1 if tokens > rows else _SPLITS
    fitted = no_more_than_needed(settings, call.sizes.group, tokens / rows)
    plan = plan_with(call, fitted, splits, place)
    out = place.empty((*call.q.shape[:2], call.v_dim), call.q.dtype)
    scratch = place.empty(
        (splits * call.q.shape[0] * call.q.shape[1] * (call.v_dim + 1),), np.dtype(np.float32)
    )
    events = cupy().cuda
    stream = events.ExternalStream(place.stream, place.device)
    attend(call, plan, out, None, scratch, place)  # compiles
    stream.synchronize()
    pairs = [(events.Event(), events.Event()) for _ in range(_ROUNDS)]
    for begin, end in pairs:  # queued, so that the GPU does not wait for the host between them
        begin.record(stream)
        attend(call, plan, out, None, scratch, place)
        end.record(stream)
    stream.synchronize()
    return statistics.median(1e3 * float(events.get_elapsed_time(*pair)) for pair in pairs)


def _call(model: Model, place: Place, new: Any, cached: int) -> Call:
    rows, tokens = len(new), int(new.sum())
    columns = -(-(cached + int(new.max())) // model.page_size)
    shape = rows * columns, model.page_size, model.heads, model.dim
    pools = [_numbers(place, shape, model.pool_dtype) for _ in range(2)]
    scales = [None, None]
    if model.pool_dtype in NARROW:
        scales = [_numbers(place, (*shape[:3], 1), "float32") for _ in range(2)]
    order = np.random.default_rng(1).permutation(rows * columns).astype(np.uint32)
    offsets = np.concatenate([[0], np.cumsum(new)]).astype(np.uint32)
    return Call(
        _numbers(place, (tokens, model.q_heads, model.dim), model.dtype),
        pools[0],
        pools[1],
        None,
        scales[0],
        scales[1],
        place.from_host(order.reshape(rows, columns)),
        place.from_host(np.full(rows, cached, np.uint32)),
        place.from_host(offsets),
        Rule(model.dim**-0.5, True, None, None, None, None),
        model.dim,
    )


def _numbers(place: Place, shape: tuple[int, ...], dtype: str) -> Any:
    """Return random numbers of moderate size: GPUs multiply zeros faster than other numbers."""
    some = 40 * np.random.default_rng(2).random(1 << 16, np.float32) - 20
    array = place.empty(shape, numpy_dtype(dtype))
    place.copy_into(array, np.resize(some.astype(numpy_dtype(dtype)), shape))
    return array
