# SPDX-License-Identifier: Apache-2.0
"""A GPU stream as the place of a call's arrays: see ``protocol.Place``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.cuda import driver
from kvcore.backends.cuda.arrays import (
    in_device_library_of,
    is_exchanged,
    is_lent,
    library_of,
    own_array,
)
from kvcore.backends.cuda.availability import attention_kernels, kernels
from kvcore.backends.cuda.loans import Loan, loans_of
from kvcore.backends.cuda.pinned import is_pinned
from kvcore.backends.cuda.staging import staging_of
from kvcore.backends.cuda.streams import (
    current_stream,
    library_stream,
    manager_stream,
    stream_handle,
)
from kvcore.backends.protocol import AttentionRequest, IndexRequest, Tensor

__all__ = ["DevicePlace", "ManagerPlace", "device_place"]


class DevicePlace:
    """Enqueue work on a stream, and allocate arrays whose memory is reused in stream order.

    Parameters
    ----------
    device : int
    stream : int
        The CUDA handle.
    """

    def __init__(self, device: int, stream: int) -> None:
        self.device = device
        self.stream = stream
        self._loan: Loan | None = None
        self._on: dict[str, bool] = {}  # true if this is the library's current stream

    @property
    def kernels(self) -> ModuleType:
        """The module of GPU kernels."""
        return kernels()

    def launch_args(self, threads: int) -> tuple[int, ...]:  # noqa: ARG002 - for the host
        """Return device and stream, the last arguments of the functions of GPU kernels."""
        return self.device, self.stream

    def checked(self, array: Any, name: str) -> Any:
        """Return an array of the device.

        Raises
        ------
        ValueError
            The array is not on the device.
        """
        is_host = isinstance(array, np.ndarray)
        if not is_host and array.data.device_id == self.device:
            self.take_over([array])
            return array
        found = "in host memory" if is_host else f"on cuda:{array.data.device_id}"
        raise ValueError(
            f"{name} is {found}, must be on cuda:{self.device} like the other arrays of the call; "
            f"copy it there"
        )

    def index_array(self, array: Any, name: str) -> Any:
        """Return a device array, or a host array together with its copy on the device."""
        is_host = isinstance(array, np.ndarray)
        return (array, self.from_host(array, name)) if is_host else self.checked(array, name)

    def reaches(self, array: Any) -> bool:
        """Return true if an array is on the device, or in memory of ``pinned_zeros``."""
        if isinstance(array, np.ndarray):
            return is_pinned(array)
        return bool(array.data.device_id == self.device)

    def from_host(self, array: NDArray[Any], name: str = "an array") -> Any:
        """Copy a host array to the device; the host array may change right after the call."""
        self._refuse_host(name)
        target = self.empty(array.shape, array.dtype)
        self._send(target, array)
        return target

    def copy_into(self, target: Any, array: NDArray[Any]) -> None:
        """Copy a host array into a device array; the host array may change right after."""
        self._refuse_host("an array")
        if not target.flags.c_contiguous:
            raise ValueError("an array that is updated in place is strided, must be in C order")
        self._send(target, array)

    def _send(self, target: Any, array: NDArray[Any]) -> None:
        if array.nbytes:
            source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            staging_of(self.device).copy(target.data.ptr, source, self.stream)

    def factors(self, values: NDArray[np.float32], heads: int, name: str) -> Any:
        """Return host scales, a single scale or a scale per head, as kernels take them.

        If all scales are equal, the kernel takes the scale as a number.
        """
        if (values == values.reshape(-1)[0]).all():
            return float(values.reshape(-1)[0])
        return self.from_host(np.ascontiguousarray(np.broadcast_to(values, (heads,))), name)

    def copy_over(self, target: Any, array: Any) -> None:
        """Copy a device array into `target` in C order, unless both are the same array."""
        if target is not array:
            addresses = target.data.ptr, array.data.ptr
            kernels().copy(*addresses, target.nbytes, self.device, self.stream)

    def copy_of(self, array: Any) -> Any:
        """Return a copy of a device array."""
        if not array.flags.c_contiguous:
            return self.contiguous(array)
        target = self.empty(array.shape, array.dtype)
        self.copy_over(target, array)
        return target

    def to_host(self, array: Any, name: str = "an array") -> NDArray[Any]:
        """Read an array back; the host waits for the stream."""
        if self._is_captured():
            raise ValueError(
                f"{name} on cuda:{self.device} must be read back, while the stream is captured "
                f"into a graph; pass it in host memory, or call outside of the capture"
            )
        source = self.contiguous(array)
        target: NDArray[Any] = np.empty(source.shape, source.dtype)
        address = target.__array_interface__["data"][0]
        if target.nbytes:
            kernels().copy(address, source.data.ptr, target.nbytes, self.device, self.stream)
        self.wait()
        return target

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], name: str = "a result") -> Any:
        """Allocate memory from cupy's memory pool."""
        if self._is_captured():
            raise ValueError(
                f"{name} would be new memory, while the stream is captured into a graph, whose "
                f"replays would write to memory of another owner; pass out=, or call outside of "
                f"the capture"
            )
        return driver.empty(shape, dtype, self.device, self.stream)

    def _is_captured(self) -> bool:
        return bool(kernels().is_capturing(self.device, self.stream))

    def _refuse_host(self, name: str) -> None:
        """Raise ValueError for a host array in a capture: the graph would read a freed copy."""
        if self._is_captured():
            raise ValueError(
                f"{name} is in host memory, while the stream is captured into a graph, whose "
                f"replays would read a freed copy; pass it as an array on cuda:{self.device}"
            )

    def contiguous(self, array: Any, name: str = "an array") -> Any:
        """Return an array in C order: itself, or a copy."""
        if array.flags.c_contiguous:
            return array
        target = self.empty(array.shape, array.dtype, f"a copy of {name}, which is not in C order,")
        kernels().copy_strided(array, target, self.device, self.stream)
        return target

    def in_library_of(self, given: Any, result: Any) -> Any:
        """Return a new array as an array of the library of `given`."""
        return in_device_library_of(given, result)

    def digest_pages(self, pools: list[Any], ids: Any, threads: int) -> Any:
        """Return the digests of pages, uint64 [n]: of the first pool plus 3 times the second."""
        count = len(ids[0] if isinstance(ids, tuple) else ids)
        digests = self.empty((count,), np.dtype(np.uint64), "the digests")
        for pool, weight in zip(pools, (0, 3), strict=False):
            kernels().digest_pages(pool, ids, digests, weight, *self.launch_args(threads))
        return digests

    def row_offsets(self, lengths: Any, *, has_room: bool, out: Any) -> tuple[Any, int]:
        """Return the row offsets, and the number of tokens, which is their last entry.

        The number of tokens comes from host lengths. For device lengths it is read back, with a
        wait; with `has_room` it is not needed, and 0. A captured graph writes the offsets to `out`.
        Other calls write them to new memory, so that a call that fails later does not change `out`.
        """
        if isinstance(lengths, np.ndarray):
            offsets = np.zeros(len(lengths) + 1, np.uint32)
            np.cumsum(lengths, out=offsets[1:])
            return (offsets, self.from_host(offsets, "lengths")), int(offsets[-1])
        taken = self.contiguous(self.checked(lengths, "lengths"), "lengths")
        ends = out
        if ends is None or not self._is_captured():
            ends = self.empty((len(taken) + 1,), np.dtype(np.uint32), "out[2], the row offsets,")
        kernels().row_offsets(taken, ends, self.device, self.stream)
        return ends, 0 if has_room else int(self.to_host(ends, "lengths")[-1])

    def page_pairs(self, sources: Any, destinations: Any) -> Any:
        """Return host ids as [n, 2] with a device copy; with device ids, two device arrays."""
        given = {"source_ids": sources, "destination_ids": destinations}
        if all(isinstance(ids, np.ndarray) for ids in given.values()):
            return self.index_array(np.stack([sources, destinations], axis=1), "ids")
        for name, ids in given.items():
            if ids.dtype != np.int64:
                raise TypeError(f"{name} has dtype {ids.dtype}, must be int64 on a GPU")
            if not isinstance(ids, np.ndarray):
                self.checked(ids, name)
        return [
            self.from_host(ids, name) if isinstance(ids, np.ndarray) else self.contiguous(ids, name)
            for name, ids in given.items()
        ]

    def build_slots(self, pool: Any, table: Any, lengths: Any, offsets: Any, out: Any) -> Any:
        """Build the slots of a step."""
        if out is None:
            if not isinstance(offsets, tuple):
                raise ValueError(
                    "row_offsets are on a GPU and are not read back; pass out for the slots, or "
                    "row_offsets from the host"
                )
            out = self.empty((_last(offsets[0]),), np.dtype(np.int64), "the slots")
        kernels().build_slots(pool, table, lengths, offsets, out, *self.launch_args(1))
        return out

    def append_slots(self, pools: Any, slots: Any, tokens: Any, out: Any, threads: int) -> Any:
        """Append by slots; return int32 [1], the number of slots beyond the pool."""
        wanted, bad = self._slots_and_count(slots, out)
        kernels().append_slots(pools, wanted, tokens, bad, *self.launch_args(threads))
        return bad

    def append_slots_nvfp4(self, transfers: Any, slots: Any, out: Any, threads: int) -> Any:
        """Append to nvfp4 pools; return int32 [1], the number of slots beyond the pool."""
        wanted, bad = self._slots_and_count(slots, out)
        kernels().append_slots_nvfp4(transfers, wanted, bad, *self.launch_args(threads))
        return bad

    def _slots_and_count(self, slots: Any, out: Any) -> tuple[Any, Any]:
        """Return slots as kernels take them, and a count of 0."""
        bad = self.empty((1,), np.dtype(np.int32), "the count") if out is None else out
        wanted = self.index_array(slots, "slots")
        kernels().fill(bad.data.ptr, 0, bad.nbytes, self.device, self.stream)
        return wanted, bad

    def advance_lengths(self, lengths: Any, offsets: Any, active: Any, out: Any) -> None:
        """Write the lengths after a step to `out`."""
        kernels().advance_lengths(lengths, offsets, active, out, *self.launch_args(1))

    def attention(self, request: AttentionRequest) -> tuple[Any, Any]:
        """Attend over pages."""
        found: tuple[Any, Any] = attention_kernels().run(self, request)
        return found

    def page_indices(self, request: IndexRequest, offsets: Any, out: list[Any]) -> None:
        """Write the pages of a batch, row after row."""
        there = offsets[1] if isinstance(offsets, tuple) else offsets
        attention_kernels().write_page_indices(request, there, out, self)

    def copy_partial(self, cache: list[Tensor], copies: Any, threads: int) -> None:
        """Copy the first tokens of pages."""
        kernels().copy_partial(cache, copies, *self.launch_args(threads))

    def transfer(
        self,
        source: tuple[list[Tensor], bool],
        destination: tuple[list[Tensor], bool],
        pairs: Any,
        layers: tuple[int, int],
        most_blocks: int,
        threads: int,
    ) -> None:
        """Copy pages between caches, each with a flag: true if K has vLLM's packed layout."""
        last = most_blocks, *self.launch_args(threads)
        kernels().transfer(*source, *destination, pairs, *layers, *last)

    def take_over(self, arrays: list[Any]) -> None:
        """Order the call after the work on its arrays, and hold their memory until it is done.

        DLPack orders cupy's current stream after the work on an array, so this stream is ordered
        after cupy's. An array is held if its library could reuse the memory before the work is
        done.
        """
        lent = [array for array in arrays if is_lent(array, self._is_current)]
        if lent:
            if self._loan is None:
                self._loan = Loan(self.device, self.stream)
            self._loan.arrays += lent
        if not any(map(is_exchanged, arrays)):
            return
        current = driver.current(self.device).ptr
        if current != self.stream and not self._is_captured():
            event = kernels().Event(self.device)
            kernels().record(event.ptr, self.device, current)
            kernels().wait(event.ptr, self.device, self.stream)

    def wait_for(self, event: Any) -> None:
        """Order the stream after an event of the device, if there is an event.

        Raises
        ------
        ValueError
            The stream is captured into a graph.
        """
        if event is None:
            return
        if self._is_captured():
            raise ValueError(
                "the stream is captured into a graph, which cannot wait for work from outside; "
                "call before the capture"
            )
        kernels().wait(event.ptr, self.device, self.stream)

    def _is_current(self, library: str) -> bool:
        if library not in self._on:
            self._on[library] = library_stream(self.device, library).handle == self.stream
        return self._on[library]

    def wait(self) -> None:
        """Block the host until the stream's work is done."""
        kernels().synchronize(self.device, self.stream)


