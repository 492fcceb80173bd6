# SPDX-License-Identifier: Apache-2.0
"""Instructions on floats and conversions of the simulation, compared with numpy and ml_dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from conftest import require
from ptx_text import Array, Runner, require_simulation, runner

ml_dtypes = require("ml_dtypes")
require_simulation()

F32 = np.dtype(np.float32)
NAN = 0x7FFFFFFF  # of every result that is not a number
SPECIAL: tuple[float, ...] = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    2.0,
    448.0,
    464.0,
    57344.0,
    61440.0,
    65504.0,
    65520.0,
    3e38,
)
SPECIAL += (float("inf"), float("-inf"), float("nan"), 1e-45, 1.17549435e-38, 6e-8, 2e-3, 1e-5)
N = 992  # whole warps


@pytest.fixture
def on() -> Iterator[Runner]:
    with runner() as found:
        yield found


def draw(seed: int) -> Array:
    """Return random bits, moderate numbers, and the limits of the formats."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 2**32, N, np.uint32).view(F32).copy()
    values[::3] = rng.normal(0, 4, len(values[::3]))
    values[1::3] = rng.choice(np.array(SPECIAL, F32), len(values[1::3]))
    return values


def canonical(function: Callable[..., Any]) -> Callable[..., Array]:
    """Compute in float32, with the NaN of GPUs."""

    def of(*operands: Array) -> Array:
        found = np.asarray(function(*operands), F32)
        return np.where(np.isnan(found), np.array(NAN, np.uint32).view(F32), found)

    return of


def fused(down: bool) -> Callable[..., float]:
    """Round the product and sum of finite numbers once, to the nearest or towards -inf."""

    def of(a: float, b: float, c: float) -> float:
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        near = F32.type(float(exact))  # a first guess; its neighbours are also tried
        around = [np.nextafter(near, F32.type(-np.inf)), near, np.nextafter(near, F32.type(np.inf))]
        finite = [x for x in around if np.isfinite(x)]
        if down:
            return float(max(x for x in finite if Fraction(float(x)) <= exact))
        even = [(abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1, x) for x in finite]
        return float(min(even, key=lambda one: one[:2])[2])

    return of


def test_arithmetic_is_that_of_ieee_754(on: Runner) -> None:
    a, b = draw(1), draw(2)
    for rounding in ("", ".rn"):
        on.check(f"add{rounding}.f32", [a, b], F32, canonical(np.add))
        on.check(f"sub{rounding}.f32", [a, b], F32, canonical(np.subtract))
        on.check(f"mul{rounding}.f32", [a, b], F32, canonical(np.multiply))
    on.check("div.rn.f32", [a, b], F32, canonical(np.divide))
    on.check("rcp.rn.f32", [a], F32, canonical(lambda a: F32.type(1) / a))
    on.check("sqrt.rn.f32", [a], F32, canonical(np.sqrt))


def test_signs_are_bits(on: Runner) -> None:
    a = draw(1).view(np.uint32)
    on.check("neg.f32", [a], np.uint32, lambda a: a ^ np.uint32(1 << 31))
    on.check("abs.f32", [a], np.uint32, lambda a: a & np.uint32((1 << 31) - 1))


@pytest.mark.parametrize(("opcode", "down"), [("fma.rn.f32", False), ("fma.rm.f32", True)])
def test_product_and_sum_are_one_rounding(on: Runner, opcode: str, down: bool) -> None:
    rng = np.random.default_rng(3)
    a, b, c = (rng.normal(0, 10.0 ** rng.integers(-3, 3), N).astype(F32) for _ in range(3))
    c[::4] = -(a[::4] * b[::4])  # the rest is the rounding error of the product
    on.check(opcode, [a, b, c], F32, np.vectorize(fused(down), otypes=[F32]))


def test_of_a_number_and_nan_the_number_is_the_extreme(on: Runner) -> None:
    a, b = draw(1), draw(2)

    def ordered(of: Callable[..., Any], zero: Callable[..., Any]) -> Callable[..., Array]:
        def pick(a: Array, b: Array) -> Array:
            signs = zero(np.signbit(a), np.signbit(b))
            return np.where((a == 0) & (b == 0), np.where(signs, F32.type(-0.0), 0), of(a, b))

        return canonical(pick)

    on.check("min.f32", [a, b], F32, ordered(np.fmin, np.logical_or))
    on.check("max.f32", [a, b], F32, ordered(np.fmax, np.logical_and))


