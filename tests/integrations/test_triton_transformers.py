# SPDX-License-Identifier: Apache-2.0
"""Models on an emulated GPU generate the same through pages as without kvcore."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import require
from cuda_machine import Machine, require_emulation
from triton_interpreter import require_interpreter

torch = require("torch")
require("transformers")
require_interpreter()
require_emulation()

import hf_models  # noqa: E402
from emulated_tensors import INDEX, counted_as_gpu  # noqa: E402
from kvcore import (  # noqa: E402
    CapacityError,
    KVCacheError,
    PagedKVCacheManager,
    ops,
)
from kvcore.backends.cuda import availability  # noqa: E402
from kvcore.backends.cuda.place import DevicePlace  # noqa: E402
from kvcore.integrations.transformers import KVCoreCache, cache_params, generate  # noqa: E402
from kvcore.integrations.transformers.names import CACHE  # noqa: E402
from paged_logits import paged_logits  # noqa: E402

torch.set_num_threads(1)

NEW = 4
DEVICE = f"cuda:{INDEX}"


@pytest.fixture
def tensors(machine: Machine) -> Iterator[Any]:
    with counted_as_gpu(machine) as kind:
        yield kind


def prompts() -> list[list[int]]:
    """Return prompts of 1, 19 and 23 tokens; two share a prefix."""
    first, _, _, _, _, second, third = hf_models.prompts_of(shared=14, longest=23)
    return [first, second, third]


def manager_of(model: Any, device: str = DEVICE, **overrides: Any) -> PagedKVCacheManager:
    return PagedKVCacheManager(
        cache_params(model, 4, **overrides),
        max_batch_size=4,
        max_seq_len=64,
        devices=[device],
        num_pages=60,
        enable_runtime_checks=True,
    )


def check_cold_and_cached(model: Any, manager: Any) -> None:
    """Run prompts in chunks of 9 tokens, then again with prefix hits."""
    expected = hf_models.plain(model, prompts(), NEW)
    for _ in range(2):
        found = generate(model, prompts(), manager=manager, max_new_tokens=NEW, max_batch_tokens=9)
        assert [each.token_ids for each in found] == expected
    assert manager.metrics.cache_tokens > 0
    assert manager.num_free_blocks == manager.total_num_pages


FAMILIES = [
    *("llama", "mistral", "gemma2", "gpt-oss", "deepseek-v3", "llama4-chunks", "gemma4-shared"),
    *("qwen3-next", "jamba", "lfm2"),
]


@pytest.mark.usefixtures("tensors")
@pytest.mark.parametrize("family", FAMILIES)
def test_family_generates_the_same(family: str) -> None:
    model = hf_models.model_of(family)
    check_cold_and_cached(model, manager_of(model))


def logits_of(model: Any, manager: Any) -> Any:
    return torch.cat(paged_logits(model, manager, prompts(), [5]))


@pytest.mark.parametrize("family", ["gemma2", "deepseek-v2"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_narrow_pools_answer_what_they_do_on_the_cpu(
    machine: Machine, family: str, dtype: str
) -> None:
    model = hf_models.model_of(family)
    narrow: dict[str, Any] = {"dtype": dtype, "kv_scale_granularity": 8}
    expected = logits_of(model, manager_of(model, device="cpu", **narrow))
    plain = logits_of(model, manager_of(model, device="cpu"))
    with counted_as_gpu(machine):
        found = logits_of(model, manager_of(model, **narrow))
    assert (found - expected).abs().mean() < 0.1 * (plain - expected).abs().mean()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bfloat16_answers_what_it_does_on_the_cpu(machine: Machine, family: str) -> None:
    model = hf_models.build(family).to(torch.bfloat16)
    expected = logits_of(model, manager_of(model, device="cpu"))
    with counted_as_gpu(machine):
        found = logits_of(model, manager_of(model))
    assert found.dtype == torch.bfloat16
    assert (found - expected).float().abs().mean() < 0.03 * expected.float().std()


# -- order and waits -------------------------------------------------------------------------------
def test_layers_run_on_torch_s_stream_and_read_nothing_back(
    machine: Machine, tensors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the manager's work: cupy's stream is the same stream."""
    model = hf_models.model_of("gemma2")
    manager = manager_of(model)
    stream = machine.kernels.Stream(INDEX)
    tensors.stream = machine.streams[INDEX] = stream.ptr
    places: list[tuple[str, int]] = []
    for name in ("append", "attention"):
        verb = getattr(ops, name)

        def noted(*args: Any, name: str = name, verb: Any = verb, **rest: Any) -> Any:
            places.append((name, rest["stream"]))
            return verb(*args, **rest)

        monkeypatch.setattr(ops, name, noted)
    monkeypatch.setattr(DevicePlace, "to_host", None)
    machine.cupy.num_allocated = 0
    expected = hf_models.plain(model, prompts(), NEW)
    found = generate(model, prompts(), manager=manager, max_new_tokens=NEW)
    assert [each.token_ids for each in found] == expected
    assert len(places) >= NEW * 4 * 2
    assert set(places) == {("append", stream.ptr), ("attention", stream.ptr)}


