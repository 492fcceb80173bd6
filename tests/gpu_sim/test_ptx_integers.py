# SPDX-License-Identifier: Apache-2.0
"""Integer instructions of the simulation, compared with numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ptx_text import Array, Runner, require_simulation, runner

require_simulation()

INTEGERS = {f"{'us'[s]}{8 * w}": np.dtype(f"{'ui'[s]}{w}") for w in (2, 4, 8) for s in (0, 1)}
EDGES = (0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 32767, 32768, 65535, 65536)
BITS = ("b16", "b32", "b64")
N = 992  # whole warps


@pytest.fixture
def on() -> Iterator[Runner]:
    with runner() as found:
        yield found


def draw(kind: Any, seed: int) -> Array:
    """Return limits of the type, and random bits."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(kind)
    raw: Array = rng.integers(0, 256, N * kind.itemsize, np.uint8).view(kind).copy()
    info = np.iinfo(kind)
    edges = [e for e in (*EDGES, -1, -2, info.min, info.max) if info.min <= e <= info.max]
    raw[::3] = rng.choice(np.array(edges, kind), len(raw[::3]))
    return raw


def exact(function: Callable[..., int]) -> Callable[..., Array]:
    """Compute in Python's integers, and keep the low 64 bits."""

    def of(*operands: Array) -> Array:
        rows = zip(*(o.tolist() for o in operands), strict=True)
        return np.array([function(*row) & (2**64 - 1) for row in rows], np.uint64)

    return of


def shifted(width: int, function: Callable[[int, int], int]) -> Callable[..., Array]:
    return exact(lambda a, by: function(a, min(by, width)))


def quotient(a: int, b: int) -> int:
    whole = abs(a) // abs(b)
    return whole if (a < 0) == (b < 0) else -whole


@pytest.mark.parametrize("name", INTEGERS)
def test_arithmetic_wraps_as_the_types_do(on: Runner, name: str) -> None:
    kind = INTEGERS[name]
    a, b, c = (draw(kind, seed) for seed in (1, 2, 3))
    on.check(f"add.{name}", [a, b], kind, lambda a, b: a + b)
    on.check(f"sub.{name}", [a, b], kind, lambda a, b: a - b)
    on.check(f"mul.lo.{name}", [a, b], kind, lambda a, b: a * b)
    on.check(f"mad.lo.{name}", [a, b, c], kind, lambda a, b, c: a * b + c)
    on.check(f"min.{name}", [a, b], kind, np.minimum)
    on.check(f"max.{name}", [a, b], kind, np.maximum)
    high = exact(lambda a, b: a * b >> 8 * kind.itemsize)
    on.check(f"mul.hi.{name}", [a, b], kind, high)
    divisor = np.where(b == 0, np.array(1, kind), b)
    on.check(f"div.{name}", [a, divisor], kind, exact(quotient))
    on.check(f"rem.{name}", [a, divisor], kind, exact(lambda a, b: a - b * quotient(a, b)))
    if kind.kind == "i":
        on.check(f"neg.{name}", [a], kind, lambda a: -a)
        on.check(f"abs.{name}", [a], kind, np.abs)


@pytest.mark.parametrize("name", INTEGERS)
def test_comparisons_know_signs(on: Runner, name: str) -> None:
    a, b = draw(INTEGERS[name], 1), draw(INTEGERS[name], 2)
    b[::5] = a[::5]
    orders = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal"}
    orders |= {"gt": "greater", "ge": "greater_equal"}
    for order, function in orders.items():
        on.check(f"setp.{order}.{name}", [a, b], bool, getattr(np, function))


@pytest.mark.parametrize("name", ["u16", "s16", "u32", "s32"])
def test_wide_products_are_exact(on: Runner, name: str) -> None:
    kind = INTEGERS[name]
    wide = np.dtype(f"{kind.kind}{2 * kind.itemsize}")
    a, b, c = draw(kind, 1), draw(kind, 2), draw(wide, 3)
    on.check(f"mul.wide.{name}", [a, b], wide, exact(lambda a, b: a * b))
    on.check(f"mad.wide.{name}", [a, b, c], wide, exact(lambda a, b, c: a * b + c))


