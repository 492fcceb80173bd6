# SPDX-License-Identifier: Apache-2.0
"""Models of transformers whose tensors, in host memory, count as those of an emulated GPU.

An emulated device is host memory, so kvcore can work on a tensor of the host's where it lies. What
is replaced is what asks torch for CUDA; all else is what runs on a GPU.
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
    """See ``Tensors``; torch's current stream is the one that a test says."""

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
        self.machine.kernels.emulation.set_order(is_any=False)  # what waits is done now
        return tensor_of(self.machine.view(array))

    def _stream(self) -> int:
        return self.stream


@contextmanager
def counted_as_gpu(machine: Machine) -> Iterator[type[EmulatedTensors]]:
    """Take what is in host memory for what is on a GPU; answer the class that does."""

    def device_of(where: torch.device) -> Device | None:
        return Device("cuda", INDEX) if where.type == "cpu" else None

    kind = type("MachineTensors", (EmulatedTensors,), {"machine": machine})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "GpuTensors", kind)
        patch.setattr(devices, "device_of", device_of)
        patch.setattr(cache, "device_of", device_of)
        yield kind
