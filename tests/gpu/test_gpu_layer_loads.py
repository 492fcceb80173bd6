# SPDX-License-Identifier: Apache-2.0
"""Loads of pages from the host tier, layer by layer, on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_arrays
from gpu_arrays import on_gpu, to_host
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext, TierOptions, ops

cupy = gpu_arrays.require_gpu()
pytestmark = pytest.mark.gpu

LAYERS, TOKENS, PAGE, HEADS, DIM = 8, 1025, 16, 8, 128


def fetched(manager: PagedKVCacheManager, prompt: int, visit: int) -> tuple[Any, Any]:
    context = TextGenerationContext((prompt, visit), [prompt] * TOKENS)
    manager.claim(context.request_id)
    (inputs,) = manager.fetch([context])
    return inputs, context


def finish(manager: PagedKVCacheManager, context: TextGenerationContext) -> None:
    context.update(7)
    manager.step([context])
    manager.release(context.request_id)


def append(inputs: Any, context: TextGenerationContext) -> None:
    n = context.active_idx - context.start_idx
    for layer in range(LAYERS):
        k = cupy.full((n, HEADS, DIM), 100 * layer + int(context.tokens[0]), np.float32)
        ops.append(inputs, layer, k, k, on_gpu(np.array([0, n], np.uint32)))


@pytest.mark.parametrize("by_layer", [False, True])
def test_each_layer_is_there_when_it_is_read(by_layer: bool) -> None:
    """The pool holds one prompt, the host tier all; every visit but the first loads its pages."""
    params = KVCacheParams(
        "float32", HEADS, DIM, num_layers=LAYERS, page_size=PAGE, enable_prefix_caching=True
    )
    manager = PagedKVCacheManager(
        params, 4, 2 * TOKENS, devices=["cuda:0"], num_pages=TOKENS // PAGE + 3,
        tiers=TierOptions([f"host:{400 * params.bytes_per_page}B"], layerwise_loads=by_layer),
        enable_runtime_checks=True,
    )  # fmt: skip
    loaded = 0
    with cupy.cuda.Stream(non_blocking=True):
        for visit in range(4):
            for prompt in (1, 2, 3):
                inputs, context = fetched(manager, prompt, visit)
                loaded += visit > 0 and context.start_idx >= TOKENS - PAGE
                append(inputs, context)
                out = tuple(cupy.zeros((TOKENS, HEADS, DIM), np.float32) for _ in "kv")
                for layer in range(LAYERS):
                    ops.gather(inputs, layer, lengths=np.array([TOKENS], np.uint32), out=out)
                    expected = np.float32(100 * layer + prompt)
                    assert all(bool((part == expected).all()) for part in out)
                finish(manager, context)
        assert loaded == 9
        to_host(out[0])