@pytest.mark.parametrize("name", BITS)
def test_bits(on: Runner, name: str) -> None:
    kind = np.dtype(f"u{int(name[1:]) // 8}")
    a, b = draw(kind, 1), draw(kind, 2)
    on.check(f"and.{name}", [a, b], kind, np.bitwise_and)
    on.check(f"or.{name}", [a, b], kind, np.bitwise_or)
    on.check(f"xor.{name}", [a, b], kind, np.bitwise_xor)
    on.check(f"not.{name}", [a], kind, np.invert)
    on.check(f"mov.{name.replace('b', 'u')}", [a], kind, lambda a: a)
    chosen = draw(np.uint8, 3) % 2 == 0
    on.check(f"selp.{name}", [a, b, chosen], kind, lambda a, b, c: np.where(c, a, b))
    on.check(f"setp.eq.{name}", [a, b], bool, np.equal)
    width = 8 * kind.itemsize
    by = draw(np.uint32, 4)
    on.check(f"shl.{name}", [a, by], kind, shifted(width, lambda a, n: a << n))
    on.check(f"shr.{name}", [a, by], kind, shifted(width, lambda a, n: a >> n))
    signed = a.view(f"i{kind.itemsize}")
    on.check(f"shr.s{width}", [signed, by], signed.dtype, shifted(width, lambda a, n: a >> n))


def test_predicates(on: Runner) -> None:
    a, b = (draw(np.uint8, seed) % 2 == 0 for seed in (1, 2))
    on.check("and.pred", [a, b], bool, np.logical_and)
    on.check("or.pred", [a, b], bool, np.logical_or)
    on.check("xor.pred", [a, b], bool, np.logical_xor)
    on.check("not.pred", [a], bool, np.logical_not)
    on.check("mov.pred", [a], bool, lambda a: a)


def permuted(a: int, b: int, choice: int) -> int:
    both = (a | b << 32).to_bytes(8, "little")
    picked = [both[choice >> 4 * i & 7] for i in range(4)]
    signs = [choice >> 4 * i & 8 for i in range(4)]
    each = [(255 if p & 128 else 0) if s else p for p, s in zip(picked, signs, strict=True)]
    return int.from_bytes(bytes(each), "little")


@pytest.mark.parametrize("width", [32, 64])
def test_fields(on: Runner, width: int) -> None:
    kind = np.dtype(f"u{width // 8}")
    a, b = draw(kind, 1), draw(kind, 2)
    at, length = draw(np.uint32, 3) % (width + 8), draw(np.uint32, 4) % (width + 8)
    ones = 2**width - 1

    def inserted(field: int, into: int, at: int, length: int) -> int:
        mask: int = ((1 << length) - 1) << at & ones
        return into & ~mask | field << at & mask

    def extracted(of: int, at: int, length: int) -> int:
        return of >> at & (1 << length) - 1

    on.check(f"bfi.b{width}", [a, b, at, length], kind, exact(inserted))
    on.check(f"bfe.u{width}", [a, at, length], kind, exact(extracted))
    on.check(f"popc.b{width}", [a], np.uint32, exact(lambda a: a.bit_count()))
    on.check(f"clz.b{width}", [a], np.uint32, exact(lambda a: width - a.bit_length()))
    if width == 32:
        on.check("prmt.b32", [a, b, draw(np.uint32, 5)], kind, exact(permuted))

        def funnelled(low: int, high: int, bits: int) -> int:
            return ((high << 32 | low) << (bits & 31) >> 32) & 0xFFFFFFFF

        on.check("shf.l.wrap.b32", [a, b, draw(np.uint32, 6)], kind, exact(funnelled))


def test_signed_fields_end_in_their_sign(on: Runner) -> None:
    a = draw(np.int32, 1)
    at, length = draw(np.uint32, 3) % 32, draw(np.uint32, 4) % 33

    def extracted(of: int, at: int, length: int) -> int:
        part = (of >> at) & (1 << length) - 1
        return part - (1 << length) if length and part >> length - 1 else part

    on.check("bfe.s32", [a, at, length], np.int32, exact(extracted))
