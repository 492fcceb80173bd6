# SPDX-License-Identifier: Apache-2.0
"""Quantising to nvfp4 and back, against ml_dtypes and numpy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conftest
from kvcore import ops
from kvcore.support.dtypes import WIDE, numpy_dtype
from nvfp4_oracle import decoded, drawn, encoded, specials
from tables import table

GLOBALS = (1.0, 0.37, 2.0**-12, 5e4, 1e-30, 1e-44, 5e37, 3.4e38)


def same(found: Any, expected: Any) -> bool:
    """Return true if two arrays have the same bits, except for NaN."""
    nan = np.isnan(expected.astype(np.float32))
    bits = f"u{expected.itemsize}"
    return bool(
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and np.array_equal(np.isnan(found.astype(np.float32)), nan)
        and np.array_equal(found.view(bits)[~nan], expected.view(bits)[~nan])
    )


def check(x: Any, global_scale: float = 1.0, threads: int = 1) -> None:
    codes, scales = ops.quantize(x, "nvfp4", 16, global_scale=global_scale, threads=threads)
    expected = encoded(x, global_scale)
    assert same(codes, expected[0])
    assert same(scales, expected[1])
    for dtype in WIDE:
        back = ops.dequantize(codes, scales, dtype, global_scale=global_scale, threads=threads)
        assert same(back, decoded(*expected, dtype, global_scale))


@given(
    st.lists(st.integers(0, 5), max_size=2),
    st.integers(1, 9),
    st.integers(-6, 6),
    st.sampled_from(WIDE),
    st.sampled_from(GLOBALS),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_codes_scales_and_values_are_those_of_the_oracle(
    lead: Any, blocks: int, exponent: int, dtype: str, global_scale: float, threads: int, seed: int
) -> None:
    check(drawn((*lead, 16 * blocks), dtype, seed, exponent), global_scale, threads)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("global_scale", GLOBALS)
def test_codes_ties_zeros_and_ends(dtype: str, global_scale: float) -> None:
    with np.errstate(over="ignore"):
        check(specials().astype(numpy_dtype(dtype)), global_scale)


def test_every_code_comes_back_as_itself() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(32, 8)
    # With a 6 in each block, quantisation returns the original scale.
    codes[:, 7] = codes[:, 7] & 0x0F | 0x70
    scales = np.full((32, 1), 0.5, numpy_dtype("float8_e4m3fn"))
    values = ops.dequantize(codes, scales, "float32")
    assert values[0, :4].tolist() == [0.0, 0.0, 0.25, 0.0]  # codes 0, 0, 1, 0
    assert values[0, 15] == 3.0
    assert np.signbit(values[1, 0]) == (codes[1, 0] & 8 != 0)
    found, factors = ops.quantize(values, "nvfp4", 16)
    assert np.array_equal(found, codes)
    assert np.array_equal(factors, scales)


@pytest.mark.parametrize("dtype", WIDE)
def test_every_scale_is_read(dtype: str) -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (256, 8), np.uint8)
    scales = np.arange(256, dtype=np.uint8).view(numpy_dtype("float8_e4m3fn"))[:, None]
    for global_scale in GLOBALS:
        found = ops.dequantize(codes, scales, dtype, global_scale=global_scale)
        assert same(found, decoded(codes, scales, dtype, global_scale))


def test_error_is_at_most_a_step() -> None:
    x = np.random.default_rng(3).normal(size=(64, 8, 128)).astype(np.float32)
    codes, scales = ops.quantize(x, "nvfp4", 16, global_scale=0.01)
    back = ops.dequantize(codes, scales, "float32", global_scale=0.01)
    most = np.abs(x).reshape(64, 8, 8, 16).max(-1)
    error = np.abs(back - x).reshape(64, 8, 8, 16).max(-1)
    # Half a step of the largest codes, plus the loss from a scale that was rounded down.
    assert (error <= most * (1 / 6 + 1 / 16)).all()


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_threads_change_nothing(threads: int) -> None:
    check(drawn((501, 3, 80), "bfloat16", 7), 0.5, threads)


def test_strided_input_is_read_in_its_order() -> None:
    x = drawn((6, 4, 40), "float32", 5)
    cut = x[::2, :, 4:36].transpose(1, 0, 2)
    for one, other in zip(
        ops.quantize(cut, "nvfp4", 16), ops.quantize(cut.copy(), "nvfp4", 16), strict=True
    ):
        assert same(one, other)


def test_a_global_scale_may_be_an_array() -> None:
    x = drawn((3, 32), "float16", 2)
    expected = ops.quantize(x, "nvfp4", 16, global_scale=0.25)
    for scale in (np.float32(0.25), np.array([0.25], np.float32), np.array(0.25, np.float32)):
        found = ops.quantize(x, "nvfp4", 16, global_scale=scale)
        assert all(same(one, other) for one, other in zip(found, expected, strict=True))


def test_results_go_where_the_caller_says() -> None:
    x = drawn((3, 32), "float32", 6)
    codes, scales = ops.quantize(x, "nvfp4", 16)
    out = np.empty_like(codes), np.empty_like(scales)
    assert ops.quantize(x, "nvfp4", 16, out=out) is out
    assert same(out[0], codes)
    assert same(out[1], scales)
    back = np.empty((3, 32), np.float16)
    assert ops.dequantize(codes, scales, "float16", out=back) is back
    assert same(back, ops.dequantize(codes, scales, "float16"))


def test_torch_in_torch_out() -> None:
    torch = conftest.require("torch")
    x = torch.arange(-16, 16, dtype=torch.bfloat16).reshape(1, 32)
    codes, scales = ops.quantize(x, "nvfp4", 16)
    assert codes.dtype == torch.uint8
    assert scales.dtype == torch.float8_e4m3fn
    back = ops.dequantize(codes, scales, "bfloat16")
    assert back.dtype == torch.bfloat16
    assert float(back[0, 0]) == -16.5  # -6 * 2.75


X = np.ones((2, 3, 32), np.float32)
CODES, SCALES = ops.quantize(X, "nvfp4", 16)
MEMORY = np.zeros(256, np.uint8)


@table(
    ("call", "error", "match"),
    [
        (lambda: ops.quantize(X, "nvfp4", 8), ValueError, "granularity is 8, must be 16"),
        (lambda: ops.quantize(X, "nvfp4", "head"), ValueError, "granularity is 'head'"),
        (lambda: ops.quantize(X[..., :24], "nvfp4", 16), ValueError, "whole blocks of 16"),
        (lambda: ops.quantize(np.float32(1), "nvfp4", 16), ValueError, "whole blocks of 16"),
        (lambda: ops.quantize(X.astype(np.int8), "nvfp4", 16), TypeError, "x has dtype int8"),
        (
            lambda: ops.quantize(X, "int8", 16, global_scale=0.5),
            ValueError,
            "global_scale is given for int8",
        ),
        (
            lambda: ops.dequantize(
                X.astype(np.int8), np.ones(1, np.float32), "float32", global_scale=2.0
            ),
            ValueError,
            "global_scale is given for int8",
        ),
        (
            lambda: ops.dequantize(CODES, SCALES.astype(np.float32), "float32"),
            TypeError,
            "scales has dtype float32",
        ),
        (
            lambda: ops.dequantize(CODES, SCALES[..., :1], "float32"),
            ValueError,
            r"scales has shape \(2, 3, 1\).*must be \(2, 3, 2\)",
        ),
        (
            lambda: ops.dequantize(CODES[..., :4], SCALES, "float32"),
            ValueError,
            "whole blocks",
        ),
        (lambda: ops.dequantize(CODES, SCALES, "int8"), ValueError, "dtype is 'int8'"),
        (
            lambda: ops.quantize(X, "nvfp4", 16, out=(CODES, SCALES.astype(np.float32))),
            TypeError,
            r"out\[1\] has dtype float32",
        ),
        (
            lambda: ops.quantize(
                MEMORY.view(np.float32)[:16], "nvfp4", 16, out=(MEMORY[:8], SCALES[0, 0, :1])
            ),
            ValueError,
            "share",
        ),
        (lambda: ops.quantize(X, "nvfp4", 16, threads=0), ValueError, "threads is 0"),
    ],
)
def test_bad_arguments_are_refused(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


@table(
    ("scale", "error"),
    [
        *((bad, ValueError) for bad in (0, 0.0, -1.0, float("nan"), float("inf"), 1e39, 1e-60)),
        (np.array([np.nan], np.float32), ValueError),
        (np.array([1, 2], np.float32), ValueError),
        (np.array([1.0]), TypeError),
        ("1", TypeError),
        (True, TypeError),
        (None, TypeError),
    ],
)
def test_bad_global_scales_are_refused(scale: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="global_scale"):
        ops.quantize(X, "nvfp4", 16, global_scale=scale)
    with pytest.raises(error, match="global_scale"):
        ops.dequantize(CODES, SCALES, "float32", global_scale=scale)
