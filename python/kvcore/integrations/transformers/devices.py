# SPDX-License-Identifier: Apache-2.0
"""The device of a model, and the conversion of its tensors for ``kvcore.ops`` and back."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvcore.backends.arrays import kind_of
from kvcore.backends.cuda.arrays import in_device_library_of
from kvcore.backends.cuda.availability import attention_kernels, kernels, require_devices
from kvcore.backends.cuda.streams import manager_stream
from kvcore.backends.selection import any_array, backend_of
from kvcore.device import Device
from kvcore.integrations.transformers.tensors import array_of, tensor_of

__all__ = [
    "Tensors",
    "device_of",
    "device_of_model",
    "free_device_memory",
    "most_head_dim",
    "pool_device",
    "require_attention",
    "tensors_on",
]


class Tensors(Protocol):
    """Convert a model's tensors on one device for ``kvcore.ops`` and back, without a copy.

    Attributes
    ----------
    device : Device
    """

    device: Device

    def put(self, array: NDArray[Any]) -> torch.Tensor:
        """Return a host array as a tensor of the device; the host does not wait."""

    def offsets(self, array: NDArray[np.uint32]) -> Any:
        """Return row offsets for many calls of ``kvcore.ops``."""

    def array(self, tensor: torch.Tensor) -> Any:
        """View a tensor in the form that ``kvcore.ops`` takes."""

    def tensor(self, array: Any) -> torch.Tensor:
        """View a manager's array as a tensor."""

    def options(self, threads: int) -> dict[str, Any]:
        """Return options for calls of ``kvcore.ops``: the model's stream, or threads."""

    def require_order(self) -> None:
        """Raise ValueError if a manager's work is on another stream than the model's."""


class HostTensors:
    """Tensors in host memory. See ``Tensors``."""

    device = Device("cpu")

    def put(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array)

    def offsets(self, array: NDArray[np.uint32]) -> Any:
        return array

    def array(self, tensor: torch.Tensor) -> Any:
        return array_of(tensor)

    def tensor(self, array: Any) -> torch.Tensor:
        return tensor_of(array)

    def options(self, threads: int) -> dict[str, Any]:
        return {"threads": threads}

    def require_order(self) -> None:
        pass


class GpuTensors:
    """Tensors on a GPU, whose work is on torch's current stream. See ``Tensors``."""

    def __init__(self, index: int) -> None:
        self.device = Device("cuda", index)
        self._home = torch.device("cuda", index)

    def put(self, array: NDArray[Any]) -> torch.Tensor:
        # The driver reads memory that is not pinned before it returns.
        return torch.from_numpy(array).to(self._home, non_blocking=True)

    def offsets(self, array: NDArray[np.uint32]) -> Any:
        return self.put(array.view(np.int32))

    def array(self, tensor: torch.Tensor) -> Any:
        return tensor.detach()

    def tensor(self, array: Any) -> torch.Tensor:
        found: torch.Tensor = in_device_library_of(torch.empty(0), array)
        return found

    def options(self, threads: int) -> dict[str, Any]:  # noqa: ARG002 - for the host
        return {"stream": self._stream()}

    def require_order(self) -> None:
        managers, models = manager_stream(self.device.index), self._stream()
        if managers.is_chosen and managers.handle != models:
            raise ValueError(
                f"cupy's current stream of {self.device} is {managers.handle:#x}, torch's is "
                f"{models:#x}: the manager's work would not be in order with the model's; make "
                f"one of them current in both"
            )

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._home).cuda_stream)


_HOST = HostTensors()


def tensors_on(device: Device) -> Tensors:
    """Return the converter of a device's tensors."""
    return _HOST if device.kind == "cpu" else GpuTensors(device.index)


def pool_device(blocks: Any) -> Device:
    """Return the device of a manager's pool: an array, a pair of arrays, or None."""
    if blocks is None:
        return _HOST.device
    array = blocks[0] if isinstance(blocks, tuple) else blocks
    return backend_of(kind_of(array)).device_of(any_array(array, "blocks"))


def device_of(where: torch.device) -> Device | None:
    """Return a torch device as a kvcore device; None if kvcore does not support its memory."""
    if where.type not in ("cpu", "cuda"):
        return None
    return Device(where.type, where.index or 0)


def device_of_model(model: Any) -> Device:
    """Return the device of a model.

    Raises
    ------
    ValueError
        The model is on several devices, or on a device that kvcore does not support; the text is
        the end of a sentence about the model.
    """
    places = {parameter.device for parameter in model.parameters()}
    if len(places) > 1:
        named = ", ".join(sorted(map(str, places)))
        raise ValueError(
            f"its weights are on several devices ({named}), its K and V must be on one; load it on "
            f"one device, for example with device_map='cuda:0'"
        )
    (place,) = places
    device = device_of(place)
    if device is None:
        raise ValueError(f"it is on {place}, kvcore's attention runs on the CPU and on NVIDIA GPUs")
    return device


def require_attention(device: Device) -> None:
    """Raise an error if attention cannot run on a device.

    Raises
    ------
    KVCacheError
        "CUDA unavailable: " and the reason, or "attention on GPUs unavailable: " and the missing
        part.
    """
    if device.kind != "cpu":
        require_devices()
        attention_kernels()


def most_head_dim(device: Device) -> int | None:
    """Return the most elements of a head in attention on a device; None for any number."""
    if device.kind == "cpu":
        return None
    from kvcore.backends.cuda.attention.checks import MOST_DIM  # imports Triton

    return MOST_DIM


def free_device_memory(index: int) -> int:
    """Return the free bytes of a GPU; memory that torch reserves is not free."""
    return int(kernels().memory_info(index)[0])
