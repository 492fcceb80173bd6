# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries, seen as numpy arrays without a copy; on GPUs as cupy arrays.

Here is the one place where host and device part: ``place_of`` answers where the arrays of a call
lie, and that is what runs kernels on them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcore import _core
from kvcore.device import Device
from kvcore.dtypes import numpy_dtype

__all__ = [
    "HOST",
    "Place",
    "any_array",
    "host_array",
    "in_library_of",
    "is_on_gpu",
    "is_writable",
    "place_of",
    "present_zeros",
    "require_apart",
    "require_own_memory",
    "zeros_on",
]

_MOST_WORK = 100_000  # of numpy's exact answer; what would cost more counts as shared
_LINE = 64  # bytes of a line of the caches
_DLPACK_CUDA = 2  # DLDeviceType of the DLPack header
_NO_NUMPY = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # dtypes of ml_dtypes


def host_array(value: Any, name: str) -> NDArray[Any]:
    """See an array in host memory as a numpy array.

    Parameters
    ----------
    value : array
        numpy, any library with DLPack (torch, jax, ...), or an object with the buffer protocol.
        bfloat16 and float8 come out with the dtypes of ml_dtypes.
    name : str
        What error texts call it.

    Returns
    -------
    ndarray
        The same memory. Read-only where the library forbids writing, as jax does.

    Raises
    ------
    TypeError
        No array, one on a GPU, or one that its library does not give away.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore.arrays import host_array
    >>> array = np.arange(3)
    >>> np.shares_memory(host_array(array, "tokens"), array)
    True
    """
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if not hasattr(value, "__dlpack__"):
        return _of_buffer(value, name)
    kind, index = value.__dlpack_device__()
    if kind == _DLPACK_CUDA:
        raise TypeError(f"{name} is on cuda:{index}, must be in host memory; copy it there")
    try:
        return _import(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name} is a {type(value).__name__} that cannot be seen from numpy: {error}"
        ) from error


def _of_buffer(value: Any, name: str) -> NDArray[Any]:
    try:
        return np.asarray(memoryview(value))
    except TypeError as error:
        raise TypeError(
            f"{name} is a {type(value).__name__}, must be a numpy array, or one with DLPack or the "
            f"buffer protocol"
        ) from error


def _import(value: Any) -> NDArray[Any]:
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if not dtype.startswith(("bfloat", "float8")):
        return np.from_dlpack(value)
    # numpy's DLPack has no code for these: torch gives their bits, jax the array itself.
    narrow = numpy_dtype(dtype)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        bits = value.view(getattr(torch, f"uint{8 * narrow.itemsize}"))
        return np.from_dlpack(bits).view(narrow)
    seen = np.asarray(value).view()
    seen.flags.writeable = False  # it may be a copy: writes must not get lost
    return seen


def in_library_of(given: Any, result: NDArray[Any]) -> Any:
    """Answer a fresh numpy array as an array of the library that another one is of.

    Parameters
    ----------
    given : array
        What ``host_array`` takes.
    result : ndarray
        Of a cache dtype, nobody else's.

    Returns
    -------
    array
        torch tensors share the memory, jax arrays may copy it; other libraries with DLPack get the
        numpy array.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        if result.dtype.name not in _NO_NUMPY:
            return torch.from_numpy(result)
        bits = torch.from_numpy(result.view(f"u{result.itemsize}"))
        return bits.view(getattr(torch, result.dtype.name))
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(given, jax.Array):
        return jax.numpy.asarray(result)
    return result


def is_on_gpu(value: Any) -> bool:
    """Tell whether something is an array on a GPU, of any library."""
    if isinstance(value, np.ndarray):
        return False
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, cupy.ndarray):
        return True
    on_gpu = getattr(value, "is_cuda", None)  # torch
    if isinstance(on_gpu, bool):
        return on_gpu
    if hasattr(value, "__dlpack_device__"):
        return bool(value.__dlpack_device__()[0] == _DLPACK_CUDA)
    return hasattr(value, "__cuda_array_interface__")


def is_writable(array: Any) -> bool:
    """Tell whether an array, as ``any_array`` answers it, may be written to."""
    if isinstance(array, np.ndarray):
        return bool(array.flags.writeable)
    return not hasattr(array, "is_read_only")


def require_own_memory(array: Any, name: str) -> None:
    """Raise ValueError where elements of an array share memory, as those of a broadcast one do."""
    if not array.flags.c_contiguous and _core.has_shared_elements(
        array.shape, array.strides, array.itemsize
    ):
        raise ValueError(
            f"{name} has strides {array.strides}, so that elements share memory; pass one that is "
            f"not broadcast, or a copy"
        )


def require_apart(arrays: list[Any], name: str) -> None:
    """Raise ValueError where two arrays that are written to share memory; on GPUs the same one."""
    for i, array in enumerate(arrays):
        for other in arrays[:i]:
            is_host = isinstance(array, np.ndarray), isinstance(other, np.ndarray)
            if all(is_host):
                is_shared = np.may_share_memory(array, other, max_work=_MOST_WORK)  # type: ignore[arg-type]
            else:
                is_shared = not any(is_host) and array.data.ptr == other.data.ptr
            if is_shared and array.size:
                raise ValueError(f"{name} holds arrays that share memory, must be one each")


def any_array(value: Any, name: str) -> Any:
    """See an array as numpy's where it lies in host memory, as cupy's where it lies on a GPU.

    Raises
    ------
    TypeError
        As of ``host_array``.
    KVCacheError
        An array on a GPU, and nothing here that could use it.
    """
    if type(value) is np.ndarray:  # most of them, and at once
        return value
    if not is_on_gpu(value):
        return host_array(value, name)
    from kvcore.cuda.arrays import device_array

    return device_array(value, name)


class Place(Protocol):
    """Tell kernels where the arrays of a call lie, and make arrays there."""

    @property
    def kernels(self) -> ModuleType:
        """The module whose functions work there: ``_core`` or ``_cuda``."""

    def last(self, threads: int) -> tuple[int, ...]:
        """Answer what those functions take last: threads, or device and stream."""

    def check(self, array: Any, name: str) -> Any:
        """Answer an array that lies there; ValueError for one elsewhere."""

    def numbers(self, array: Any, name: str) -> Any:
        """Answer ids, offsets or lengths, which may come from the host, as kernels take them."""

    def there(self, array: NDArray[Any]) -> Any:
        """Answer an array of the host's, or a copy of it on the device."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Answer a fresh array."""

    def contiguous(self, array: Any) -> Any:
        """Answer an array in C order, itself where it is."""

    def in_library_of(self, given: Any, result: Any) -> Any:
        """Answer a fresh array as one of the library that `given` is of."""

    def digests(self, pool: Any, ids: Any, threads: int) -> Any:
        """Answer the digests of pages, uint64 [n]."""

    def weighed(self, first: Any, second: Any) -> Any:
        """Answer first + 3 * second, of uint64."""

    def running_total(self, lengths: Any, *, has_room: bool) -> tuple[Any, int]:
        """Answer where each row begins and the last one ends, and how many tokens that is."""

    def paired(self, first: Any, second: Any) -> Any:
        """Answer int64 [n] twice as [n, 2], as kernels take them."""

    def slots(self, pool: Any, table: Any, lengths: Any, offsets: Any, out: Any) -> Any:
        """Build the slots of a step."""

    def append_slots(self, pools: Any, slots: Any, tokens: Any, threads: int) -> Any:
        """Append by slots; answer how many were beyond the pool."""

    def wait(self) -> None:
        """Block until the work given so far is done."""


