# SPDX-License-Identifier: Apache-2.0
"""The formula of attention, evaluated in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Absolute and relative tolerance, by the dtype of q.
TOLERANCES = {"float32": (1e-5, 1e-5), "float16": (1e-3, 1e-3), "bfloat16": (1e-2, 8e-3)}


def attend_row(
    q: Floats,
    keys: Floats,
    values: Floats,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Attend with the last len(q) tokens of a sequence; return (o, lse).

    Keys and values are [tokens, heads, dim].
    """
    new, q_heads, dim = q.shape
    length, heads, _ = keys.shape
    at, seen = np.arange(length - new, length)[:, None], np.arange(length)[None]
    hidden = np.zeros((new, length), bool)
    if causal:
        hidden |= seen > at
    if window is not None:
        hidden |= seen <= at - window
    if chunk is not None:
        hidden |= seen // chunk != at // chunk
    o, lse = np.zeros((new, q_heads, values.shape[2])), np.zeros((new, q_heads))
    for h in range(q_heads):
        kv = h // (q_heads // heads)
        scores = q[:, h] @ keys[:, kv].T * (dim**-0.5 if scale is None else scale)
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        scores[hidden] = -np.inf
        sink = np.full((new, 1), -np.inf if sinks is None else sinks[h])
        most = np.concatenate([scores, sink], axis=1).max(axis=1, keepdims=True)
        weights, rest = np.exp(scores - most), np.exp(sink - most)
        total = weights.sum(axis=1, keepdims=True) + rest
        o[:, h] = weights / total @ values[:, kv]
        lse[:, h] = (most + np.log(total))[:, 0]
    return o, lse


def attend(
    q: Any, keys: Sequence[Floats], values: Sequence[Floats], offsets: Any, **rule: Any
) -> tuple[Floats, Floats]:
    """Attend with the new tokens of each row, which are the last of its keys and values.

    The rows follow each other in q, as `offsets` says.
    """
    wide = q.astype(np.float64)
    cuts = [wide[a:b] for a, b in itertools.pairwise(offsets)]
    rows = [attend_row(*row, **rule) for row in zip(cuts, keys, values, strict=True) if len(row[0])]
    if not rows:
        return np.zeros((0, *q.shape[1:])), np.zeros((0, q.shape[1]))
    o, lse = zip(*rows, strict=True)
    return np.concatenate(o), np.concatenate(lse)


def merge(o_a: Floats, lse_a: Floats, o_b: Floats, lse_b: Floats) -> tuple[Floats, Floats]:
    """Merge two attention states over different keys; neither is empty."""
    lse = np.logaddexp(lse_a, lse_b)
    return o_a * np.exp(lse_a - lse)[..., None] + o_b * np.exp(lse_b - lse)[..., None], lse


def assert_close(found: Any, expected: Floats, dtype: str) -> None:
    """Check that a result is within the tolerances of `dtype`."""
    atol, rtol = TOLERANCES[dtype]
    assert found.dtype.name == dtype
    if not expected.size and not found.size:
        return  # a result of no tokens
    np.testing.assert_allclose(found.astype(np.float64), expected, atol=atol, rtol=rtol)


def assert_lse(found: Any, expected: Floats) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-3, rtol=1e-5)
