# SPDX-License-Identifier: Apache-2.0
"""cupy on a machine without a GPU: real arrays, and an emulated driver.

It has the parts of cupy that kvcore may use, and nothing else: the kernels that cupy compiles at
run time need NVRTC, which its wheels do not include.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import SimpleNamespace, TracebackType
from typing import Any

import cupy
import numpy as np

__all__ = ["FakeCupy"]


@cache
def _check(dtype: np.dtype[Any]) -> None:
    """Raise for dtypes of which cupy makes no arrays, although it accepts memory with them."""
    with suppress(cupy.cuda.runtime.CUDARuntimeError):  # no GPU
        cupy.ndarray((0,), dtype)


class _Entered:
    """A context manager that sets the current value for the thread."""

    def __init__(self, stack: list[int], value: int) -> None:
        self._stack = stack
        self._value = value

    def __enter__(self) -> None:
        self._stack.append(self._value)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._stack.pop() == self._value


class _Block:
    """Memory of the pool, which returns to the pool with the array that owns it."""

    def __init__(self, memory: Any, free: list[Any]) -> None:
        self.memory = memory
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.memory)


class _Current(threading.local):
    def __init__(self) -> None:
        self.devices: list[int] = []
        self.streams: list[int] = []


class FakeCupy:
    """cupy over emulated devices.

    Parameters
    ----------
    allocate : callable(device, bytes) -> DeviceMemory
    streams : dict of int to int
        The current stream of each device, unless it is the legacy default stream.

    Notes
    -----
    Like cupy's pool, it reuses the memory of a freed array at once, for the next allocation of the
    same size on the same stream.
    """

    ndarray = cupy.ndarray

    def __init__(self, allocate: Callable[[int, int], Any], streams: dict[int, int]) -> None:
        self._allocate = allocate
        self._streams = streams
        self._now = _Current()
        self._pool: dict[tuple[int, int, int], list[Any]] = {}
        self.num_allocated = 0
        made = SimpleNamespace(from_external=lambda given: self._on(given.__cuda_stream__()[1]))
        self.cuda = SimpleNamespace(
            UnownedMemory=cupy.cuda.UnownedMemory,
            MemoryPointer=cupy.cuda.MemoryPointer,
            runtime=SimpleNamespace(getDevice=lambda: (self._now.devices or [0])[-1]),
            Stream=made,
            ExternalStream=lambda handle, device: self._on(handle, device),
            get_current_stream=self._current_stream,
        )

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        _check(np.dtype(dtype))
        device, stream = self._now.devices[-1], self._now.streams[-1]
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        free = self._pool.setdefault((device, stream, size), [])
        self.num_allocated += 1
        owner = _Block(free.pop() if free else self._allocate(device, size), free)
        memory = self.cuda.UnownedMemory(owner.memory.ptr, size, owner, device)
        return self.ndarray(shape, dtype, self.cuda.MemoryPointer(memory, 0))

    def from_dlpack(self, value: Any) -> Any:
        """Pass the current stream to the library, and accept a cupy array as a capsule."""
        device = value.__dlpack_device__()[1]
        return value.__dlpack__(stream=self._streams.get(device, 0))

    def on_device(self, index: int) -> _Entered:
        """Make a device current, instead of the driver's stack of contexts."""
        return _Entered(self._now.devices, index)

    def _on(self, handle: int, device: int | None = None) -> _Entered:
        assert device in (None, self._now.devices[-1])
        return _Entered(self._now.streams, handle)

    def _current_stream(self, device: int) -> Any:
        return SimpleNamespace(ptr=self._streams.get(device, 0), device_id=device)
