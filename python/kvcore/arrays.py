# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries, seen as numpy arrays without a copy."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.dtypes import numpy_dtype

__all__ = ["host_array", "in_library_of", "present_zeros"]

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
        raise TypeError(
            f"{name} is on cuda:{index}, this version takes arrays in host memory; copy it there"
        )
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
