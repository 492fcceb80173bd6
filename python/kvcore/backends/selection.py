# SPDX-License-Identifier: Apache-2.0
"""The one place where kinds of devices part: which backend a device or the arrays of a call have.

A backend is imported here alone, when something of its kind is met first.
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
    """Return the backend of a kind of device, imported if nobody did before.

    Parameters
    ----------
    kind : str
        As that of ``Device``.
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
        As of ``host_array``.
    KVCacheError
        An array on a GPU, and nothing here that could use it.
    """
    return backend_of(kind_of(value)).array(value, name)


#: Sees an array (value, name, last=None) as numpy's where it is in host memory, as cupy's where it
#: is on a GPU.
any_array = array_viewer(_other_array)
#: The same (value, name) of an argument that nothing keeps behind the call.
call_array = call_array_viewer(_other_array)


def place_of(stream: Any, arrays: dict[str, Any], beside: tuple[Any, ...] = ()) -> Place:
    """Return the place where all arrays of a call lie.

    Parameters
    ----------
    stream : stream or None
        Of a GPU: see ``kvcore.cuda.stream_handle``.
    arrays : dict of array, list of array or None
        As ``any_array`` returns them, by the names that error texts call them.
    beside : tuple
        What else the call was given and has a say in the stream, as the caller has it.

    Raises
    ------
    ValueError
        Arrays in several places; a stream for arrays in host memory.
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
