# SPDX-License-Identifier: Apache-2.0
"""Checks of numbers and flags that callers pass; a float is never rounded to an int."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MOST_INT64",
    "MOST_UINT32",
    "flag",
    "integer",
    "integers",
    "number",
    "pair_of",
    "renamed",
]

MOST_UINT32 = 2**32 - 1
MOST_INT64 = 2**63 - 1


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return an int.

    Raises
    ------
    TypeError
        `value` is not an integer, or is a bool.
    ValueError
        `value` is outside ``least .. most``.
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
    """Return host integers as int64, in the same shape and in C order.

    Raises
    ------
    TypeError
        The dtype is not an integer dtype; bool and floats are not converted.
    ValueError
        A number is outside ``least .. most``.
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
    """Return a float; infinity if `value` is beyond the range of floats.

    Raises
    ------
    TypeError
        `value` is not a number, or is a bool or a string.
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
    """Return a bool; raise TypeError for any other type."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"{name} is a {type(value).__name__}, must be a bool")


def pair_of(name: str, given: Any) -> tuple[Any, Any]:
    """Return the two items of a tuple or list.

    Raises
    ------
    TypeError
        `given` is not a tuple or list.
    ValueError
        The number of items is not 2.
    """
    if not isinstance(given, tuple | list):
        raise TypeError(f"{name} is a {type(given).__name__}, must be a pair of arrays")
    if len(given) != 2:
        raise ValueError(f"{name} holds {len(given)} items, must hold 2")
    return given[0], given[1]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def renamed(**names: str) -> Callable[[_Function], _Function]:
    """Return a decorator of a function that also takes arguments by earlier names.

    Parameters
    ----------
    **names
        The present name of an argument, by its earlier name.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            for earlier in names.keys() & keywords.keys():
                if names[earlier] in keywords:
                    raise TypeError(
                        f"{names[earlier]} and {earlier} are both given, must be one of them; pass "
                        f"{names[earlier]}"
                    )
                keywords[names[earlier]] = keywords.pop(earlier)
            return function(*args, **keywords)

        return call  # type: ignore[return-value]

    return decorate
