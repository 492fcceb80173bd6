# SPDX-License-Identifier: Apache-2.0
"""Quantise, dequantise and merge on a GPU: the host's bytes for all codes, NaN and infinities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_arrays
from gpu_arrays import Put, check_both, on_gpu, to_host
from kvcore import ops
from kvcore.support.dtypes import WIDE, numpy_dtype
from random_arrays import random_bytes
from same_arrays import same_bytes

gpu_arrays.require_gpu()
pytestmark = pytest.mark.gpu

NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")
ATOL = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("granularity", ["group", "row", "head", "tensor"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((77, 3, 128), marks=pytest.mark.reduced),
        (5, 2, 59),
        (1, 1, 4096),
        (300, 8, 80),
    ],
)
def test_quantising_and_back_have_the_host_s_bytes(
    shape: tuple[int, ...], granularity: Any, narrow: str, wide: str
) -> None:
    """The inputs are random bits, including NaN, infinities and subnormals."""
    each = {"group": shape[-1] // 4 if shape[-1] % 4 == 0 else 1, "row": shape[-1]}

    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        x = put(random_bytes(rng, shape, numpy_dtype(wide)))
        codes, scales = ops.quantize(x, narrow, each.get(granularity, granularity))
        return [codes, scales, *(ops.dequantize(codes, scales, back) for back in WIDE)]

    check_both(work)


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("narrow", NARROW)
def test_every_code_and_every_element_has_the_host_s(narrow: str, wide: str) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        kind = numpy_dtype(wide)
        every = np.arange(1 << 16, dtype=np.uint32)
        bits = every.astype(np.uint16) if kind.itemsize == 2 else every * np.uint32(65537)
        codes, scales = ops.quantize(put(bits.view(kind).reshape(-1, 64)), narrow, 64)
        all_codes = put(np.arange(256, dtype=np.uint8).view(numpy_dtype(narrow)).reshape(1, 256))
        values = [
            ops.dequantize(all_codes, put(np.array([scale], np.float32)), wide)
            for scale in (1.0, 0.3, 1e-12, 1e-42, 7e35, 3e38)
        ]
        return [codes, scales, *values]

    check_both(work)


def states(rng: np.random.Generator, n: int, dim: int, dtype: str) -> tuple[Any, Any]:
    """Return states, of which some are empty: NaN, with an LSE of -inf or +inf."""
    values = rng.normal(size=(n, dim)).astype(np.float32)
    lse = (rng.normal(size=n) * 5).astype(np.float32)
    lse[::5], lse[1::5] = -np.inf, np.inf
    values[~np.isfinite(lse)] = np.nan
    return values.astype(numpy_dtype(dtype)), lse


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("dim", [128, 59, 512, 8])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.reduced
def test_states_merge_as_in_double_precision(dtype: str, dim: int, in_place: bool) -> None:
    rng = np.random.default_rng(5)
    n = 203
    (a, lse_a), (b, lse_b) = (states(rng, n, dim, dtype) for _ in range(2))
    lse_b = rng.permutation(lse_b)
    b = np.where(np.isfinite(lse_b)[:, None], rng.normal(size=(n, dim)), np.nan).astype(b.dtype)
    args = [on_gpu(x) for x in (a, lse_a, b, lse_b)]
    out = (args[0], args[1]) if in_place else None
    o, lse = (to_host(x) for x in ops.merge_states(*args, out=out))
    weights = [np.where(np.isfinite(x), x, -np.inf).astype(np.float64) for x in (lse_a, lse_b)]
    most = np.maximum(*weights)
    origin = np.where(np.isfinite(most), most, 0)
    of_a, of_b = (np.exp(w - origin)[:, None] for w in weights)
    total = of_a + of_b
    numbers = [np.nan_to_num(x.astype(np.float64)) for x in (a, b)]
    expected = (of_a * numbers[0] + of_b * numbers[1]) / np.where(total > 0, total, 1)
    tolerance = ATOL[dtype]
    assert np.allclose(o.astype(np.float64), expected, atol=tolerance, rtol=tolerance)
    assert not o[total[:, 0] == 0].astype(np.float32).any()
    with np.errstate(divide="ignore"):
        assert np.allclose(lse, origin + np.log(total[:, 0]), atol=1e-3, rtol=1e-5)
    assert same_bytes(b, to_host(args[2]))
