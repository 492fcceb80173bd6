# SPDX-License-Identifier: Apache-2.0
"""The parts of torch that kvcore reads, over the memory of emulated devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__all__ = ["FakeTorch"]


class Tensor:
    """A tensor on a GPU, over a cupy array."""

    is_cuda = True

    def __init__(self, array: Any) -> None:
        self.array = array
        self.device = SimpleNamespace(index=array.data.device_id)
        self.dtype = f"torch.{array.dtype.name}"
        self.shape = array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def data_ptr(self) -> int:
        return int(self.array.data.ptr)

    def numel(self) -> int:
        return int(self.array.size)


class FakeTorch:
    """The torch module; ``streams`` has the current stream of a device, if not the default."""

    Tensor = Tensor

    def __init__(self, *, is_initialized: bool = True) -> None:
        self.streams: dict[int, Any] = {}
        self.cuda = SimpleNamespace(
            is_initialized=lambda: is_initialized, current_stream=self._current_stream
        )

    def from_dlpack(self, array: Any) -> Any:
        return Tensor(array)

    def _current_stream(self, device: int) -> Any:
        handle = self.streams[device].ptr if device in self.streams else 0
        return SimpleNamespace(cuda_stream=handle, device_index=device)
