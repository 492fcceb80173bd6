# SPDX-License-Identifier: Apache-2.0
"""Devices of models, and the errors for models elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conftest import require

torch = require("torch")
require("transformers")

import hf_models  # noqa: E402
from kvcore import Device, KVCacheError, PagedKVCacheManager, TextGenerationContext  # noqa: E402
from kvcore.backends.cuda import availability  # noqa: E402
from kvcore.integrations.transformers import (  # noqa: E402
    KVCoreCache,
    PackedBatch,
    cache,
    cache_params,
    devices,
    generate,
    paged_attention,
)


@pytest.fixture
def model() -> Any:
    return hf_models.build("llama")


@pytest.mark.parametrize("call", [cache_params, lambda model: generate(model, [[1, 2]])])
def test_a_model_on_several_devices_is_refused(model: Any, call: Any) -> None:
    model.model.layers[1].to("meta")
    with pytest.raises(ValueError, match=r"weights are on several devices \(cpu, meta\), its K an"):
        call(model)


def test_a_model_where_no_kernel_runs_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="it is on meta, kvcore's attention runs on the CPU and"):
        generate(model.to("meta"), [[1, 2]])
    keys = torch.zeros((1, 2, 3, 16), device="meta")
    with pytest.raises(TypeError, match="K is on meta and V on meta, must both be in host memory"):
        KVCoreCache(model.config).update(keys, keys, 0)


@pytest.mark.skipif(availability.why_unavailable() == "", reason="there is a GPU")
def test_a_model_on_a_gpu_is_told_what_is_missing(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a model on a GPU, because this torch may have no GPU."""
    monkeypatch.setattr(devices, "device_of", lambda _: Device("cuda", 0))
    with pytest.raises(KVCacheError, match=r"^CUDA unavailable: "):
        generate(model, [[1, 2]])


@pytest.mark.parametrize(
    ("where", "device"),
    [("cpu", "cpu"), ("cuda:3", "cuda:3"), ("cuda", "cuda:0"), ("mps", None), ("meta", None)],
)
def test_devices_of_torch(where: str, device: str | None) -> None:
    found = devices.device_of(torch.device(where))
    assert found == (None if device is None else Device.parse(device))


def test_a_pool_says_where_it_is() -> None:
    pool = np.zeros((2, 1, 1, 1, 1, 1), np.float32)
    for blocks in (None, pool, (pool, pool)):
        assert devices.tensors_on(devices.pool_device(blocks)).device == Device("cpu")


def test_layers_of_a_cache_are_on_one_device(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    held = KVCoreCache(model.config, page_size=4, num_pages=8)
    keys = torch.zeros((1, 2, 3, 16))
    held.update(keys, keys, 0)
    monkeypatch.setattr(cache, "device_of", lambda _: Device("cuda", 0))
    with pytest.raises(ValueError, match="K and V are on cuda:0, the pool is on cpu: all layers"):
        held.update(keys, keys, 1)
    monkeypatch.undo()
    held.update(keys, keys, 1)


def test_calls_name_torch_s_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def current(where: Any) -> Any:
        return SimpleNamespace(cuda_stream=100 + where.index)

    monkeypatch.setattr(torch.cuda, "current_stream", current)
    assert devices.GpuTensors(2).options(threads=3) == {"stream": 102}
    assert devices.tensors_on(Device("cpu")).options(threads=3) == {"threads": 3}


def test_a_batch_made_in_inference_mode_runs_outside() -> None:
    """Also if it writes states."""
    model = hf_models.model_of("lfm2")
    manager = PagedKVCacheManager(cache_params(model, 4), 2, 64, num_pages=20)
    context = TextGenerationContext("a", [1, 2, 3])
    manager.claim("a")
    with torch.inference_mode():
        packed = PackedBatch(manager.fetch([context])[0], [context], manager=manager)
    with paged_attention(model), torch.no_grad():
        logits = model(**packed.model_inputs()).logits[0]
        expected = model(torch.tensor([[1, 2, 3]]), use_cache=False).logits[0, -1:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