def test_comparisons_know_nan(on: Runner) -> None:
    a, b = draw(1), draw(2)
    b[::5] = a[::5]
    orders = {"eq": np.equal, "lt": np.less, "le": np.less_equal}
    orders |= {"gt": np.greater, "ge": np.greater_equal}
    for order, function in orders.items():
        on.check(f"setp.{order}.f32", [a, b], bool, function)

        def unordered(a: Array, b: Array, known: Any = function) -> Array:
            return np.asarray(known(a, b) | np.isnan(a) | np.isnan(b))

        on.check(f"setp.{order}u.f32", [a, b], bool, unordered)
    on.check("setp.ne.f32", [a, b], bool, lambda a, b: (a < b) | (a > b))
    on.check("setp.neu.f32", [a, b], bool, np.not_equal)
    on.check("setp.num.f32", [a, b], bool, lambda a, b: ~(np.isnan(a) | np.isnan(b)))
    on.check("setp.nan.f32", [a, b], bool, lambda a, b: np.isnan(a) | np.isnan(b))


def test_powers_of_two(on: Runner) -> None:
    a = np.linspace(-150, 130, N).astype(F32)

    def power(a: Array) -> Array:
        found = np.exp2(a.astype(np.float64)).astype(F32)
        return np.where(found < np.finfo(F32).tiny, F32.type(0), found)

    on.check("ex2.approx.ftz.f32", [a], F32, power)


def test_the_range_from_0_to_1(on: Runner) -> None:
    on.check("cvt.sat.f32.f32", [draw(1)], F32, lambda a: np.nan_to_num(a).clip(0, 1) + F32.type(0))


# ---- small formats ------------------------------------------------------------------------------


def rounded(kind: Any, value: Array, *, saturates: bool = False) -> Array:
    """Return codes of a format, with the NaN of GPUs; larger numbers saturate."""
    bits = f"u{np.dtype(kind).itemsize}"
    limits = ml_dtypes.finfo(kind)
    largest = F32.type(limits.max)
    clipped = np.clip(value, -largest, largest) if saturates else value
    codes = clipped.astype(kind).view(bits)
    nan = {2: 0x7FFF, 1: 0x7F}[np.dtype(kind).itemsize]
    return np.asarray(np.where(np.isnan(value), np.array(nan, bits), codes))


