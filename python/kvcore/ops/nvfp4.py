# SPDX-License-Identifier: Apache-2.0
"""Check NVFP4 scales: 4-bit codes in blocks of 16, a scale per block and one per tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.protocol import Place
from kvcore.backends.selection import any_array
from kvcore.support.arguments import number, pair_of

__all__ = [
    "BLOCK",
    "SCALES",
    "checked_blocks",
    "global_scale_at",
    "has_block_scales",
    "seen_pair",
]

#: Elements that share a scale, the bytes of their codes, and the dtype of block scales.
BLOCK, CODE_BYTES, SCALES = 16, 8, "float8_e4m3fn"

_NUMBERS = int, float, np.integer, np.floating


def global_scale_at(place: Place, given: Any, name: str = "global_scale") -> Any:
    """Return a tensor's scale for kernels: a float, or an array on the call's device.

    Parameters
    ----------
    place : Place
    given : float or array float32 of one element
        From the host, or on a GPU; a scale on a GPU is read when the work runs and is not checked
        here.
    name : str
        The name in error texts.

    Raises
    ------
    ValueError
        A number that is not finite and positive as float32, several elements.
    TypeError
        A wrong dtype.
    """
    if isinstance(given, _NUMBERS) and not isinstance(given, bool):
        return _checked(number(name, given), name)
    array = any_array(given, name)
    if array.dtype != np.float32:
        raise TypeError(f"{name} has dtype {array.dtype}, must be float32 or a number")
    if array.size != 1:
        raise ValueError(f"{name} has shape {array.shape}, must be a number or one element")
    if isinstance(array, np.ndarray):
        return _checked(float(array.reshape(-1)[0]), name)
    return place.checked(array, name)


def _checked(value: float, name: str) -> float:
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(value))
    if not (np.isfinite(rounded) and rounded > 0):
        raise ValueError(f"{name} is {value} ({rounded} as float32), must be finite and positive")
    return rounded


def has_block_scales(scales: Any) -> bool:
    """Return whether scales, as a caller gives them, are nvfp4 block scales."""
    is_array = scales is not None and not isinstance(scales, float | int)
    return is_array and bool(any_array(scales, "scales").dtype.name == SCALES)


def checked_blocks(pool: NDArray[Any], scales: NDArray[Any], name: str) -> NDArray[Any]:
    """Return block scales [pages, page_size, heads, dim / 16] of a pool of codes.

    Raises
    ------
    ValueError, TypeError
        Arrays that are not codes and scales of the same heads.
    """
    if pool.dtype != np.uint8:
        raise TypeError(
            f"{name[:-7]}_pool has dtype {pool.dtype}, must be uint8 where scales are {SCALES}: "
            f"codes of nvfp4, two in each byte"
        )
    if scales.dtype.name != SCALES:
        raise TypeError(f"{name} has dtype {scales.dtype}, must be {SCALES} as the other scales")
    is_whole = pool.shape[3] > 0 and pool.shape[3] == CODE_BYTES * scales.shape[3]
    if scales.shape[:3] != pool.shape[:3] or not is_whole:
        raise ValueError(
            f"{name} are {scales.shape} as [pages, page_size, heads, blocks] for a pool of "
            f"{pool.shape}; all axes but the last must agree, and the last has {CODE_BYTES} bytes "
            f"of codes for each block of {BLOCK} elements"
        )
    return scales


def seen_pair(given: Any) -> tuple[Any, Any]:
    """Return the global scales of K and V: checked numbers, or arrays as given."""
    pair = (1.0, 1.0) if given is None else pair_of("global_scales", given)
    return _seen(pair[0], "global_scales[0]"), _seen(pair[1], "global_scales[1]")


def _seen(given: Any, name: str) -> Any:
    if isinstance(given, _NUMBERS) and not isinstance(given, bool):
        return _checked(number(name, given), name)
    array = any_array(given, name)
    if array.dtype != np.float32 or array.size != 1:
        raise ValueError(
            f"{name} has shape {array.shape} and dtype {array.dtype}, must be a number or float32 "
            f"of one element"
        )
    return array
