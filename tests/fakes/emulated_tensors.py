# SPDX-License-Identifier: Apache-2.0
"""Models of transformers whose tensors, in host memory, count as tensors of an emulated GPU.

An emulated device is host memory, so kvcore can work directly on a host tensor. Only the calls that
ask torch for CUDA are replaced; all other code is the code for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cuda_machine import Machine
from kvcore import Device
from kvcore.backends.cuda.arrays import over_memory
from kvcore.integrations.transformers import cache, devices
from kvcore.integrations.transformers.tensors import array_of, tensor_of

__all__ = ["counted_as_gpu"]

INDEX = 1


class EmulatedTensors(devices.GpuTensors):
    """See ``Tensors``; the test sets torch's current stream."""

    machine: Machine
    stream = 0

    def put(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def array(self, tensor: torch.Tensor) -> Any:
        seen = array_of(tensor)
        place = tensor.data_ptr(), seen.shape, seen.dtype, self.device.index
        return over_memory(*place, tensor, seen.strides)

    def offsets(self, array: Any) -> Any:
        return self.array(super().offsets(array))

    def tensor(self, array: Any) -> torch.Tensor:
        self.machine.kernels.emulation.set_order(is_any=False)  # runs all queued work
        return tensor_of(self.machine.view(array))

    def _stream(self) -> int:
        return self.stream


@contextmanager
def counted_as_gpu(machine: Machine) -> Iterator[type[EmulatedTensors]]:
    """Treat host memory as GPU memory; yield the class that does this."""

    def device_of(where: torch.device) -> Device | None:
        return Device("cuda", INDEX) if where.type == "cpu" else None

    kind = type("MachineTensors", (EmulatedTensors,), {"machine": machine})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "GpuTensors", kind)
        patch.setattr(devices, "device_of", device_of)
        patch.setattr(cache, "device_of", device_of)
        yield kind
