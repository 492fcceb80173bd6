# SPDX-License-Identifier: Apache-2.0
"""Attention over pools in nvfp4 on the CPU, against the oracle on the dequantised values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_oracle import assert_close, assert_lse
from attention_scenes import rules
from kvcore import ops
from nvfp4_scenes import Nvfp4Scene, nvfp4_scenes


@given(nvfp4_scenes(), rules(), st.integers(1, 4))
def test_any_batch_agrees_with_the_oracle(
    scene: Nvfp4Scene, rule: dict[str, Any], threads: int
) -> None:
    expected, sums = scene.expected(**rule)
    scene.leave_behind(rule.get("window"), rule.get("chunk"))
    before = scene.pool_bytes()
    o, lse = ops.attention(
        scene.batch, 0, scene.q, scene.offsets, return_lse=True, threads=threads, **rule
    )
    assert_close(o, expected, scene.q_dtype)
    assert_lse(lse, sums)
    assert scene.pool_bytes() == before


def test_values_may_be_fewer_blocks() -> None:
    scene = Nvfp4Scene(cached=[40, 3], new=[1, 7], dim=64)
    o = ops.attention(scene.batch, 0, scene.q, scene.offsets, v_head_dim=32)
    assert_close(o, scene.expected(v_dim=32)[0], "float32")
    with pytest.raises(ValueError, match="a multiple of 16"):
        ops.attention(scene.batch, 0, scene.q, scene.offsets, v_head_dim=24)


def test_rows_that_share_pages_are_attended_together() -> None:
    scene = Nvfp4Scene(cached=[70, 65, 40], new=[1, 2, 1], shared=[((0, 1), 4)], dim=48)
    o = ops.cascade_attention(scene.batch, 0, scene.q, scene.offsets, scene.groups())
    assert_close(o, scene.expected()[0], "float32")


def test_a_global_scale_that_changes_is_read_by_the_next_call() -> None:
    scale = np.array([0.02], np.float32)
    scene = Nvfp4Scene(cached=[20], new=[1], global_scales=(1.0, scale))
    first = ops.attention(scene.batch, 0, scene.q, scene.offsets)
    assert_close(first, scene.expected()[0], "float32")
    scale[0] = 0.04
    second = ops.attention(scene.batch, 0, scene.q, scene.offsets)
    np.testing.assert_allclose(second, 2 * first, rtol=1e-6)
    scale[0] = -1
    with pytest.raises(ValueError, match=r"global_scales\[1\] is -1"):
        ops.attention(scene.batch, 0, scene.q, scene.offsets)


def test_queries_that_do_not_fit_are_refused() -> None:
    scene = Nvfp4Scene(cached=[20], new=[1], dim=32)
    with pytest.raises(ValueError, match="head_dim of 16, keys have 32"):
        ops.attention(scene.batch, 0, scene.q[..., :16], scene.offsets)


def test_scratch_counts_elements_of_values() -> None:
    scene = Nvfp4Scene(cached=[20], new=[1], dim=32, v_dim=64)
    tokens, heads = scene.q.shape[:2]
    assert ops.attention_scratch(scene.batch, scene.q, 4) == 4 * tokens * heads * 65