class _Host:
    """Host memory."""

    kernels = _core

    def last(self, threads: int) -> tuple[int, ...]:
        return (threads,)

    def check(self, array: Any, name: str) -> Any:
        if isinstance(array, np.ndarray):
            return array
        raise ValueError(
            f"{name} is on cuda:{array.data.device_id}, the other arrays of the call are in host "
            f"memory; copy it there"
        )

    def numbers(self, array: Any, name: str) -> Any:
        return self.check(array, name)

    def there(self, array: NDArray[Any]) -> Any:
        return array

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return np.empty(shape, dtype)

    def contiguous(self, array: Any) -> Any:
        return np.asarray(array, order="C")

    def in_library_of(self, given: Any, result: Any) -> Any:
        return in_library_of(given, result)

    def digests(self, pool: Any, ids: Any, threads: int) -> Any:
        return _core.digest_pages(pool, ids, threads)

    def weighed(self, first: Any, second: Any) -> Any:
        return first + np.uint64(3) * second

    def running_total(
        self,
        lengths: Any,
        *,
        has_room: bool,  # noqa: ARG002 - of other places
    ) -> tuple[Any, int]:
        offsets = np.zeros(len(lengths) + 1, np.uint32)
        np.cumsum(self.numbers(lengths, "lengths"), out=offsets[1:])
        return offsets, int(offsets[-1])

    def paired(self, first: Any, second: Any) -> Any:
        sources = self.check(first, "source_ids")
        return np.stack([sources, self.check(second, "destination_ids")], axis=1)

    def slots(self, pool: Any, table: Any, lengths: Any, offsets: Any, out: Any) -> Any:
        return _core.build_slots(pool, table, lengths, offsets, out)

    def append_slots(self, pools: Any, slots: Any, tokens: Any, threads: int) -> Any:
        return _core.append_slots(pools, self.numbers(slots, "slots"), tokens, threads)

    def wait(self) -> None:
        pass


#: The place of numpy arrays.
HOST: Place = _Host()


def place_of(stream: Any, **arrays: Any) -> Place:
    """Answer the place where all arrays of a call lie.

    Parameters
    ----------
    stream : stream or None
        Of a GPU: see ``kvcore.cuda.stream_handle``.
    **arrays : array or list of array or None
        As ``any_array`` answers them, by the names that error texts call them.

    Raises
    ------
    ValueError
        Arrays in several places; a stream for arrays in host memory.
    """
    if _are_numpy(arrays.values()):
        if stream is not None:
            raise ValueError("stream is given for arrays in host memory; it is for those on a GPU")
        return HOST
    from kvcore.cuda.place import device_place

    lists = {name: given if isinstance(given, list) else [given] for name, given in arrays.items()}
    named = [(name, each) for name, given in lists.items() for each in given if each is not None]
    return device_place(stream, named)


def _are_numpy(arrays: Iterable[Any]) -> bool:
    for given in arrays:
        if type(given) is np.ndarray or given is None:
            continue
        if isinstance(given, list):
            if not _are_numpy(given):
                return False
        elif not isinstance(given, np.ndarray):
            return False
    return True


def present_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Allocate zeros that begin on a line of the caches, in memory that is present.

    Writing the zeros makes the memory present now, not during the first steps. Whole lines are
    written faster than parts of them: numpy's own large arrays begin 16 bytes behind a line.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    memory[begin : begin + size] = 0
    return memory[begin : begin + size].view(dtype).reshape(shape)


def zeros_on(device: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Allocate zeros on "cpu", in "pinned" host memory or on "cuda:<index>"."""
    if device == "pinned":
        from kvcore.cuda.pinned import pinned_zeros

        return pinned_zeros(shape, dtype)
    place = Device.parse(device)
    if place.kind == "cpu":
        return present_zeros(shape, dtype)
    from kvcore.cuda.memory import device_zeros

    return device_zeros(shape, dtype, place.index)
