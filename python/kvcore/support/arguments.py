# SPDX-License-Identifier: Apache-2.0
"""Numbers and flags that callers pass: taken as what they are, never as what they round to."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST_INT64", "MOST_UINT32", "flag", "integer", "integers", "number", "pair_of"]

MOST_UINT32 = 2**32 - 1
MOST_INT64 = 2**63 - 1


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return an int.

    Raises
    ------
    TypeError
        No integer; a bool is none.
    ValueError
        One outside ``least .. most``.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a {type(value).__name__}, must be an int") from None
    if (least is not None and found < least) or (most is not None and found > most):
        if most is None:
            raise ValueError(f"{name} is {found}, must be at least {least}")
        raise ValueError(f"{name} is {found}, must be {least} .. {most}")
    return found


def integers(
    name: str, values: Any, least: int = -(2**63), most: int = MOST_INT64
) -> NDArray[np.int64]:
    """Return integers of the host's as int64, of the same shape and in C order.

    Raises
    ------
    TypeError
        Another dtype; bool and floats are not rounded.
    ValueError
        A number outside ``least .. most``.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        is_huge = array.dtype.kind == "O" and all(type(each) is int for each in array.flat)
        if array.size and not is_huge:
            raise TypeError(f"{name} has dtype {array.dtype}, must be integers")
    if array.size:
        for found in (int(array.min()), int(array.max())):
            if not least <= found <= most:
                raise ValueError(f"{name} holds {found}, must be {least} .. {most}")
    return np.ascontiguousarray(array, np.int64).reshape(array.shape)


def number(name: str, value: Any) -> float:
    """Return a float; beyond its range infinity.

    Raises
    ------
    TypeError
        No number; a bool or a string is none.
    """
    if isinstance(value, bool | str | bytes | bytearray):
        raise TypeError(f"{name} is a {type(value).__name__}, must be a number")
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else -float("inf")
    except (TypeError, ValueError):
        raise TypeError(f"{name} is a {type(value).__name__}, must be a number") from None


def flag(name: str, value: Any) -> bool:
    """Return a bool; TypeError for anything else."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"{name} is a {type(value).__name__}, must be a bool")


def pair_of(name: str, given: Any) -> tuple[Any, Any]:
    """Return the two items of a tuple or list.

    Raises
    ------
    TypeError
        No tuple or list.
    ValueError
        Another number of items.
    """
    if not isinstance(given, tuple | list):
        raise TypeError(f"{name} is a {type(given).__name__}, must be a pair of arrays")
    if len(given) != 2:
        raise ValueError(f"{name} holds {len(given)} items, must hold 2")
    return given[0], given[1]