@pytest.mark.parametrize(("name", "kind"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_halves(on: Runner, name: str, kind: Any) -> None:
    a, b = draw(1), draw(2)
    codes = np.arange(2**16, dtype=np.uint16)
    on.check(f"cvt.f32.{name}", [codes], F32, canonical(lambda c: c.view(kind).astype(F32)))
    on.check(f"cvt.rn.{name}.f32", [a], np.uint16, lambda a: rounded(kind, a))

    def pair(upper: Array, lower: Array) -> Array:
        high, low = (rounded(kind, one).astype(np.uint32) for one in (upper, lower))
        return high << 16 | low

    on.check(f"cvt.rn.{name}x2.f32", [a, b], np.uint32, pair)


FP8 = [("e4m3x2", ml_dtypes.float8_e4m3fn), ("e5m2x2", ml_dtypes.float8_e5m2)]


@pytest.mark.parametrize(("name", "kind"), FP8)
def test_pairs_of_bytes(on: Runner, name: str, kind: Any) -> None:
    def pair(upper: Array, lower: Array) -> Array:
        high, low = (rounded(kind, one, saturates=True) for one in (upper, lower))
        return high.astype(np.uint16) << 8 | low

    a, b = draw(1), draw(2)
    on.check(f"cvt.rn.satfinite.{name}.f32", [a, b], np.uint16, pair)
    halves = np.arange(2**16, dtype=np.uint32)[::7]
    halves = np.resize(halves | halves[::-1] << 16, N * 9)

    def of_halves(both: Array) -> Array:
        parts = both.view(np.uint16).reshape(-1, 2).view(np.float16).astype(F32)
        return pair(parts[:, 1], parts[:, 0])

    on.check(f"cvt.rn.satfinite.{name}.f16x2", [halves], np.uint16, of_halves)

    def to_halves(both: Array) -> Array:
        values = both.view(np.uint8).view(kind).astype(F32)
        return rounded(np.float16, values).view(np.uint32)

    codes = np.arange(2**16, dtype=np.uint16)
    on.check(f"cvt.rn.f16x2.{name}", [codes], np.uint32, to_halves)


# ---- arithmetic of pairs ------------------------------------------------------------------------


def of_pairs(kind: Any, function: Callable[..., Any]) -> Callable[..., Array]:
    """Compute in double precision, which holds differences and products of halves exactly."""

    def pairs(a: Array, b: Array) -> Array:
        found = function(*(x.view(kind).astype(np.float64) for x in (a, b)))
        codes = found.astype(kind).view(np.uint16)
        return np.asarray(np.where(np.isnan(found), np.uint16(0x7FFF), codes)).view(np.uint32)

    return pairs


@pytest.mark.parametrize(("name", "kind"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_pairs_of_halves(on: Runner, name: str, kind: Any) -> None:
    rng = np.random.default_rng(7)
    a, b = (rng.integers(0, 2**32, N * 9, np.uint32) for _ in range(2))
    # Equal magnitudes, NaN in both halves, and infinities next to numbers.
    a[::7] = b[::7] ^ np.uint32(0x80008000)
    a[1::7], b[2::7] = 0x7FFFFFC1, 0x7F807C00

    def larger(a: Array, b: Array) -> Array:
        zeros = np.where(np.signbit(a) & np.signbit(b), -0.0, 0.0)
        return np.where((a == 0) & (b == 0), zeros, np.fmax(a, b))

    on.check(f"max.{name}x2", [a, b], np.uint32, of_pairs(kind, larger))

    def larger_or_nan(a: Array, b: Array) -> Array:
        return np.where(np.isnan(a) | np.isnan(b), np.nan, larger(a, b))

    on.check(f"max.NaN.{name}x2", [a, b], np.uint32, of_pairs(kind, larger_or_nan))
    if name == "f16":
        on.check("sub.rn.f16x2", [a, b], np.uint32, of_pairs(kind, np.subtract))
        on.check("mul.rn.f16x2", [a, b], np.uint32, of_pairs(kind, np.multiply))


def test_integers_are_packed_to_bytes(on: Runner) -> None:
    rng = np.random.default_rng(8)
    a, b = (rng.integers(-300, 300, N).astype(np.int32) for _ in range(2))
    a[::9], b[::8] = -(2**31), 2**31 - 1
    before = rng.integers(0, 2**32, N, np.uint32)

    def packed(a: Array, b: Array, before: Array) -> Array:
        high, low = (np.clip(x, -128, 127).astype(np.uint8).astype(np.uint32) for x in (a, b))
        return before << np.uint32(16) | high << np.uint32(8) | low

    on.check("cvt.pack.sat.s8.s32.b32", [a, b, before], np.uint32, packed)


# ---- integers -----------------------------------------------------------------------------------

INTEGERS = [f"{sign}{bits}" for bits in (8, 16, 32, 64) for sign in "us"]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(f"{'i' if name[0] == 's' else 'u'}{int(name[1:]) // 8}")


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(on: Runner, name: str) -> None:
    kind = dtype_of(name)
    rng = np.random.default_rng(5)
    given = rng.integers(0, 256, N * kind.itemsize, np.uint8).view(kind)
    on.check(f"cvt.rn.f32.{name}", [given], F32, lambda a: a.astype(F32))
    for other in INTEGERS:
        on.check(f"cvt.{other}.{name}", [given], dtype_of(other), lambda a: a)
    limits = np.iinfo(kind)

    def whole(rounding: Callable[..., Any]) -> Callable[..., Array]:
        def of(a: Array) -> Array:
            ends = [min(max(int(x), limits.min), limits.max) if np.isfinite(x) else x for x in
                    rounding(a.astype(np.float64)).tolist()]  # fmt: skip
            known = {np.inf: limits.max, -np.inf: limits.min}
            return np.array([0 if x != x else known.get(x, x) for x in ends], kind)

        return of

    on.check(f"cvt.rzi.{name}.f32", [draw(1)], kind, whole(np.trunc))
    on.check(f"cvt.rni.{name}.f32", [draw(1)], kind, whole(np.rint))


def test_parts_of_registers(on: Runner) -> None:
    rng = np.random.default_rng(6)
    whole = rng.integers(0, 2**64 - 1, N, np.uint64)
    low, high = whole.astype(np.uint32), (whole >> np.uint64(32)).astype(np.uint32)
    on.check("mov.b32", [low.view(F32)], np.uint32, lambda a: a.view(np.uint32))
    on.check("mov.b64", [whole], np.uint64, lambda a: a)
    both = on.compute("{ .reg .b32 %l; }\nmov.b64 {%l, %h}, %v_x0;\nmov.b64 %d, {%h, %l};\n"
                      "mov.u64 %e,", [whole], np.uint64)  # fmt: skip
    assert (both == (low.astype(np.uint64) << np.uint64(32) | high)).all()
