# SPDX-License-Identifier: Apache-2.0
"""Models of transformers that generate with paged caches on a GPU, and ``kvcore demo`` on a GPU.

``TRITON_INTERPRET=0 python -m pytest tests/gpu/test_gpu_transformers.py`` takes half a minute, much
of it to compile. The heads of all models have the same size, so that few kernels are compiled.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import conftest
import gpu_arrays

gpu_arrays.require_gpu()
gpu_arrays.require_compiler()
# Warnings of torch and transformers, which depend on their versions, are not errors.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = "cuda:0"
NEW = 24
CUTS = (9, 10, 11, 40)  # where prompts are cut into parts, also into single tokens
EXACT = 5e-4  # the most difference of float32 logits, whose standard deviation is 2


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    """Return torch with CUDA; skip without transformers."""
    found = gpu_arrays.require_torch()
    conftest.require("transformers")
    before = found.get_float32_matmul_precision()
    found.set_float32_matmul_precision("highest")  # some images multiply in TF32
    yield found
    found.set_float32_matmul_precision(before)


def model_of(family: str, **fields: Any) -> Any:
    import hf_models

    return hf_models.build(family, **fields).to(DEVICE)


def prompts_of() -> Any:
    import hf_models

    return hf_models.prompts_of()


def manager_of(model: Any) -> Any:
    from kvcore import PagedKVCacheManager
    from kvcore.integrations.transformers import cache_params

    return PagedKVCacheManager(
        cache_params(model, page_size=16),
        max_batch_size=8,
        max_seq_len=128,
        devices=[DEVICE],
        num_pages=120,
        enable_runtime_checks=True,
    )


def own_logits(torch: Any, model: Any, tokens: list[int]) -> Any:
    """The logits of the model without kvcore, [tokens, vocabulary]."""
    ids = torch.tensor([tokens], device=DEVICE)
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits[0].float()


def check_greedy(torch: Any, model: Any, answers: list[list[int]]) -> None:
    """Check that each token is the likeliest token after its prefix, or equally likely."""
    for prompt, answer in zip(prompts_of(), answers, strict=True):
        assert len(answer) == NEW
        logits = own_logits(torch, model, prompt + answer[:-1])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(answer, device=DEVICE)[:, None])[:, 0]
        assert float((logits.max(dim=1).values - chosen).max()) < EXACT


def generated(model: Any, manager: Any, **options: Any) -> list[list[int]]:
    from kvcore.integrations.transformers import generate

    asked: dict[str, Any] = {"manager": manager, "max_new_tokens": NEW} | options
    return [each.token_ids for each in generate(model, prompts_of(), **asked)]


# -- generate ------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_greedy_answers_are_the_model_s_own(torch: Any, family: str) -> None:
    """Prompts run in chunks with requests that generate; the second round has prefix hits."""
    import hf_models

    model = model_of(family)
    manager = manager_of(model)
    expected = hf_models.plain(model, prompts_of(), NEW)
    assert len({token for answer in expected for token in answer}) > 20
    for _ in range(2):
        found = generated(model, manager, max_batch_tokens=40)
        check_greedy(torch, model, found)
        # Sums are rounded in another order, so answers differ if two tokens are equally likely.
        assert sum(a == b for a, b in zip(found, expected, strict=True)) >= len(expected) - 1
        assert manager.num_free_blocks == manager.total_num_pages
        manager.check_integrity()
    assert manager.metrics.cache_tokens > 0
    with torch.cuda.stream(torch.cuda.Stream()):
        check_greedy(torch, model, generated(model, manager_of(model)))
    own = generated(model, None)  # a manager for the call, on the model's GPU
    check_greedy(torch, model, own)


def test_layers_with_states_go_on_from_them(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)  # its convolutions are inexact
    model = model_of("lfm2")
    manager = manager_of(model)
    for _ in range(2):
        check_greedy(torch, model, generated(model, manager, max_batch_tokens=40))
    assert manager.metrics.cache_tokens > 0


# -- logits --------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_in_float32_are_the_model_s_own(torch: Any, family: str) -> None:
    from paged_logits import paged_logits

    model = model_of(family)
    found = paged_logits(model, manager_of(model), prompts_of(), CUTS)
    for prompt, logits in zip(prompts_of(), found, strict=True):
        assert float((logits - own_logits(torch, model, prompt)).abs().max()) < EXACT


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_in_bfloat16_are_as_exact_as_the_model_s_own(torch: Any, family: str) -> None:
    """Compare distances from the logits of the same weights in float32."""
    from paged_logits import paged_logits

    model = model_of(family).to(torch.bfloat16)
    wide = copy.deepcopy(model).float()
    exact = torch.cat([own_logits(torch, wide, prompt) for prompt in prompts_of()])
    own = torch.cat([own_logits(torch, model, prompt) for prompt in prompts_of()])
    found = torch.cat(paged_logits(model, manager_of(model), prompts_of(), CUTS))
    assert found.dtype == torch.bfloat16
    theirs, ours = (float((each.float() - exact).abs().mean()) for each in (own, found))
    assert ours < 1.5 * theirs
    assert theirs < 0.2 * float(exact.std())


def waits(torch: Any, run: Any) -> int:
    """Count the calls of torch in which the host waits for the GPU."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        before = torch.is_warn_always_enabled()
        torch.set_warn_always(True)  # by default torch warns once per process
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.set_warn_always(before)
    return sum("synchronizing" in str(each.message) for each in seen)


