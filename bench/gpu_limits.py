# SPDX-License-Identifier: Apache-2.0
"""Measure the lower limits of work on a GPU: copying or reading the bytes once.

Copies run within the GPU's memory, and to and from pinned host memory.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any

import numpy as np

from gpu_timing import Call, copy_call, gpu_us, library
from harness import Row, make_row

COPY_BYTES = 256 << 20


def device_pair(size: int) -> tuple[Any, Any]:
    """Return two arrays of random bytes: moving zeros is cheaper than moving data."""
    return random_bytes(size), random_bytes(size)


def random_bytes(size: int) -> Any:
    """Return random bytes on the GPU, uint8 [size]; size is a multiple of 4."""
    cp = library()
    words = cp.random.randint(0, 1 << 31, size // 4, dtype=cp.int32)
    return words.view(cp.uint8)


def pinned_bytes(size: int) -> Any:
    """Return pinned host memory, uint8 [size]."""
    memory = library().cuda.alloc_pinned_memory(size)
    return np.frombuffer(memory, np.uint8, size)


def host_copy(target: Any, source: Any) -> Call:
    """Return a copy between pinned host memory and the GPU, on the current stream."""
    cp = library()
    addresses = [
        x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr for x in (target, source)
    ]
    size, kind = source.nbytes, cp.cuda.runtime.memcpyDefault

    def copy() -> None:
        cp.cuda.runtime.memcpyAsync(*addresses, size, kind, cp.cuda.get_current_stream().ptr)

    return copy


def _reading(source: Any) -> Call:
    cp = library()
    words = source.view(cp.uint32)
    return partial(cp.max, words)


def measure(options: Namespace) -> list[Row]:
    """Measure a copy, a read, and copies to and from the host, in us per 256 MiB."""
    rounds = 3 if options.quick else 20
    target, source = device_pair(COPY_BYTES)
    host = pinned_bytes(COPY_BYTES)
    host[:] = 1
    jobs: list[tuple[str, str, Call, int]] = [
        ("copy", "device to device, the driver's copy", copy_call(target, source), 2),
        ("read", "device read, cupy's maximum", _reading(source), 1),
        ("h2d", "pinned host to device", host_copy(target, host), 1),
        ("d2h", "device to pinned host", host_copy(host, source), 1),
    ]
    rows = []
    for key, work, call, ways in jobs:
        spent = gpu_us([call] * rounds)
        rate = ways * COPY_BYTES / min(spent) / 1e3
        note = f"{rate:,.0f} GB/s" + (", read and write" if ways == 2 else "")
        rows.append(make_row(f"gpu.limit.{key}", f"{work}, 256 MiB", spent, note=note))
    return rows
