# SPDX-License-Identifier: Apache-2.0
"""Arrays on GPUs of any library, seen as cupy arrays without a copy."""

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
from kvcore.support.dtypes import numpy_dtype

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

_NO_DLPACK = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # dtypes of ml_dtypes
_BITS = {1: "uint8", 2: "uint16"}


def device_array(value: Any, name: str) -> Any:
    """See an array on a GPU as a cupy array.

    Parameters
    ----------
    value : array
        cupy; a torch tensor; anything with ``__cuda_array_interface__`` or DLPack.
    name : str
        What error texts call it.

    Returns
    -------
    cupy.ndarray
        The same memory, bfloat16 and float8 with the dtypes of ml_dtypes. Of libraries that forbid
        writing, one that kvcore does not write to.

    Raises
    ------
    TypeError
        No array on a GPU, or one of a dtype that numpy has not got.
    ValueError
        Memory that was freed.
    KVCacheError
        No kernels for GPUs, or no cupy: "CUDA unavailable: " and why.

    Notes
    -----
    O(1), without a wait; but an interface that names a stream makes the host wait for it, and so
    does a bfloat16 or float8 array of jax.
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
        f"{name} is a {type(value).__name__} in host memory, must be an array on a GPU as the "
        f"others of the call are; copy it there"
    )


def over_memory(
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    device: int,
    owner: object,
    strides: tuple[int, ...] | None = None,
) -> Any:
    """Make a cupy array over memory that something else owns, without asking the driver.

    Parameters
    ----------
    address : int
        Of the first element.
    shape : tuple of int
    dtype : numpy.dtype
    device : int
    owner : object
        Kept alive by the array.
    strides : tuple of int, optional
        In bytes; those of C order by default.

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
    """See a cupy array as one that kvcore does not write to.

    Parameters
    ----------
    array : cupy.ndarray

    Returns
    -------
    cupy.ndarray
        The same memory; views of it are read-only as well. cupy itself writes to it all the same.
    """
    return _marked(array, is_read_only=True)


def own_array(array: Any) -> Any:
    """See a cupy array as one that kvcore made, so that no library says where work on it runs.

    Parameters
    ----------
    array : cupy.ndarray

    Returns
    -------
    cupy.ndarray
        The same memory; views of it are kvcore's as well.
    """
    return _marked(array, library="kvcore")


def pool_array(array: Any) -> Any:
    """See a cupy array as a pool of kvcore's, whose memory goes back when the GPU is idle.

    Parameters
    ----------
    array : cupy.ndarray

    Returns
    -------
    cupy.ndarray
        The same memory; views of it are so as well.
    """
    return _marked(array, library="kvcore", is_held=True)


def is_exchanged(array: Any) -> bool:
    """Tell whether an array came by DLPack, which put cupy's current stream behind its work."""
    return getattr(type(array), "is_exchanged", False)


def is_lent(array: Any, is_on: Callable[[str], bool]) -> bool:
    """Tell whether the memory of an array may go back while work on a stream still reads it.

    Parameters
    ----------
    array : cupy.ndarray
    is_on : callable (library) -> bool
        Whether the stream is the current one of a library.

    Returns
    -------
    bool
        Libraries use memory again in the order of their own current stream; those that kvcore does
        not know, at once.
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
        As a caller has it, or as ``device_array`` returns it.

    Returns
    -------
    {"cupy", "torch", "kvcore", ""}
        "" for what is not on a GPU; cupy also for libraries that have no current streams.
    """
    found = getattr(type(value), "library", None)
    if found is not None:
        return str(found)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return "torch" if value.is_cuda else ""
    return "cupy" if is_on_gpu(value) else ""


def in_device_library_of(given: Any, result: Any) -> Any:
    """Return a fresh cupy array as an array of the library that another one is of.

    torch tensors and jax arrays share the memory; other libraries get the cupy array.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        if result.dtype.name not in _NO_DLPACK:
            return torch.from_dlpack(result)
        bits = torch.from_dlpack(result.view(_BITS[result.itemsize]))
        return bits.view(getattr(torch, result.dtype.name))
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(given, jax.Array):
        if result.dtype.name not in _NO_DLPACK:
            return jax.dlpack.from_dlpack(result)
        bits = jax.dlpack.from_dlpack(result.view(_BITS[result.itemsize]))
        return bits.view(result.dtype)
    return result


# ---- inside --------------------------------------------------------------------------------------

# What is known of an array is said by its class, so that views of it say the same.
_MARKS = ("is_exchanged", "is_foreign", "is_held", "is_read_only", "library")


@cache
def _class_of(marks: tuple[tuple[str, Any], ...]) -> type:
    return type("MarkedArray", (cupy().ndarray,), dict(marks))


def _marked(array: Any, **marks: Any) -> Any:
    """See a cupy array as one that has these marks beside those that it has."""
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
    """Make an array of a class of cupy's."""
    cuda = cupy().cuda
    size = math.prod(shape) * dtype.itemsize
    if strides is not None and size:
        reach = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
        size = sum(r for r in reach if r > 0) + dtype.itemsize
    memory = cuda.UnownedMemory(address, size, owner, device)
    return kind(shape, dtype, cuda.MemoryPointer(memory, 0), strides=strides)


def _dtype(name: str, text: str) -> np.dtype[Any]:
    try:
        return numpy_dtype(text) if text in _NO_DLPACK else np.dtype(text)
    except TypeError as error:
        raise TypeError(f"{name} has dtype {text}, which numpy has not got") from error


def _of_torch(value: Any, name: str) -> Any:
    if not value.is_cuda:
        raise TypeError(
            f"{name} is a torch tensor on {value.device}, must be on a GPU as the others of the "
            f"call are; copy it there"
        )
    dtype = _dtype(name, str(value.dtype).removeprefix("torch."))
    strides = tuple(step * dtype.itemsize for step in value.stride())
    address = _alive(value.data_ptr(), value.numel(), name)
    kind = _class_of((("library", "torch"),))
    return _made(kind, address, tuple(value.shape), dtype, value.device.index, value, strides)


def _of_jax(value: Any, name: str) -> Any:
    dtype = str(value.dtype)
    if dtype not in _NO_DLPACK:
        return _of_dlpack(value)
    value.block_until_ready()
    address = _alive(value.unsafe_buffer_pointer(), value.size, name)
    device = kernels().device_of(address)
    array = over_memory(address, value.shape, _dtype(name, dtype), device, value)
    return _marked(array, is_foreign=True)


def _of_dlpack(value: Any) -> Any:
    """See an array of another library as cupy's, whose current stream is now behind its work."""
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
