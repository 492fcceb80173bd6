# SPDX-License-Identifier: Apache-2.0
"""The emulated driver in the place of cupy's, and real cupy arrays over its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conftest import REQUIRED, require
from kvcore.backends.cuda import availability, driver
from kvcore.backends.cuda.arrays import over_memory

BYTES = 1 << 28


def require_emulation() -> Any:
    """Answer the emulated kernels' module, or skip the calling test file."""
    require("cupy")
    if availability.is_built() and availability.kernels().is_emulated:
        return availability.kernels()
    reason = "this build has no emulated GPUs (KVCORE_CUDA=EMULATED)"
    if "emulation" in REQUIRED:
        raise ImportError(reason)
    pytest.skip(reason, allow_module_level=True)


class _Memory:
    """Memory of an emulated device, which is the host's, for numpy."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"<u{array.itemsize}",
            "shape": array.shape,
            "strides": array.strides,
            "data": (array.data.ptr, False),
        }


class Machine:
    """Devices of host memory, and what cupy would do with them."""

    def __init__(self, kernels: Any, devices: int) -> None:
        self.kernels = kernels
        kernels.emulation.reset(devices, BYTES)
        self.streams: dict[int, int] = {}
        self._kept: list[Any] = []

    # ---- what tests do -----------------------------------------------------------------------
    def memory(self, shape: tuple[int, ...], dtype: Any, device: int = 0) -> Any:
        kind = np.dtype(dtype)
        size = int(np.prod(shape)) * kind.itemsize
        owner = self.kernels.DeviceMemory(device, size)
        self._kept.append(owner)  # as cupy's pool does: freeing would wait for everything
        return over_memory(owner.ptr, shape, kind, device, owner)

    def array(self, host: Any, device: int = 0) -> Any:
        """Copy an array of the host's to a device, now."""
        source = np.ascontiguousarray(host)
        target = self.memory(source.shape, source.dtype, device)
        self.view(target)[...] = source
        return target

    def view(self, array: Any) -> np.ndarray[Any, Any]:
        """Look into an emulated device's memory."""

        if not array.size:
            return np.empty(array.shape, array.dtype)
        return np.asarray(_Memory(array)).view(array.dtype)

    def host(self, array: Any) -> np.ndarray[Any, Any]:
        """Copy an array of a device's to the host, once all work is done."""
        self.kernels.emulation.set_order(is_any=False)
        return self.view(array).copy()

    def in_any_order(self, seed: int) -> None:
        self.kernels.emulation.set_order(is_any=True, seed=seed)

    # ---- what cupy does ----------------------------------------------------------------------
    def current(self, device: int) -> Any:
        return SimpleNamespace(ptr=self.current_stream(device), device_id=device)

    def current_stream(self, device: int) -> int:
        return self.streams.get(device, 0)

    def empty(self, shape: tuple[int, ...], dtype: Any, device: int, stream: int) -> Any:
        return self.memory(shape, dtype, device)

    def zeros(self, shape: tuple[int, ...], dtype: Any, device: int, stream: int) -> Any:
        return self._given(np.zeros(shape, dtype), device, stream)

    def contiguous(self, array: Any, device: int, stream: int) -> Any:
        return self._given(np.ascontiguousarray(self._now(array, device, stream)), device, stream)

    def page_pairs(self, first: Any, second: Any, device: int, stream: int) -> Any:
        both = [self._now(ids, device, stream) for ids in (first, second)]
        return self._given(np.stack(both, axis=1), device, stream)

    def row_offsets(self, lengths: Any, device: int, stream: int) -> Any:
        ends = np.zeros(len(lengths) + 1, np.uint32)
        np.cumsum(self._now(lengths, device, stream), out=ends[1:])
        return self._given(ends, device, stream)

    def combined_digests(self, first: Any, second: Any, device: int, stream: int) -> Any:
        one, two = (self._now(digests, device, stream) for digests in (first, second))
        return self._given(one + np.uint64(3) * two, device, stream)

    def of_dlpack(self, value: Any) -> Any:
        raise BufferError("the emulated driver speaks no DLPack")

    def _now(self, array: Any, device: int, stream: int) -> np.ndarray[Any, Any]:
        self.kernels.synchronize(device, stream)
        return self.view(array)

    def _given(self, host: np.ndarray[Any, Any], device: int, stream: int) -> Any:
        target = self.memory(host.shape, host.dtype, device)
        if host.nbytes:
            address = host.__array_interface__["data"][0]
            self.kernels.copy(target.data.ptr, address, host.nbytes, device, stream)
        return target


@contextmanager
def emulated(devices: int = 2) -> Iterator[Machine]:
    """Put an emulated machine in the place of cupy's driver."""
    machine = Machine(require_emulation(), devices)
    with pytest.MonkeyPatch.context() as patch:
        for name in driver.__all__:
            patch.setattr(driver, name, getattr(machine, name))
        yield machine
    machine.kernels.emulation.reset(0)
