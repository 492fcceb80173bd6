# SPDX-License-Identifier: Apache-2.0
"""Arrays of any library: their device, and views of host arrays as numpy arrays without a copy."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore import _core
from kvcore.device import DLPACK_TYPES
from kvcore.native.contexts import host_tensor, library_matcher
from kvcore.support.dtypes import numpy_dtype

__all__ = [
    "address_of",
    "host_array",
    "in_library_of",
    "is_on_gpu",
    "is_writable",
    "kind_of",
    "present_zeros",
    "require_apart",
    "require_own_memory",
]

_MOST_WORK = 100_000  # limit of numpy's exact test; beyond it, arrays count as shared
_LINE = 64  # bytes of a cache line
_KINDS = {number: kind for kind, number in DLPACK_TYPES.items()}


def host_array(value: Any, name: str) -> NDArray[Any]:
    """View an array in host memory as a numpy array.

    Parameters
    ----------
    value : array
        An array of numpy or of any library with DLPack (torch, jax, ...), or an object with the
        buffer protocol. bfloat16 and float8 get the dtypes of ml_dtypes.
    name : str
        The name of the array in error texts.

    Returns
    -------
    ndarray
        A view of the same memory. It is read-only if the library forbids writing, as jax does.

    Raises
    ------
    TypeError
        `value` is not an array, is on a GPU, or its library does not export it. A torch tensor
        expects a gradient, has no memory, or has its negative bit set.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore.backends.arrays import host_array
    >>> array = np.arange(3)
    >>> np.shares_memory(host_array(array, "tokens"), array)
    True
    """
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    seen = host_tensor(value)
    if seen is not None:
        return seen
    if not hasattr(value, "__dlpack__"):
        return _of_buffer(value, name)
    try:
        number, index = value.__dlpack_device__()
        kind = _KINDS.get(number, "cpu")
        if kind == "cpu":
            return _import(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{name} is a {type(value).__name__} that cannot be seen from numpy: {error}"
        ) from error
    raise TypeError(f"{name} is on {kind}:{index}, must be in host memory; copy it there")


def _of_buffer(value: Any, name: str) -> NDArray[Any]:
    try:
        return np.asarray(memoryview(value))
    except TypeError as error:
        raise TypeError(
            f"{name} is a {type(value).__name__}, must be a numpy array, or one with DLPack or the "
            f"buffer protocol"
        ) from error


def _require_plain(tensor: Any) -> None:
    """Raise BufferError if the memory of a torch tensor does not hold its values."""
    if tensor.requires_grad:
        raise BufferError("it expects a gradient; pass tensor.detach()")
    if tensor.is_neg():  # DLPack does not export this bit
        raise BufferError("its negative bit is set; pass tensor.resolve_neg()")
    if tensor.numel() and not tensor.data_ptr():  # numpy would allocate new memory
        raise BufferError("it has no memory")


def _import(value: Any) -> NDArray[Any]:
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    if is_tensor:
        _require_plain(value)
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if not dtype.startswith(("bfloat", "float8")):
        return np.from_dlpack(value)
    # numpy's DLPack has no code for these dtypes: take the bits from torch, the array from jax.
    narrow = numpy_dtype(dtype)
    if is_tensor:
        bits = value.view(getattr(torch, f"uint{8 * narrow.itemsize}"))
        return np.from_dlpack(bits).view(narrow)
    seen = np.asarray(value).view()
    seen.flags.writeable = False  # it may be a copy, in which writes would be lost
    return seen


def _in_other_library(given: Any, result: NDArray[Any]) -> Any:
    """Return a new numpy array as an array of torch or jax, with Python code of the library."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        if result.dtype.isbuiltin == 1:  # not of ml_dtypes
            return torch.from_numpy(result)
        bits = torch.from_numpy(result.view(f"u{result.itemsize}"))
        return bits.view(getattr(torch, result.dtype.name))
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(given, jax.Array):
        return jax.numpy.asarray(result)
    return result


#: Returns a fresh numpy array (given, result) of a cache dtype as an array of the library that
#: ``given`` is of: torch tensors share the memory, jax arrays may copy it, and other libraries with
#: DLPack get the numpy array.
in_library_of = library_matcher(_in_other_library)


def kind_of(value: Any) -> str:
    """Return the kind of an array's device; "cpu" if `value` is not an array."""
    if isinstance(value, np.ndarray):
        return "cpu"
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, cupy.ndarray):
        return "cuda"
    on_gpu = getattr(value, "is_cuda", None)  # torch
    if isinstance(on_gpu, bool):
        return "cuda" if on_gpu else "cpu"
    if hasattr(value, "__dlpack_device__"):
        return _KINDS.get(value.__dlpack_device__()[0], "cpu")
    return "cuda" if hasattr(value, "__cuda_array_interface__") else "cpu"


def is_on_gpu(value: Any) -> bool:
    """Return true if `value` is an array on a GPU, of any library."""
    return type(value) is not np.ndarray and kind_of(value) != "cpu"


def address_of(array: Any) -> int:
    """Return the address of the first element of a numpy or cupy array."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    return int(array.data.ptr)


def is_writable(array: Any) -> bool:
    """Return true if kvcore may write to a numpy or cupy array."""
    if isinstance(array, np.ndarray):
        return bool(array.flags.writeable)
    return not hasattr(array, "is_read_only")


def require_own_memory(array: Any, name: str) -> None:
    """Raise ValueError if elements of an array share memory, as in a broadcast array."""
    if not array.flags.c_contiguous and _core.has_shared_elements(
        array.shape, array.strides, array.itemsize
    ):
        raise ValueError(
            f"{name} has strides {array.strides}, with which elements share memory; pass a copy, "
            f"or an array that is not broadcast"
        )


def require_apart(arrays: list[Any], name: str) -> None:
    """Raise ValueError if two target arrays share memory; on GPUs, if they begin at one address."""
    for i, array in enumerate(arrays):
        for other in arrays[:i]:
            is_host = isinstance(array, np.ndarray), isinstance(other, np.ndarray)
            if all(is_host):
                is_shared = np.may_share_memory(array, other, max_work=_MOST_WORK)  # type: ignore[arg-type]
            else:
                is_shared = not any(is_host) and array.data.ptr == other.data.ptr
            if is_shared and array.size:
                raise ValueError(f"{name} holds arrays that share memory, must be separate arrays")


def present_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Allocate zeros that begin at a cache line, in memory that is resident.

    The zeros are written now, so that the first steps do not wait for page faults. Whole cache
    lines are written faster than parts of lines; numpy's own large arrays begin 16 bytes after the
    start of a line.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    memory[begin : begin + size] = 0
    return memory[begin : begin + size].view(dtype).reshape(shape)
