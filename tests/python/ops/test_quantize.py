# SPDX-License-Identifier: Apache-2.0
"""Quantising against numpy in float64 and ml_dtypes, with arrays of every supported library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import conftest
from kvcore import ops
from kvcore.support.dtypes import WIDE, numpy_dtype
from tables import table

NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
# Half a code step, as a fraction of the group's largest value.
HALF_STEP = {"float8_e4m3fn": 16 / 448, "float8_e5m2": 4096 / 57344, "int8": 0.5 / 127}


def codes_of(x: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], dtype: str) -> Any:
    """The oracle: one product in float32, then the nearest code, saturated."""
    with np.errstate(all="ignore"):
        scaled = x.astype(np.float32) * (np.float32(1) / scales)
    if dtype == "int8":
        return np.clip(np.rint(np.nan_to_num(scaled, nan=0.0)), -128, 127).astype(np.int8)
    return np.clip(scaled, -LARGEST[dtype], LARGEST[dtype]).astype(numpy_dtype(dtype))


def scale_of(x: np.ndarray[Any, Any], axis: Any, dtype: str) -> Any:
    magnitude = np.abs(x.astype(np.float32))
    most = np.where(np.isfinite(magnitude), magnitude, 0).max(axis=axis, initial=0)
    return np.maximum(most / np.float32(LARGEST[dtype]), np.float32(1e-12))


def same_bits(a: Any, b: Any) -> bool:
    nan = np.isnan(a.astype(np.float32))
    bits = f"u{a.itemsize}"
    return bool(
        np.array_equal(nan, np.isnan(b.astype(np.float32)))
        and np.array_equal(a.view(bits)[~nan], b.view(bits)[~nan])
    )


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    shape = [*draw(st.lists(st.integers(0, 5), max_size=2)), draw(st.integers(1, 70))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.normal(0, 10.0 ** draw(st.integers(-6, 4)), shape)
    special = rng.random(shape)
    x[special < 0.02] = np.nan
    x[(special >= 0.02) & (special < 0.04)] = np.inf
    x[(special >= 0.04) & (special < 0.2)] = 0
    with np.errstate(over="ignore"):
        return x.astype(numpy_dtype(draw(st.sampled_from(WIDE))))


@given(arrays(), st.sampled_from(NARROW), st.data())
def test_groups_agree_with_the_oracle(x: Any, dtype: str, data: st.DataObject) -> None:
    n = x.shape[-1]
    group = data.draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0]))
    values, scales = ops.quantize(x, dtype, group)
    grouped = x.reshape(*x.shape[:-1], n // group, group)
    expected = scale_of(grouped, -1, dtype)
    assert scales.dtype == np.float32
    assert scales.shape == expected.shape
    assert np.array_equal(scales, expected)
    assert same_bits(values, codes_of(grouped, scales[..., None], dtype).reshape(x.shape))
    wide = data.draw(st.sampled_from(WIDE))
    back = ops.dequantize(values, scales, wide)
    with np.errstate(all="ignore"):
        product = values.reshape(grouped.shape).astype(np.float32) * scales[..., None]
        assert same_bits(back, product.reshape(x.shape).astype(numpy_dtype(wide)))


@given(arrays(), st.sampled_from(NARROW), st.sampled_from(["head", "tensor"]))
def test_heads_and_tensors_agree_with_the_oracle(x: Any, dtype: str, granularity: str) -> None:
    if granularity == "head" and x.ndim < 2:
        x = x[None]
    values, scales = ops.quantize(x, dtype, granularity)
    axes = tuple(i for i in range(x.ndim) if granularity == "tensor" or i != x.ndim - 2)
    expected = scale_of(x, axes, dtype).reshape(-1)
    assert np.array_equal(scales, expected)
    spread = scales if granularity == "tensor" else scales[:, None]
    assert same_bits(values, codes_of(x, spread, dtype))
    with np.errstate(all="ignore"):
        expected = (values.astype(np.float32) * spread).astype(np.float32)
    assert same_bits(ops.dequantize(values, scales, "float32"), expected)


@pytest.mark.parametrize("dtype", NARROW)
def test_error_is_at_most_half_a_step(dtype: str) -> None:
    x = np.random.default_rng(3).normal(size=(64, 8, 128)).astype(np.float32)
    values, scales = ops.quantize(x, dtype, 128)
    error = np.abs(ops.dequantize(values, scales, "float32") - x)
    limit = np.abs(x).max(-1) * HALF_STEP[dtype] * (1 + 1e-6)
    assert (error.max(-1) <= limit).all()


def test_threads_and_instruction_sets_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(4).normal(size=(3001, 64)).astype(np.float16)
    one = ops.quantize(x, "float8_e4m3fn", 64)
    many = ops.quantize(x, "float8_e4m3fn", 64, threads=3)
    assert all(
        np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in zip(one, many, strict=True)
    )
    back = ops.dequantize(*one, "bfloat16")
    again = ops.dequantize(*one, "bfloat16", threads=5)
    assert np.array_equal(back.view(np.uint16), again.view(np.uint16))


def test_strided_input_is_read_in_its_order() -> None:
    x = np.random.default_rng(5).normal(size=(6, 4, 10)).astype(np.float32)
    cut = x[::2, :, 1:9].transpose(1, 0, 2)
    values, scales = ops.quantize(cut, "int8", 4)
    expected, factors = ops.quantize(cut.copy(), "int8", 4)
    assert np.array_equal(values, expected)
    assert np.array_equal(scales, factors)


def test_torch_in_torch_out() -> None:
    torch = conftest.require("torch")
    x = torch.arange(-12, 12, dtype=torch.bfloat16).reshape(2, 12)
    for dtype in NARROW:
        values, scales = ops.quantize(x, dtype, 4)
        assert values.dtype == getattr(torch, dtype)
        assert scales.dtype == torch.float32
        back = ops.dequantize(values, scales, "bfloat16")
        assert back.dtype == torch.bfloat16
        assert torch.equal(back, (values.float() * scales.repeat_interleave(4, -1)).bfloat16())


def test_results_go_where_the_caller_says() -> None:
    x = np.random.default_rng(6).normal(size=(3, 8)).astype(np.float32)
    values, scales = ops.quantize(x, "int8", 4)
    out = np.empty_like(values), np.empty_like(scales)
    assert ops.quantize(x, "int8", 4, out=out) is out
    assert np.array_equal(out[0], values)
    assert np.array_equal(out[1], scales)
    back = np.empty((3, 8), np.float16)
    assert ops.dequantize(values, scales, "float16", out=back) is back
    assert np.array_equal(back, ops.dequantize(values, scales, "float16"))
    with pytest.raises(ValueError, match=r"out\[1\] has shape \(3,\)"):
        ops.quantize(x, "int8", 4, out=(out[0], np.empty(3, np.float32)))
    with pytest.raises(ValueError, match="in C order"):
        ops.dequantize(values, scales, "float16", out=np.empty((8, 3), np.float16).T)
    with pytest.raises(TypeError, match="out has dtype float32"):
        ops.dequantize(values, scales, "float16", out=np.empty((3, 8), np.float32))


X = np.ones((2, 3, 8), np.float32)


@table(
    ("call", "error", "match"),
    [
        (lambda: ops.quantize(X, "int8", 3), ValueError, "granularity is 3"),
        (lambda: ops.quantize(X, "int8", 0), ValueError, "granularity is 0"),
        (lambda: ops.quantize(X, "int8", "page"), ValueError, "granularity is 'page'"),
        (lambda: ops.quantize(X, "float16", 8), ValueError, "dtype is 'float16'"),
        (lambda: ops.quantize(X[0, 0], "int8", "head"), ValueError, "axis of heads"),
        (lambda: ops.quantize(X.astype(np.float64), "int8", 8), TypeError, "x has dtype float64"),
        (lambda: ops.quantize([1.0], "int8", 1), TypeError, "x is a list"),
        (lambda: ops.quantize(X, "int8", 8, threads=0), ValueError, "threads is 0"),
        (
            lambda: ops.dequantize(X.astype(np.int8), np.ones(5, np.float32), "float32"),
            ValueError,
            r"scales has shape \(5,\)",
        ),
        (
            lambda: ops.dequantize(X.astype(np.int8), np.ones((2, 3, 3), np.float32), "float32"),
            ValueError,
            r"scales has shape \(2, 3, 3\)",
        ),
        (
            lambda: ops.dequantize(X.astype(np.int8), np.ones(3), "float32"),
            TypeError,
            "scales has dtype float64",
        ),
        (
            lambda: ops.dequantize(X.astype(np.int8), np.ones(3, np.float32), "int8"),
            ValueError,
            "dtype is 'int8'",
        ),
        (lambda: ops.dequantize(X, np.ones(3, np.float32), "float32"), TypeError, "values has"),
    ],
)
def test_bad_arguments_are_refused(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_zeros_infinities_and_nan() -> None:
    zeros = np.zeros((1, 4), np.float32)
    values, scales = ops.quantize(zeros, "float8_e4m3fn", 4)
    assert math.isclose(float(scales[0, 0]), 1e-12, rel_tol=1e-6)
    assert not values.astype(np.float32).any()
    x = np.array([[1.0, np.inf, -np.inf, np.nan]], np.float32)
    values, scales = ops.quantize(x, "float8_e4m3fn", 4)
    assert values.view(np.uint8).tolist() == [[0x7E, 0x7E, 0xFE, 0x7F]]
    values, scales = ops.quantize(x, "int8", 4)
    assert values.tolist() == [[127, 127, -128, 0]]
