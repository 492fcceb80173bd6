# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

def host_tensor(value: object) -> NDArray[Any] | None:
    """See a tensor of torch in host memory as an array of numpy.

    Parameters
    ----------
    value : object

    Returns
    -------
    ndarray or None
        The same memory, which it keeps. None for what is no tensor, lies elsewhere, is a
        subclass, expects a gradient, has a bit that negates it, or is empty; and where this version
        of torch has no exchange table.

    Notes
    -----
    torch is not imported: a tensor is known by its class. About .2 us; what is None
    here may be seen by Python code.
    """

def array_viewer(otherwise: Callable[[Any, str], Any]) -> Callable[..., Any]:
    """Make a function that sees arrays of any library, numpy's and tensors of torch by itself.

    Parameters
    ----------
    otherwise : callable (value, name) -> array
        Sees the others, and raises for what is none.

    Returns
    -------
    callable (value, name, last=None) -> array
        `last`: an array that it returned, which it returns again where `value` has the same
        elements in the same memory.
    """

def call_array_viewer(otherwise: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Make a function that sees arrays as those of ``array_viewer`` do, but only for a call.

    Parameters
    ----------
    otherwise : callable (value, name) -> array

    Returns
    -------
    callable (value, name) -> array
        Nothing keeps the memory but `value`, which the caller holds for as long as the array is
        used. A tensor that is where the last one of its name was is seen as the same array.
    """

def tensor_like(given: object, result: NDArray[Any]) -> Any:
    """Return an array of numpy as a tensor of torch, where another array of the call is one.

    Parameters
    ----------
    given : object
    result : ndarray

    Returns
    -------
    torch.Tensor or None
        The same memory. None where `given` is no tensor as ``host_tensor`` sees them, and for the
        dtypes of ml_dtypes, which torch does not take from numpy.
    """

def are_numpy(given: tuple[object, ...]) -> bool:
    """Tell whether all arrays of a call are numpy's: then they are in host memory.

    Parameters
    ----------
    given : tuple of array, list or tuple of them, str, bool, int or None
        Arrays as ``kvcore.backends.selection.any_array`` returns them.
    """
