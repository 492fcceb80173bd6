# SPDX-License-Identifier: Apache-2.0
"""An emulated driver below kvcore and below cupy, and real cupy arrays over its memory."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest

from conftest import REQUIRED, require
from kvcore.backends.cuda import availability, driver
from kvcore.backends.cuda.arrays import over_memory
from kvcore.backends.cuda.loans import loans_of
from kvcore.backends.cuda.staging import staging_of

BYTES = 1 << 28


def require_emulation() -> Any:
    """Return the emulated kernels' module, or skip the calling test file."""
    require("cupy")
    if availability.is_built() and availability.kernels().is_emulated:
        return availability.kernels()
    reason = "this build has no emulated GPUs (KVCORE_CUDA=EMULATED)"
    if "emulation" in REQUIRED:
        raise ImportError(reason)
    pytest.skip(reason, allow_module_level=True)


class _Memory:
    """Memory of an emulated device, which is host memory, for numpy."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"<u{array.itemsize}",
            "shape": array.shape,
            "strides": array.strides,
            "data": (array.data.ptr, False),
        }


class Machine:
    """Devices with host memory."""

    def __init__(self, kernels: Any, devices: int) -> None:
        self.kernels = kernels
        kernels.emulation.reset(devices, BYTES)
        self.streams: dict[int, int] = {}  # cupy's current streams
        from fake_cupy import FakeCupy

        self.cupy = FakeCupy(self._allocated, self.streams)
        self._kept: list[Any] = []

    # ---- calls of tests ----------------------------------------------------------------------
    def memory(self, shape: tuple[int, ...], dtype: Any, device: int = 0) -> Any:
        kind = np.dtype(dtype)
        owner = self._allocated(device, int(np.prod(shape)) * kind.itemsize)
        return over_memory(owner.ptr, shape, kind, device, owner)

    def _allocated(self, device: int, size: int) -> Any:
        owner = self.kernels.DeviceMemory(device, size)
        self._kept.append(owner)  # like cupy's pool: a free would wait for all work
        return owner

    def array(self, host: Any, device: int = 0) -> Any:
        """Copy a host array to a device, now."""
        source = np.ascontiguousarray(host)
        target = self.memory(source.shape, source.dtype, device)
        self.view(target)[...] = source
        return target

    def view(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a view of an emulated device's memory."""

        if not array.size:
            return np.empty(array.shape, array.dtype)
        return np.asarray(_Memory(array)).view(array.dtype)

    def host(self, array: Any) -> np.ndarray[Any, Any]:
        """Copy a device array to the host, after all work is complete."""
        self.kernels.emulation.set_order(is_any=False)
        return self.view(array).copy()

    def in_any_order(self, seed: int) -> None:
        self.kernels.emulation.set_order(is_any=True, seed=seed)


@contextmanager
def emulated(devices: int = 2) -> Iterator[Machine]:
    """Replace cupy with cupy over an emulated machine."""
    machine = Machine(require_emulation(), devices)

    @cache
    def imported(name: str) -> Any:
        found = importlib.import_module(name)
        return machine.cupy if name == "cupy" else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(availability, "_imported", imported)
        patch.setattr(driver, "on_device", machine.cupy.on_device)
        yield machine
        staging_of.cache_clear()
        loans_of.cache_clear()
    faults = machine.kernels.emulation.faults()
    machine.kernels.emulation.reset(0)
    assert not faults, "pinned memory was freed while copies from it waited"


def check_bytes(machine: Machine, found: Any, expected: Any) -> None:
    """Compare an array of a device with an array of the host: shape, dtype and bytes."""
    host = machine.host(found)
    assert (host.dtype, host.shape) == (expected.dtype, expected.shape)
    assert host.tobytes() == np.ascontiguousarray(expected).tobytes()
