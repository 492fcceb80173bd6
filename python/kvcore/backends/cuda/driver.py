# SPDX-License-Identifier: Apache-2.0
"""What is asked of cupy beyond the shape of arrays: every call that needs a driver.

Nothing here makes cupy compile: its wheels bring no NVRTC. Whatever computes is a kernel of
kvcore's. Handles of streams are CUDA's, 0 for the legacy default stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcore.backends.cuda.availability import cupy, kernels

__all__ = ["current", "current_device", "empty", "of_dlpack", "on_device"]


def on_device(device: int) -> Any:
    """Return a context manager that has a device current for the thread.

    Not cupy's, nor torch's: they set the device of before again, which creates a context on it, on
    GPU 0 in most threads.
    """
    return kernels().DeviceScope(device)


def current_device() -> int:
    """Return the device that is current for the thread."""
    return int(cupy().cuda.runtime.getDevice())


def current(device: int) -> Any:
    """Return cupy's current stream of a device, which lives as long as the answer is held."""
    return cupy().cuda.get_current_stream(device)


class _Handle:
    """A stream of somebody's, by the protocol that cupy takes it by."""

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
    """Take memory for an array out of cupy's pool, in a stream's order."""
    with on_device(device), _on(device, stream):
        if dtype.isbuiltin == 1:
            return cupy().empty(shape, dtype)
        # cupy makes no arrays of float8, but sees memory as such.
        return cupy().empty(shape, np.dtype(f"u{dtype.itemsize}")).view(dtype)


def of_dlpack(value: Any) -> Any:
    """See an array of another library as cupy's; the current stream waits for it."""
    return cupy().from_dlpack(value)
