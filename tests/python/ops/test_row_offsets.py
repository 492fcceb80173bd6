# SPDX-License-Identifier: Apache-2.0
"""Every function with row offsets accepts integers of any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from conftest import require
from kvcore import PagedBatch, ops

WANTED = np.array([0, 2, 3], np.uint32)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def batch() -> PagedBatch:
    keys, values = (np.zeros((4, 4, 1, 8), np.float32) for _ in "kv")
    return PagedBatch(
        keys, values, np.array([[0, 1], [2, 3]], np.uint32), np.array([1, 4], np.uint32)
    )


def rows() -> Any:
    return np.random.default_rng(1).normal(size=(3, 1, 8)).astype(np.float32)


def append(offsets: Any) -> Any:
    made = batch()
    ops.append(made, 0, rows(), rows(), offsets)
    return made.key_pool


def scatter(offsets: Any) -> Any:
    made = batch()
    ops.scatter(made, 0, rows(), rows(), offsets)
    return made.key_pool


def attention(offsets: Any) -> Any:
    return ops.attention(batch(), 0, rows(), offsets)


def cascade_attention(offsets: Any) -> Any:
    return ops.cascade_attention(batch(), 0, rows(), offsets, [])


def build_slots(offsets: Any) -> Any:
    return ops.build_slots(batch(), offsets)


def advance_lengths(offsets: Any) -> Any:
    return ops.advance_lengths(np.array([1, 4], np.uint32), offsets)


VERBS = (append, scatter, attention, cascade_attention, build_slots, advance_lengths)


def given(kind: str) -> Any:
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](WANTED.tolist())
    if kind.startswith("torch."):
        torch = require("torch")
        return torch.tensor(WANTED.tolist(), dtype=getattr(torch, kind[6:]))
    if kind == "swapped":
        return WANTED.astype(WANTED.dtype.newbyteorder())
    if kind == "strided":
        return np.repeat(WANTED.astype(np.int64), 2)[::2]
    return WANTED.astype(kind)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "kind", [*INTEGERS, "list", "tuple", "swapped", "strided", "torch.int32", "torch.int64"]
)
def test_any_integers_mean_what_uint32_does(verb: Callable[[Any], Any], kind: str) -> None:
    assert np.array_equal(verb(given(kind)), verb(WANTED))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("offsets", "error", "text"),
    [
        ([0, 2, -1], ValueError, "row_offsets holds -1, must be 0 .. 4294967295"),
        ([0, 2, 2**32], ValueError, "row_offsets holds 4294967296"),
        ([0, 2, 2**80], ValueError, "row_offsets holds 12089258"),
        (np.array([0, 2, -1], np.int32), ValueError, "row_offsets holds -1"),
        (np.array([0, 2, 3], bool), TypeError, "row_offsets has dtype bool, must be integers"),
        ([0, 2, 3.0], TypeError, "row_offsets has dtype float64, must be integers"),
        ([0, 2, "3"], TypeError, "row_offsets has dtype"),
        ([], ValueError, "0 entries"),
        ([[0, 2, 3]], ValueError, "row_offsets"),
        (5, TypeError, "row_offsets is a int"),
        (None, TypeError, "row_offsets is a NoneType"),
    ],
)
def test_others_are_refused(
    verb: Callable[[Any], Any], offsets: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        verb(offsets)
