# SPDX-License-Identifier: Apache-2.0
"""Views of GPU arrays of any library as cupy arrays, without a copy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kvcore.backends.arrays import is_on_gpu
from kvcore.backends.cuda import driver
from kvcore.backends.cuda.availability import cupy, kernels, require_devices
from kvcore.support.dtypes import FROM_ML_DTYPES, numpy_dtype

__all__ = [
    "device_array",
    "in_device_library_of",
    "is_exchanged",
    "is_lent",
    "library_of",
    "over_memory",
    "own_array",
    "pool_array",
    "read_only",
]

_BITS = {1: "uint8", 2: "uint16"}


def device_array(value: Any, name: str) -> Any:
    """View an array on a GPU as a cupy array.

    Parameters
    ----------
    value : array
        A cupy array, a torch tensor, or an object with ``__cuda_array_interface__`` or DLPack.
    name : str
        The name of the array in error texts.

    Returns
    -------
    cupy.ndarray
        A view of the same memory; bfloat16 and float8 get the dtypes of ml_dtypes. If the library
        forbids writing, kvcore does not write to the view.

    Raises
    ------
    TypeError
        `value` is not an array on a GPU, or numpy lacks its dtype.
    ValueError
        The memory of `value` was freed.
    KVCacheError
        No GPU kernels or no cupy: "CUDA unavailable: " and the reason.

    Notes
    -----
    Costs O(1). The host waits in two cases: for the stream that an ``__cuda_array_interface__``
    names, and for a bfloat16 or float8 array of jax.
    """
    library = cupy()
    if isinstance(value, library.ndarray):
        return value
    require_devices()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(value, name)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.Array):
        return read_only(_of_jax(value, name))
    if hasattr(value, "__cuda_array_interface__"):
        return _of_interface(value, name)
    if is_on_gpu(value):
        return _of_dlpack(value)
    raise TypeError(
        f"{name} is a {type(value).__name__} in host memory, must be an array on a GPU like "
        f"the other arrays of the call; copy it to the GPU"
    )


def over_memory(
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    device: int,
    owner: object,
    strides: tuple[int, ...] | None = None,
) -> Any:
    """Make a cupy array over memory of another owner, without a driver call.

    Parameters
    ----------
    address : int
        Address of the first element.
    shape : tuple of int
    dtype : numpy.dtype
    device : int
    owner : object
        The array keeps it alive.
    strides : tuple of int, optional
        Strides in bytes; C order by default.

    Returns
    -------
    cupy.ndarray

    Raises
    ------
    KVCacheError
        cupy is not installed.
    """
    return _made(cupy().ndarray, address, shape, dtype, device, owner, strides)


def read_only(array: Any) -> Any:
    """View a cupy array as an array that kvcore does not write to.

    Parameters
    ----------
    array : cupy.ndarray

    Returns
    -------
    cupy.ndarray
        A view of the same memory; its own views are also read-only. Only kvcore checks this mark:
        cupy writes to the array.
    """
    return _marked(array, is_read_only=True)


def own_array(array: Any) -> Any:
    """View a cupy array as an array that kvcore made, bound to no library's current stream.

    Parameters
    ----------
    array : cupy.ndarray

    Returns
    -------
    cupy.ndarray
        A view of the same memory; its own views are also marked.
    """
    return _marked(array, library="kvcore")


def pool_array(array: Any) -> Any:
    """View a cupy array as a kvcore pool, whose memory is freed only when the GPU is idle.

    Parameters
    ----------
    array : cupy.ndarray

    Returns
    -------
    cupy.ndarray
        A view of the same memory; its own views are also marked.
    """
    return _marked(array, library="kvcore", is_held=True)


def is_exchanged(array: Any) -> bool:
    """Return true for an array from DLPack, which made cupy's current stream wait for its work."""
    return getattr(type(array), "is_exchanged", False)


def is_lent(array: Any, is_on: Callable[[str], bool]) -> bool:
    """Return true if an array's memory may be reused while work on a stream still reads it.

    Parameters
    ----------
    array : cupy.ndarray
    is_on : callable (library) -> bool
        Returns true if the stream is the current stream of a library.

    Returns
    -------
    bool
        A known library reuses memory in the order of its own current stream. An unknown library
        may reuse memory at once.
    """
    kind = type(array)
    if getattr(kind, "is_held", False):
        return False
    return getattr(kind, "is_foreign", False) or not is_on(getattr(kind, "library", "cupy"))