def test_no_layer_makes_the_host_wait(torch: Any) -> None:
    from kvcore import TextGenerationContext
    from kvcore.integrations.transformers import PackedBatch, paged_attention

    counts: list[int] = []
    for layers in (2, 6):
        model = model_of("llama", num_hidden_layers=layers)
        manager = manager_of(model)
        context = TextGenerationContext("a", prompts_of()[-1])
        manager.claim("a")
        packed = PackedBatch(manager.fetch([context])[0], [context])
        with paged_attention(model), torch.inference_mode():
            inputs = packed.model_inputs()
            model(**inputs)  # compiles
            counts.append(waits(torch, lambda model=model, inputs=inputs: model(**inputs)))
    assert counts[0] == counts[1]


# -- KVCoreCache ---------------------------------------------------------------------------------
@pytest.mark.parametrize("groups", [False, True])
def test_a_cache_of_transformers_holds_its_pages_on_the_gpu(torch: Any, groups: bool) -> None:
    from kvcore import Device
    from kvcore.integrations.transformers import KVCoreCache
    from kvcore.integrations.transformers.names import CACHE

    model = model_of("gemma3")
    cache = KVCoreCache(model.config, page_size=4, num_pages=200, groups=groups)
    prompt = prompts_of()[-1]
    ids = torch.tensor([prompt, [0] * 9 + prompt[:-9]], device=DEVICE)
    asked = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    mask = (ids > 0).long()
    beams = 1 if groups else 2
    found, expected = (
        model.generate(ids, attention_mask=mask, num_beams=beams, **asked, **own).tolist()
        for own in ({CACHE: cache}, {})
    )
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert cache.manager is not None
    assert cache.manager.devices == (Device("cuda", 0),)
    assert cache.layers[0].keys.device == torch.device(DEVICE)


# -- refused arguments ---------------------------------------------------------------------------
def test_models_and_managers_on_several_devices_are_refused(torch: Any) -> None:
    from kvcore import PagedKVCacheManager
    from kvcore.integrations.transformers import cache_params, generate

    model = model_of("llama")
    host = PagedKVCacheManager(cache_params(model), 2, 64, num_pages=8)
    with pytest.raises(ValueError, match="pool is on cpu, the model on cuda:0"):
        generate(model, [[1, 2]], manager=host)
    model.model.layers[1].to("cpu")
    with pytest.raises(ValueError, match=r"weights are on several devices \(cpu, cuda:0\)"):
        generate(model, [[1, 2]])


# -- kvcore demo ---------------------------------------------------------------------------------
def test_the_demo_serves_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("typer", "rich"):
        conftest.require(name)
    from kvcore.apps.cli.main import main

    asked = ["demo", "--chats", "6", "--turns", "2", "--device", DEVICE, "--json"]
    assert main(asked) == 0, capsys.readouterr().err
    answer = json.loads(capsys.readouterr().out)
    assert (answer["device"], answer["is_right"]) == (DEVICE, True)
    assert answer["with_cache"]["cached_tokens"] > 0
    assert answer["with_cache"]["leaked_pages"] == 0
    assert answer["check"]["differing"] == 0
    assert answer["check"]["largest_difference"] < 1e-3
    assert main(["demo", "--device", "cuda:64"]) == 2
    assert "expected an index below" in capsys.readouterr().err