def test_streams_of_cupy_and_torch_that_differ_are_refused(machine: Machine, tensors: Any) -> None:
    model = hf_models.model_of("llama")
    manager = manager_of(model)
    theirs, mine = (machine.kernels.Stream(INDEX) for _ in range(2))
    machine.streams[INDEX] = theirs.ptr
    for handle in (0, mine.ptr):
        tensors.stream = handle
        with pytest.raises(ValueError, match=f"cupy's current stream of {DEVICE} is 0x"):
            generate(model, [[1, 2]], manager=manager)
        assert manager.num_free_blocks == manager.total_num_pages
    cache = KVCoreCache(model.config, page_size=4, num_pages=8)
    with pytest.raises(ValueError, match="make one of them current in both"):
        model.generate(torch.tensor([[1, 2]]), **{CACHE: cache}, max_new_tokens=2)
    assert "0 requests" in repr(cache.manager)


# -- managers --------------------------------------------------------------------------------------
@pytest.mark.usefixtures("tensors")
def test_a_manager_of_a_call_s_own_is_on_the_model_s_gpu(machine: Machine) -> None:
    model = hf_models.model_of("llama")
    free, _ = machine.kernels.memory_info(INDEX)
    during: list[int] = []

    def stream(*_: int) -> None:
        during.append(machine.kernels.memory_info(INDEX)[0])

    found = generate(model, prompts(), max_new_tokens=NEW, stream=stream)
    assert [each.token_ids for each in found] == hf_models.plain(model, prompts(), NEW)
    assert max(during) < free
    with pytest.raises(CapacityError, match="half the free memory holds"):
        generate(model, [[1] * 400], max_new_tokens=1 << 20)


@pytest.mark.usefixtures("tensors")
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_manager_elsewhere_is_refused(device: str) -> None:
    model = hf_models.model_of("llama")
    manager = manager_of(model, device=device)
    with pytest.raises(ValueError, match=f"pool is on {device}, the model on {DEVICE}; make the"):
        generate(model, [[1, 2]], manager=manager)


def test_a_manager_on_a_gpu_is_refused_for_a_model_on_the_cpu(machine: Machine) -> None:
    model = hf_models.model_of("llama")
    with pytest.raises(ValueError, match=f"pool is on {DEVICE}, the model on cpu"):
        generate(model, [[1, 2]], manager=manager_of(model))


@pytest.mark.usefixtures("tensors")
def test_heads_that_a_gpu_has_no_room_for_are_refused() -> None:
    model = hf_models.build("qwen3", head_dim=520)
    with pytest.raises(ValueError, match="heads have 520 elements, attention on a GPU takes up to"):
        cache_params(model)


@pytest.mark.usefixtures("tensors")
def test_triton_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_models.model_of("llama")
    availability._imported.cache_clear()
    for name in [n for n in sys.modules if n.startswith("kvcore.backends.cuda.attention")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(KVCacheError, match=r"triton is not installed; pip install 'kvcore\[atte"):
        generate(model, [[1, 2]])


# -- KVCoreCache -----------------------------------------------------------------------------------
def cached(model: Any, cache: Any, **options: Any) -> list[list[int]]:
    """Return model.generate's answers to two prompts that are padded to one length."""
    ids = torch.tensor([prompts()[1], [0] * 4 + prompts()[1][:-4]])
    given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    out = model.generate(ids, attention_mask=(ids > 0).long(), **{CACHE: cache}, **given)
    answer: list[list[int]] = out.tolist()
    return answer


@pytest.mark.usefixtures("tensors")
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek-v3"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}])
@pytest.mark.parametrize("groups", [False, True])
def test_a_cache_of_transformers_answers_the_same(
    family: str, options: dict[str, int], groups: bool
) -> None:
    model = hf_models.model_of(family)
    cache = KVCoreCache(model.config, page_size=4, num_pages=80, groups=groups)
    if "prompt_lookup_num_tokens" in options:  # needs one row
        ids = torch.tensor([prompts()[1]])
        given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
        found, expected = (
            model.generate(ids, attention_mask=torch.ones_like(ids), **given, **own).tolist()
            for own in ({CACHE: cache}, {})
        )
    else:
        found, expected = cached(model, cache, **options), cached(model, None, **options)
    assert found == expected
    assert cache.manager is not None
    assert list(map(str, cache.manager.devices)) == [DEVICE]
    assert cache.layers[0].keys.shape[2] == cache.get_seq_length() or groups
    cache.reset()
    assert cache.held_pages == 0


def test_the_pool_of_a_cache_stays_where_it_is(machine: Machine) -> None:
    model = hf_models.model_of("llama")
    cache = KVCoreCache(model.config, page_size=4, num_pages=80)
    with counted_as_gpu(machine):
        cached(model, cache)
        cache.reset()
    with pytest.raises(ValueError, match=f"K and V are on cpu, the pool is on {DEVICE}"):
        cached(model, cache)
    meta = torch.zeros((1, 2, 3, 16), device="meta")
    with pytest.raises(TypeError, match="K is on meta and V on meta, must both be in host memory"):
        cache.update(meta, meta, 0)
