# SPDX-License-Identifier: Apache-2.0
"""NVFP4 by numpy and ml_dtypes: the expected codes, scales and values, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcore.support.dtypes import numpy_dtype

__all__ = ["decoded", "drawn", "encoded", "specials"]

BLOCK = 16
LARGEST_SCALE = 448.0


def _float4(values: Any) -> Any:
    """Round to float4_e2m1fn, saturated; NaN to 0. ml_dtypes rounds ties to even codes."""
    import ml_dtypes

    clean = np.where(np.isnan(values), np.float32(0), np.clip(values, -6, 6))
    return clean.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF


def _table() -> Any:
    import ml_dtypes

    return np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)


def encoded(x: Any, global_scale: float = 1.0) -> tuple[Any, Any]:
    """Return codes uint8 [..., n / 2] and scales float8_e4m3fn [..., n / 16]."""
    g = np.float32(global_scale)
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    with np.errstate(all="ignore"):
        magnitudes = np.where(np.isfinite(blocks), np.abs(blocks), np.float32(0))
        most = magnitudes.max(-1, initial=np.float32(0))
        ratio = np.minimum(most / (np.float32(6) * g), np.float32(LARGEST_SCALE))
        rounded = ratio.astype(numpy_dtype("float8_e4m3fn")).view(np.uint8)
        scales = np.maximum(rounded, np.uint8(1)).view(numpy_dtype("float8_e4m3fn"))
        factors = np.float32(1) / (scales.astype(np.float32) * g)
        codes = _float4(blocks * factors[..., None]).reshape(x.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales


def decoded(codes: Any, scales: Any, dtype: str, global_scale: float = 1.0) -> Any:
    """Return the values of codes, computed in float64 and rounded wherever float32 rounds."""
    nibbles = np.stack([codes & 0xF, codes >> 4], axis=-1).reshape(
        *codes.shape[:-1], 2 * codes.shape[-1]
    )
    with np.errstate(all="ignore"):
        factors = scales.astype(np.float64) * float(np.float32(global_scale))
        spread = np.repeat(factors.astype(np.float32).astype(np.float64), BLOCK, axis=-1)
        return (_table()[nibbles] * spread).astype(np.float32).astype(numpy_dtype(dtype))


def drawn(shape: tuple[int, ...], dtype: str, seed: int = 0, exponent: int = 0) -> Any:
    """Draw elements, some of them 0, infinite or NaN, of blocks of many magnitudes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 10.0**exponent, shape)
    x *= 2.0 ** rng.integers(-6, 7, (*shape[:-1], 1))
    kind = rng.random(shape)
    x[kind < 0.1] = 0
    x[(kind >= 0.1) & (kind < 0.11)] = np.nan
    x[(kind >= 0.11) & (kind < 0.12)] = np.inf
    x[(kind >= 0.12) & (kind < 0.13)] = -np.inf
    x[(kind >= 0.13) & (kind < 0.14)] = -0.0
    with np.errstate(over="ignore"):
        return x.astype(numpy_dtype(dtype))


def specials() -> Any:
    """Return float32 blocks [blocks, 16] with all codes, ties and range ends."""
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    middles = (codes[:-1] + codes[1:]) / 2
    blocks = [np.concatenate([codes, -codes])]
    for toward in (-np.inf, np.inf, None):
        ties = middles if toward is None else np.nextafter(middles, np.float32(toward))
        blocks.append(np.concatenate([ties, [6], -ties, [-0.0]]))
    nan, inf = np.nan, np.inf
    blocks += [
        np.zeros(16),
        np.full(16, -0.0),
        np.full(16, nan),
        np.array([nan, -nan, inf, -inf] * 4),
        np.array([nan, inf, -inf, 1.0, -2.0, 0.3] + [0.0] * 10),
        np.full(16, 3.4e38),
        np.full(16, 1e-45),
        np.array([2.0**-9 * 6, 2.0**-10 * 6, 2.0**-11 * 6, 1e-30] * 4),
        np.array([448 * 6.0, 464 * 6.0, 465 * 6.0, -1e6] * 4),
        np.linspace(-7, 7, 16),
    ]
    return np.array(blocks, np.float32)
