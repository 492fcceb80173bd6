# SPDX-License-Identifier: Apache-2.0
"""NVFP4 on a GPU: the host's bytes for all elements, codes and scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_arrays
from gpu_arrays import Put, check_both
from kvcore import ops
from kvcore.support.dtypes import WIDE, numpy_dtype
from nvfp4_oracle import drawn, specials
from nvfp4_pools import NEW, Pools
from random_arrays import random_bytes

gpu_arrays.require_gpu()
pytestmark = pytest.mark.gpu

GLOBALS = (1.0, 0.37, 1e-30, 1e-44, 5e37, 3.4e38)
OFFSETS = np.cumsum([0, *NEW]).astype(np.uint32)


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("global_scale", GLOBALS)
@pytest.mark.parametrize(
    "shape", [pytest.param((77, 3, 128), marks=pytest.mark.reduced), (5, 2, 48), (1, 4096)]
)
def test_quantising_and_back_have_the_host_s_bytes(
    shape: tuple[int, ...], global_scale: float, wide: str
) -> None:
    """The inputs are random bits, drawn blocks and special values."""

    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        found = []
        with np.errstate(over="ignore"):
            ends = specials().astype(numpy_dtype(wide))
        for x in (random_bytes(rng, shape, numpy_dtype(wide)), drawn(shape, wide), ends):
            codes, scales = ops.quantize(put(x), "nvfp4", 16, global_scale=global_scale)
            found += [codes, scales]
            found += [
                ops.dequantize(codes, scales, back, global_scale=global_scale) for back in WIDE
            ]
        return found

    check_both(work)


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("global_scale", GLOBALS)
@pytest.mark.reduced
def test_every_code_and_scale_is_read_as_by_the_host(wide: str, global_scale: float) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        codes = rng.integers(0, 256, (256, 8), np.uint8)
        codes[:16] = np.arange(128).reshape(16, 8) * 2 + 1
        scales = np.arange(256, dtype=np.uint8).view(numpy_dtype("float8_e4m3fn"))[:, None]
        return [ops.dequantize(put(codes), put(scales), wide, global_scale=global_scale)]

    check_both(work)


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dims", [(128, 128), (48, 112)])
@pytest.mark.reduced
def test_pools_have_the_host_s_bytes(wide: str, layout: str, dims: tuple[int, int]) -> None:
    def work(put: Put, rng: np.random.Generator) -> list[Any]:
        pools = Pools(dims=dims, heads=3, layout=layout)
        scale = put(np.array([0.01], np.float32))
        pools.global_scales = (0.5, scale)
        batch = pools.batch(lambda array: put(np.ascontiguousarray(array)))
        k, v = (put(tokens) for tokens in pools.tokens(9, wide))
        ops.append(batch, 0, k[:6], v[:6], OFFSETS)
        slots = np.array([4, -1, 20, 7, 21, 1000, 0])
        bad = ops.append_slots(batch, 0, k, v, put(slots))
        found = ops.gather(batch, 0, lengths=np.array([6, 0, 4], np.uint32), dtype=wide)
        arrays = [batch.key_pool, batch.value_pool, batch.key_scales, batch.value_scales]
        assert int(bad if isinstance(bad, int) else bad[0]) == 2
        return [*arrays, *found[:2]]

    check_both(work)