def library_of(value: Any) -> str:
    """Return the library whose current stream orders the work on an array.

    Parameters
    ----------
    value : array
        The caller's array, or a result of ``device_array``.

    Returns
    -------
    {"cupy", "torch", "kvcore", ""}
        "" if `value` is not on a GPU; "cupy" also for libraries that have no current streams.
    """
    found = getattr(type(value), "library", None)
    if found is not None:
        return str(found)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return "torch" if value.is_cuda else ""
    return "cupy" if is_on_gpu(value) else ""


def in_device_library_of(given: Any, result: Any) -> Any:
    """Return a new cupy array as an array of another array's library.

    A torch tensor or a jax array shares the memory; for other libraries, the cupy array itself.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        if result.dtype.name not in FROM_ML_DTYPES:
            return torch.from_dlpack(result)
        bits = torch.from_dlpack(result.view(_BITS[result.itemsize]))
        return bits.view(getattr(torch, result.dtype.name))
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(given, jax.Array):
        if result.dtype.name not in FROM_ML_DTYPES:
            return jax.dlpack.from_dlpack(result)
        bits = jax.dlpack.from_dlpack(result.view(_BITS[result.itemsize]))
        return bits.view(result.dtype)
    return result


# ---- inside --------------------------------------------------------------------------------------

# The class of an array carries its marks, so that views of the array have the same marks.
_MARKS = ("is_exchanged", "is_foreign", "is_held", "is_read_only", "library")


@cache
def _class_of(marks: tuple[tuple[str, Any], ...]) -> type:
    return type("MarkedArray", (cupy().ndarray,), dict(marks))


def _marked(array: Any, **marks: Any) -> Any:
    """View a cupy array with these marks added to its own marks."""
    kind = type(array)
    known = {name: getattr(kind, name) for name in _MARKS if hasattr(kind, name)}
    return array.view(_class_of(tuple(sorted((known | marks).items()))))


def _made(
    kind: type,
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    device: int,
    owner: object,
    strides: tuple[int, ...] | None,
) -> Any:
    """Make an array of a cupy array class."""
    cuda = cupy().cuda
    size = math.prod(shape) * dtype.itemsize
    if strides is not None and size:
        reach = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
        size = sum(r for r in reach if r > 0) + dtype.itemsize
    memory = cuda.UnownedMemory(address, size, owner, device)
    return kind(shape, dtype, cuda.MemoryPointer(memory, 0), strides=strides)


def _dtype(name: str, text: str) -> np.dtype[Any]:
    try:
        return numpy_dtype(text) if text in FROM_ML_DTYPES else np.dtype(text)
    except TypeError as error:
        raise TypeError(f"{name} has dtype {text}, which numpy lacks") from error


def _of_torch(value: Any, name: str) -> Any:
    if not value.is_cuda:
        raise TypeError(
            f"{name} is a torch tensor on {value.device}, must be on a GPU like the other "
            f"arrays of the call; copy it to the GPU"
        )
    dtype = _dtype(name, str(value.dtype).removeprefix("torch."))
    strides = tuple(step * dtype.itemsize for step in value.stride())
    address = _alive(value.data_ptr(), value.numel(), name)
    kind = _class_of((("library", "torch"),))
    return _made(kind, address, tuple(value.shape), dtype, value.device.index, value, strides)


def _of_jax(value: Any, name: str) -> Any:
    dtype = str(value.dtype)
    if dtype not in FROM_ML_DTYPES:
        return _of_dlpack(value)
    value.block_until_ready()
    address = _alive(value.unsafe_buffer_pointer(), value.size, name)
    device = kernels().device_of(address)
    array = over_memory(address, value.shape, _dtype(name, dtype), device, value)
    return _marked(array, is_foreign=True)


def _of_dlpack(value: Any) -> Any:
    """View an array of another library as cupy's; cupy's current stream waits for its work."""
    return _marked(driver.of_dlpack(value), is_exchanged=True, is_foreign=True)


def _of_interface(value: Any, name: str) -> Any:
    interface = value.__cuda_array_interface__
    address, is_read_only = interface["data"]
    shape = tuple(interface["shape"])
    dtype = np.dtype(interface["typestr"])
    if dtype.kind == "V":  # of ml_dtypes
        dtype = _dtype(name, str(getattr(value, "dtype", dtype)).rpartition(".")[2])
    address = _alive(address, math.prod(shape), name)
    device = kernels().device_of(address) if address else 0
    if device < 0:
        raise ValueError(f"{name} names memory of no GPU; was it freed?")
    if interface.get("stream") is not None:
        kernels().synchronize(device, interface["stream"])
    array = over_memory(address, shape, dtype, device, value, interface.get("strides"))
    array = _marked(array, is_foreign=True)
    return read_only(array) if is_read_only else array


def _alive(address: int, elements: int, name: str) -> int:
    if elements and not address:
        raise ValueError(f"{name} has {elements} elements and no memory; was it freed?")
    return address
