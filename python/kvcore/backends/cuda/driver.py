# SPDX-License-Identifier: Apache-2.0
"""The calls to cupy that need a CUDA driver.

No call makes cupy compile a kernel, because its wheels do not include NVRTC: only kvcore's own
kernels compute. Stream handles are CUDA's; 0 is the legacy default stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcore.backends.cuda.availability import cupy, kernels

__all__ = ["current", "current_device", "empty", "of_dlpack", "on_device"]


def on_device(device: int) -> Any:
    """Return a context manager that makes a device current for the thread.

    The context managers of cupy and torch are not used. At exit they set the previous device again,
    which creates a CUDA context on that device: GPU 0 in most threads.
    """
    return kernels().DeviceScope(device)


def current_device() -> int:
    """Return the device that is current for the thread."""
    return int(cupy().cuda.runtime.getDevice())


def current(device: int) -> Any:
    """Return cupy's current stream of a device; the result keeps the stream alive."""
    return cupy().cuda.get_current_stream(device)


class _Handle:
    """A stream of another owner, with the protocol that cupy accepts."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _on(device: int, stream: int) -> Any:
    """Make a stream cupy's current one, so that its memory pool reuses memory in its order."""
    streams = cupy().cuda
    if hasattr(streams.Stream, "from_external"):  # from version 14 on
        return streams.Stream.from_external(_Handle(stream))
    return streams.ExternalStream(stream, device)


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], device: int, stream: int) -> Any:
    """Allocate an array from cupy's memory pool, in the order of a stream."""
    with on_device(device), _on(device, stream):
        if dtype.isbuiltin == 1:
            return cupy().empty(shape, dtype)
        # cupy cannot allocate float8 arrays, but it can view memory as float8.
        return cupy().empty(shape, np.dtype(f"u{dtype.itemsize}")).view(dtype)


def of_dlpack(value: Any) -> Any:
    """View an array of another library as cupy's; the current stream waits for its work."""
    return cupy().from_dlpack(value)
