# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs as a backend: cupy arrays and the kernels of ``_cuda``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.cuda.arrays import device_array, own_array
from kvcore.backends.cuda.copier import GpuCopier
from kvcore.backends.cuda.memory import device_zeros
from kvcore.backends.cuda.mover import GpuMover
from kvcore.backends.cuda.pinned import pinned_zeros
from kvcore.backends.cuda.place import ManagerPlace, device_place
from kvcore.backends.cuda.pools import make_gpu_pools
from kvcore.backends.protocol import Backend, Copier, DevicePools, Mover, Place, Shard
from kvcore.device import Device

__all__ = ["BACKEND"]


class _CudaBackend:
    """Implement ``Backend`` for GPUs with cupy arrays."""

    kind = "cuda"

    def array(self, value: Any, name: str) -> Any:
        return device_array(value, name)

    def own(self, array: Any) -> Any:
        return own_array(array)

    def device_of(self, array: Any) -> Device:
        return Device(self.kind, array.data.device_id)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], index: int) -> Any:
        return device_zeros(shape, dtype, index)

    def pinned_zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        return pinned_zeros(shape, dtype)

    def place(
        self, stream: Any, named: list[tuple[str, Any]], beside: tuple[Any, ...] = ()
    ) -> Place:
        return device_place(stream, named, beside)

    def current_place(self, index: int) -> Place:
        return ManagerPlace(index)

    def pools(
        self, devices: tuple[Device, ...], shards_per_replica: int, places: int
    ) -> DevicePools:
        return make_gpu_pools(devices, shards_per_replica, places)

    def copier(self, shards: list[list[Shard]], pools: Any) -> Copier:
        return GpuCopier(shards, pools)

    def mover(
        self,
        shards: list[list[Shard]],
        devices: tuple[Device, ...],
        num_pages: int,
        pools: Any,
        *,
        is_whole: bool = False,
        late_reads: Callable[[int], int] | None = None,
    ) -> Mover:
        return GpuMover(shards, devices, num_pages, pools, is_whole=is_whole, late_reads=late_reads)


BACKEND: Backend = _CudaBackend()
