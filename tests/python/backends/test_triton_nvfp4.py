# SPDX-License-Identifier: Apache-2.0
"""The GPU's attention kernels over pools in nvfp4, interpreted, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import triton_interpreter
from attention_oracle import assert_close, assert_lse
from attention_scenes import rules
from kvcore.support.dtypes import WIDE, numpy_dtype
from nvfp4_scenes import Nvfp4Scene, nvfp4_scenes
from triton_interpreter import attend_on_host, require_interpreter

require_interpreter()


def check(scene: Nvfp4Scene, splits: int = 1, **rule: Any) -> None:
    expected, sums = scene.expected(**rule)
    scene.leave_behind(rule.get("window"), rule.get("chunk"))
    o, lse = attend_on_host(scene.batch, scene.q, scene.offsets, splits=splits, **rule)
    assert_close(o, expected, scene.q_dtype)
    assert_lse(lse, sums)


@pytest.mark.parametrize("q_dtype", WIDE)
@pytest.mark.parametrize(("dim", "v_dim"), [(16, 16), (64, 48), (80, 128), (128, 128)])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_heads_of_any_blocks(q_dtype: str, dim: int, v_dim: int, layout: str) -> None:
    scene = Nvfp4Scene(
        cached=[37, 0, 2, 4],
        new=[1, 0, 2, 5],
        page=3,
        heads=1,
        dim=dim,
        v_dim=v_dim,
        q_dtype=q_dtype,
        layout=layout,
    )
    check(scene, splits=2)


@settings(max_examples=settings().max_examples // 3)  # a case takes long
@given(nvfp4_scenes(pages=(3, 16)), rules())
def test_any_batch_agrees_with_the_oracle(scene: Nvfp4Scene, rule: dict[str, Any]) -> None:
    check(scene, **rule)


@pytest.mark.parametrize("q_dtype", WIDE)
def test_every_code_and_scale_is_read(q_dtype: str) -> None:
    """One token has all the weight, so the output is its value."""
    finite = [code for code in range(127) if code]  # scales above zero that are numbers
    for part in range(0, len(finite), 32):
        scene = Nvfp4Scene(
            cached=[0], new=[1], page=1, heads=1, dim=512, q_dtype=q_dtype, global_scales=(1.0, 1.0)
        )
        page = int(scene.table[0, 0])
        codes = np.arange(16, dtype=np.uint8)
        scales = np.resize(np.array(finite[part : part + 32], np.uint8), 32)
        scene.batch.value_pool[page, 0, 0] = np.tile(codes[0::2] | codes[1::2] << 4, 32)
        scene.batch.value_scales.view(np.uint8)[page, 0, 0] = scales
        o, _ = attend_on_host(scene.batch, scene.q, scene.offsets)
        import ml_dtypes

        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        spread = scales.view(numpy_dtype("float8_e4m3fn")).astype(np.float32)
        expected = (spread[:, None] * values).reshape(-1).astype(numpy_dtype(q_dtype))
        assert np.array_equal(o[0, 0], expected)


def test_a_global_scale_may_be_where_the_pools_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales in GPU arrays are passed on, and the kernel reads them."""
    scales = np.array([0.75], np.float32), np.array([0.02], np.float32)
    scene = Nvfp4Scene(cached=[30], new=[2], page=3, global_scales=scales)
    monkeypatch.setattr(triton_interpreter, "global_scales_of", lambda *_: scales)
    check(scene)
    check(scene, splits=2)


def test_rows_that_share_pages_are_stacked() -> None:
    scene = Nvfp4Scene(cached=[70, 65, 40], new=[1, 2, 1], shared=[((0, 1), 4)], dim=48, group=2)
    expected, sums = scene.expected()
    o, lse = attend_on_host(scene.batch, scene.q, scene.offsets, shared=scene.groups())
    assert_close(o, expected, "float32")
    assert_lse(lse, sums)


def test_what_does_not_fit_is_refused() -> None:
    scene = Nvfp4Scene(cached=[20], new=[1], dim=32)
    with pytest.raises(ValueError, match="a head_dim of 16, keys have 32"):
        attend_on_host(scene.batch, scene.q[..., :16], scene.offsets)
    with pytest.raises(ValueError, match="a multiple of 16"):
        attend_on_host(scene.batch, scene.q, scene.offsets, v_head_dim=8)
