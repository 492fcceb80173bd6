# SPDX-License-Identifier: Apache-2.0
"""Select the backend of a device or of a call's arrays: the only branch on the kind of device.

Only this module imports a backend, on the first use of its kind of device.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import numpy as np

from kvcore.backends import host
from kvcore.backends.arrays import kind_of
from kvcore.backends.host import HOST
from kvcore.backends.protocol import Backend, Place
from kvcore.device import Device
from kvcore.native.contexts import are_numpy, array_viewer, call_array_viewer

__all__ = ["any_array", "backend_of", "call_array", "place_of", "zeros_on"]

_PINS = "cuda"  # the kind whose backend allocates "pinned" memory


@cache
def backend_of(kind: str) -> Backend:
    """Return the backend of a kind of device; import it on first use.

    Parameters
    ----------
    kind : str
        A ``Device.kind``.
    """
    if kind == "cpu":
        return host.BACKEND
    found: Backend = importlib.import_module(f"kvcore.backends.{kind}").BACKEND
    return found


def _other_array(value: Any, name: str) -> Any:
    """See an array of any library.

    Raises
    ------
    TypeError
        See ``host_array``.
    KVCacheError
        The array is on a GPU, and this process cannot use GPUs.
    """
    return backend_of(kind_of(value)).array(value, name)


#: Returns an array as a numpy array if it is in host memory, as a cupy array if it is on a GPU.
#: Arguments: (value, name, last=None).
any_array = array_viewer(_other_array)
#: The same for an argument that kvcore does not keep after the call. Arguments: (value, name).
call_array = call_array_viewer(_other_array)


def place_of(stream: Any, arrays: dict[str, Any], beside: tuple[Any, ...] = ()) -> Place:
    """Return the place of all arrays of a call.

    Parameters
    ----------
    stream : stream or None
        A stream of a GPU, see ``kvcore.cuda.stream_handle``.
    arrays : dict of array, list of array or None
        Results of ``any_array``, by their names in error texts.
    beside : tuple
        Further arrays of the call, as the caller passed them. Their libraries also decide the
        stream.

    Raises
    ------
    ValueError
        The arrays are in several places, or `stream` is given for arrays in host memory.
    """
    if are_numpy(tuple(arrays.values())):
        return HOST if stream is None else host.BACKEND.place(stream, [])
    lists = {name: given if isinstance(given, list) else [given] for name, given in arrays.items()}
    named = [(name, each) for name, given in lists.items() for each in given if each is not None]
    kind = next(kind_of(each) for _, each in named if not isinstance(each, np.ndarray))
    return backend_of(kind).place(stream, named, beside)


def zeros_on(device: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Allocate zeros on "cpu", in "pinned" host memory or on "cuda:<index>"."""
    if device == "pinned":
        return backend_of(_PINS).pinned_zeros(shape, dtype)
    wanted = Device.parse(device)
    return backend_of(wanted.kind).zeros(shape, dtype, wanted.index)