class ManagerPlace(DevicePlace):
    """The place of a manager's work: a device and its current stream.

    New arrays are marked as kvcore's, bound to no library's current stream.

    Parameters
    ----------
    device : int
    """

    def __init__(self, device: int) -> None:
        super().__init__(device, manager_stream(device).handle)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], name: str = "a result") -> Any:
        """Allocate memory from cupy's memory pool."""
        return own_array(super().empty(shape, dtype, name))


def _last(offsets: NDArray[np.uint32]) -> int:
    """Return the number of tokens of row offsets that are not checked yet."""
    return int(offsets[-1]) if offsets.ndim == 1 and offsets.size else 0


def device_place(
    stream: Any, named: list[tuple[str, Any]], beside: tuple[Any, ...] = ()
) -> DevicePlace:
    """Return the place of arrays; at least one array is on a GPU.

    Parameters
    ----------
    stream : stream or None
        None for the current stream of the arrays' library.
    named : list of (str, array)
    beside : tuple
        Further arrays of the call as the caller passed them, or tuples of arrays, of any library
        and on any device.

    Raises
    ------
    ValueError
        The arrays are on several devices, or in host memory and on a GPU; the stream is on another
        device; or two libraries of the arrays have chosen different streams.
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
    loans_of(device).drop_done()
    place = DevicePlace(device, _handle(stream, device, named, beside))
    place.take_over([array for _, array in named])
    return place


def _handle(stream: Any, device: int, named: list[tuple[str, Any]], beside: tuple[Any, ...]) -> int:
    """Return the handle of `stream`, or of the current stream of the arrays' library."""
    if stream is not None:
        return stream_handle(stream, device)
    libraries = {library_of(array) for _, array in named}
    for given in beside:
        pair = given if isinstance(given, tuple) else (given,)
        libraries.update(map(library_of, pair))
    return current_stream(device, libraries - {""}).handle
