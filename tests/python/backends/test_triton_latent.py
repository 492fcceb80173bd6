# SPDX-License-Identifier: Apache-2.0
"""The GPU's attention kernels, interpreted, over latent rows (MLA)."""

from __future__ import annotations

import numpy as np
import pytest

import kvcore
from attention_oracle import assert_close, assert_lse
from kvcore import ops
from kvcore.support.dtypes import NARROW, WIDE, numpy_dtype
from latent_rows import Latent
from triton_interpreter import attend_on_host, require_interpreter

require_interpreter()

SQUARE = [(a, b, (a + b) % 3) for a in range(3) for b in range(3)]


@pytest.mark.parametrize(("rank", "rope", "heads"), [(64, 16, 3), (512, 64, 16), (59, 7, 1)])
def test_joint_and_split_latent_rows(rank: int, rope: int, heads: int) -> None:
    latent = Latent(20, 3, rank=rank, rope=rope, heads=heads)
    expected, sums = latent.expected(scale=0.07)
    joint = kvcore.PagedBatch(latent.pool, None, latent.table, latent.cached, "MLA")
    split = kvcore.PagedBatch(
        latent.pool[..., :rank], latent.pool[..., rank:].copy(), latent.table, latent.cached, "MLA"
    )
    for batch, v_dim, splits in ((joint, rank, 1), (split, None, 2), (split, 5, 1)):
        o, lse = attend_on_host(
            batch, latent.q, latent.offsets, scale=0.07, v_head_dim=v_dim, splits=splits
        )
        assert_close(o, expected[..., :v_dim], "float32")
        assert_lse(lse, sums)


def test_values_of_joint_rows_are_whole_keys_by_default() -> None:
    latent = Latent(20, 2)
    batch = kvcore.PagedBatch(latent.pool, None, latent.table, latent.cached, "MLA")
    latent.rank += 16
    o, _ = attend_on_host(batch, latent.q, latent.offsets)
    assert_close(o, latent.expected()[0], "float32")


@pytest.mark.parametrize(("narrow", "kinds", "wide"), SQUARE)
def test_quantised_latent_rows(narrow: int, kinds: int, wide: int) -> None:
    """Key ends in their own array have no scales; key ends in the same row have scales."""
    dtype, kind, q_dtype = NARROW[narrow], ("groups", "tokens", "number")[kinds], WIDE[wide]
    latent = Latent(20, 3)
    latent.q = latent.q.astype(numpy_dtype(q_dtype))
    groups: dict[str, int | str] = {"groups": 16, "number": "tensor", "tokens": 80}
    whole, scales = ops.quantize(np.nan_to_num(latent.pool), dtype, groups[kind])
    given = float(scales[0]) if kind == "number" else scales
    batch = kvcore.PagedBatch(whole, None, latent.table, latent.cached, "MLA", key_scales=given)
    spread = scales if kind == "number" else scales.repeat(80 // scales.shape[-1], axis=-1)
    at = np.arange(23)
    rows = (whole.astype(float) * spread)[latent.table[0, at // 16], at % 16]
    o, _ = attend_on_host(batch, latent.q, latent.offsets, v_head_dim=64)
    assert_close(o, latent.expected(rows)[0], q_dtype)

    ends = latent.pool[..., 64:].astype(np.float16)
    scales = scales if kind == "number" else scales[..., : max(1, scales.shape[-1] - 1)]
    given = float(scales[0]) if kind == "number" else np.ascontiguousarray(scales)
    codes = whole[..., :64]
    batch = kvcore.PagedBatch(codes, ends, latent.table, latent.cached, "MLA", key_scales=given)
    rows[:, 64:] = ends[latent.table[0, at // 16], at % 16]
    o, _ = attend_on_host(batch, latent.q, latent.offsets)
    assert_close(o, latent.expected(rows)[0], q_dtype)


@pytest.mark.parametrize("heads", [1, 128])
def test_rows_of_656_bytes(heads: int) -> None:
    latent = Latent(10, 2, rank=512, rope=64, page=3, heads=heads)
    latent.q = latent.q.astype(numpy_dtype("bfloat16"))
    rows = np.full((*latent.pool.shape[:2], 656), 0xFF, np.uint8)
    batch = kvcore.PagedBatch(rows, None, latent.table, np.zeros(1, np.uint32), "MLA_FP8")
    ops.append(batch, 0, latent.rows[:, None], None, np.array([0, 12], np.uint32))
    stored, _, _ = ops.gather(batch, 0, lengths=np.array([12], np.uint32))
    batch = kvcore.PagedBatch(rows, None, latent.table, latent.cached, "MLA_FP8")
    o, _ = attend_on_host(batch, latent.q, latent.offsets, scale=0.06)
    assert_close(o, latent.expected(stored[:, 0], scale=0.06)[0], "bfloat16")
