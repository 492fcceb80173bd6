# SPDX-License-Identifier: Apache-2.0
"""Split the 656-byte row of latent caches: codes, scales, elements with rotary positions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.arrays import address_of
from kvcore.support.dtypes import numpy_dtype

__all__ = ["ROW_BYTES", "latent_fp8_parts"]

_CODES, _GROUP, _ROTATED = 512, 128, 64  # elements
_SCALES_END = _CODES + _CODES // _GROUP * 4  # bytes

#: 512 float8_e4m3fn, 4 float32 scales of 128 each, 64 bfloat16.
ROW_BYTES = _SCALES_END + _ROTATED * 2


def latent_fp8_parts(
    rows: NDArray[np.uint8],
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32]]:
    """View rows of 656 bytes as their parts, without a copy.

    Parameters
    ----------
    rows : uint8 [pages, page_size, 656]
        Any strides, but the last axis is contiguous.

    Returns
    -------
    codes : float8_e4m3fn [pages, page_size, 1, 512]
    rotated : bfloat16 [pages, page_size, 1, 64]
        The ends of the keys (rope), not quantised.
    scales : float32 [pages, page_size, 1, 4]

    Raises
    ------
    ValueError
        A wrong shape or dtype, strided bytes of a row, an address or strides that are not multiples
        of 4.

    Notes
    -----
    A scale is computed as in ``quantize``: the largest finite magnitude over 448, at least 1e-12.
    """
    if rows.dtype != np.uint8 or rows.ndim != 3 or rows.shape[2] != ROW_BYTES:
        raise ValueError(
            f"latent rows have shape {rows.shape} and dtype {rows.dtype}, must be "
            f"(pages, page_size, {ROW_BYTES}) of uint8"
        )
    if rows.strides[2] != 1 or any(n % 4 for n in (address_of(rows), *rows.strides[:2])):
        raise ValueError("latent rows must have contiguous bytes and start at multiples of 4 bytes")
    wide = rows[:, :, None]
    return (
        wide[..., :_CODES].view(numpy_dtype("float8_e4m3fn")),
        wide[..., _SCALES_END:].view(numpy_dtype("bfloat16")),
        wide[..., _CODES:_SCALES_END].view(np.float32),
    )
