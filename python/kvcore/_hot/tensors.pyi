# SPDX-License-Identifier: Apache-2.0
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
