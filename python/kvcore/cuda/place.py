# SPDX-License-Identifier: Apache-2.0
"""A stream of a GPU as the place where the arrays of a call lie."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.cuda import driver
from kvcore.cuda.arrays import in_device_library_of
from kvcore.cuda.availability import kernels
from kvcore.cuda.streams import stream_handle

__all__ = ["DevicePlace", "device_place"]


class DevicePlace:
    """Enqueue work on a stream, and make arrays whose memory is used again in its order.

    Parameters
    ----------
    device : int
    stream : int
        CUDA's handle.
    """

    def __init__(self, device: int, stream: int) -> None:
        self.device = device
        self.stream = stream

    @property
    def kernels(self) -> ModuleType:
        """The module of GPU kernels."""
        return kernels()

    def last(self, threads: int) -> tuple[int, ...]:  # noqa: ARG002 - those of the host
        """Answer device and stream, which the functions of GPU kernels take last."""
        return self.device, self.stream

    def check(self, array: Any, name: str) -> Any:
        """Answer an array of the device.

        Raises
        ------
        ValueError
            One elsewhere.
        """
        is_host = isinstance(array, np.ndarray)
        if not is_host and array.data.device_id == self.device:
            return array
        found = "in host memory" if is_host else f"on cuda:{array.data.device_id}"
        raise ValueError(
            f"{name} is {found}, must be on cuda:{self.device} as the other arrays of the call; "
            f"copy it there"
        )

    def numbers(self, array: Any, name: str) -> Any:
        """Answer an array of the device, or one of the host's together with a copy there."""
        is_host = isinstance(array, np.ndarray)
        return (array, self.there(array)) if is_host else self.check(array, name)

    def there(self, array: NDArray[Any]) -> Any:
        """Copy an array of the host's, which the caller may change right after."""
        target = self.empty(array.shape, array.dtype)
        self.write(target, array)
        return target

    def write(self, target: Any, array: NDArray[Any]) -> None:
        """Copy an array of the host's, which may change right after, over one of the device."""
        if not target.flags.c_contiguous:
            raise ValueError("an array that is updated in place is strided, must be in C order")
        source = np.ascontiguousarray(array)
        address = source.__array_interface__["data"][0]
        if source.nbytes:
            kernels().copy(target.data.ptr, address, source.nbytes, self.device, self.stream)

    def copy_of(self, array: Any) -> Any:
        """Copy an array of the device."""
        if not array.flags.c_contiguous:
            return self.contiguous(array)
        target = self.empty(array.shape, array.dtype)
        if target.nbytes:
            addresses = target.data.ptr, array.data.ptr
            kernels().copy(*addresses, target.nbytes, self.device, self.stream)
        return target

    def here(self, array: Any) -> NDArray[Any]:
        """Read an array back, waiting for the stream."""
        source = self.contiguous(array)
        target: NDArray[Any] = np.empty(source.shape, source.dtype)
        address = target.__array_interface__["data"][0]
        if target.nbytes:
            kernels().copy(address, source.data.ptr, target.nbytes, self.device, self.stream)
        self.wait()
        return target

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Take memory out of cupy's pool."""
        return driver.empty(shape, dtype, self.device, self.stream)

    def contiguous(self, array: Any) -> Any:
        """Answer an array in C order, itself where it is."""
        if array.flags.c_contiguous:
            return array
        return driver.contiguous(array, self.device, self.stream)

    def in_library_of(self, given: Any, result: Any) -> Any:
        """Answer a fresh array as one of the library that another one is of."""
        return in_device_library_of(given, result)

    def digests(self, pool: Any, ids: Any, threads: int) -> Any:
        """Answer the digests of pages, uint64 [n]."""
        count = len(ids[0] if isinstance(ids, tuple) else ids)
        digests = self.empty((count,), np.dtype(np.uint64))
        kernels().digest_pages(pool, ids, digests, *self.last(threads))
        return digests

    def weighed(self, first: Any, second: Any) -> Any:
        """Answer first + 3 * second, of uint64."""
        return driver.weighed(first, second, self.device, self.stream)

    def running_total(self, lengths: Any, *, has_room: bool) -> tuple[Any, int]:
        """Answer where each row begins and the last one ends, and how many tokens that is.

        Lengths of the host's give both; of others the sum is read back, with a wait, unless there
        is room for the tokens already.
        """
        if isinstance(lengths, np.ndarray):
            offsets = np.zeros(len(lengths) + 1, np.uint32)
            np.cumsum(lengths, out=offsets[1:])
            return (offsets, self.there(offsets)), int(offsets[-1])
        self.check(lengths, "lengths")
        ends = driver.offsets(lengths, self.device, self.stream)
        return ends, 0 if has_room else int(self.here(ends)[-1])

    def paired(self, first: Any, second: Any) -> Any:
        """Answer int64 [n] twice as [n, 2], of the host with a copy."""
        hosts = [isinstance(ids, np.ndarray) for ids in (first, second)]
        if all(hosts):
            return self.numbers(np.stack([first, second], axis=1), "ids")
        ids = [self.there(i) if h else i for i, h in zip((first, second), hosts, strict=True)]
        sources = self.check(ids[0], "source_ids")
        destinations = self.check(ids[1], "destination_ids")
        return driver.paired(sources, destinations, self.device, self.stream)

    def slots(self, pool: Any, table: Any, lengths: Any, offsets: Any, out: Any) -> Any:
        """Build the slots of a step."""
        if out is None:
            if not isinstance(offsets, tuple):
                raise ValueError(
                    "row_offsets are on a GPU and are not read back; pass out for the slots, or "
                    "row_offsets from the host"
                )
            out = self.empty((_last(offsets[0]),), np.dtype(np.int64))
        kernels().build_slots(pool, table, lengths, offsets, out, *self.last(1))
        return out

    def append_slots(self, pools: Any, slots: Any, tokens: Any, threads: int) -> Any:
        """Append by slots; answer int32 [1], how many were beyond the pool."""
        bad = driver.zeros((1,), np.dtype(np.int32), self.device, self.stream)
        places = self.numbers(slots, "slots")
        kernels().append_slots(pools, places, tokens, bad, *self.last(threads))
        return bad

    def wait(self) -> None:
        """Block the host until the stream's work is done."""
        kernels().synchronize(self.device, self.stream)


def _last(offsets: NDArray[np.uint32]) -> int:
    """Answer the tokens of row offsets that are not checked yet."""
    return int(offsets[-1]) if offsets.ndim == 1 and offsets.size else 0


def device_place(stream: Any, named: list[tuple[str, Any]]) -> DevicePlace:
    """Answer the place of arrays of which one at least is on a GPU.

    Raises
    ------
    ValueError
        Arrays on several devices, or in host memory and on a GPU; a stream of another device.
    """
    first, device = next(
        (name, array.data.device_id) for name, array in named if not isinstance(array, np.ndarray)
    )
    for name, array in named:
        is_host = isinstance(array, np.ndarray)
        if is_host or array.data.device_id != device:
            found = "in host memory" if is_host else f"on cuda:{array.data.device_id}"
            raise ValueError(
                f"{name} is {found}, must be on cuda:{device} as {first} is; copy it there"
            )
    return DevicePlace(device, stream_handle(stream, device))
