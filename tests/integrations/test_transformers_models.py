# SPDX-License-Identifier: Apache-2.0
"""Every supported family generates the same through pages as without kvcore."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from conftest import require

torch = require("torch")
require("transformers")

import hf_models  # noqa: E402
from generated import NEW, check_cold_and_cached, checked_manager, tokens_of  # noqa: E402
from hf_models import FAMILIES, expected_of, model_of, prompts_of  # noqa: E402
from kvcore import PagedKVCacheManager  # noqa: E402
from kvcore.integrations.transformers import attention, cache_params  # noqa: E402
from kvcore.integrations.transformers.rules import AttentionRule, rule_of  # noqa: E402
from preemptions import preemptions  # noqa: E402

torch.set_num_threads(1)

OTHERS = [family for family in FAMILIES if family != "llama"]


def manager_of(model: Any, page: int, tokens: int = 600, batch: int = 8) -> PagedKVCacheManager:
    params = cache_params(model, page, groups=False)
    return checked_manager(params, -(-tokens // page), max_batch_size=batch)


@pytest.mark.parametrize("page", [1, 3, 16, 128])
def test_llama_generates_the_same_at_every_page_size(page: int) -> None:
    model, manager = model_of("llama"), manager_of(model_of("llama"), page, tokens=1200)
    check_cold_and_cached(model, manager, expected_of("llama", NEW))
    assert (manager.metrics.cache_tokens > 0) == (page < 128)  # no prompt fills a page of 128
    assert tokens_of(model, manager, 2048) == expected_of("llama", NEW)


@pytest.mark.parametrize("page", [3, 16])
@pytest.mark.parametrize("family", OTHERS)
def test_family_generates_the_same(family: str, page: int) -> None:
    """Packed with chunks of prompts, then again with prefix hits."""
    model, expected = model_of(family), expected_of(family, NEW)
    assert len({token for answer in expected for token in answer}) > 20  # varied
    manager = manager_of(model, page)
    check_cold_and_cached(model, manager, expected)
    assert manager.metrics.cache_tokens > 0.9 * sum(map(len, prompts_of()))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "deepseek-v3"])
def test_preempted_requests_generate_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted = preemptions(monkeypatch)
    model = model_of(family)
    manager = manager_of(model, 3, tokens=53 + NEW + 5)
    assert tokens_of(model, manager, 40) == expected_of(family, NEW)
    assert preempted


# -- each test above detects its feature: without it the output differs --------------------------
def broken(**fields: Any) -> Callable[..., AttentionRule]:
    """Return a rule_of that changes fields: by a function of the value, or to a value."""
    original = rule_of

    def rule(*args: Any) -> AttentionRule:
        right = original(*args)
        changed = {
            name: change(getattr(right, name)) if callable(change) else change
            for name, change in fields.items()
        }
        return dataclasses.replace(right, **changed)

    return rule


def wider(window: int | None) -> int | None:
    return None if window is None else window + 1


def narrower(window: int | None) -> int | None:
    return None if window is None else window - 1


WINDOWED = ["qwen2", "mistral", "gemma2", "gemma3", "phi3", "gpt-oss", "cohere2"]
DERIVED = ["qwen2-moe", "phimoe"]  # from the config


@pytest.mark.parametrize("change", [wider, narrower, None], ids=["wider", "narrower", "none"])
@pytest.mark.parametrize("family", WINDOWED + DERIVED)
def test_another_window_changes_the_output(
    family: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family)
    manager = manager_of(model, 16)  # this reads the model by its own rules
    monkeypatch.setattr(attention, "rule_of", broken(window=change))
    assert tokens_of(model, manager) != expected_of(family, NEW)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma2", {"soft_cap": None}),
        ("gpt-oss", {"sinks": None}),
        ("gemma2", {"scale": None}),
        ("gemma3", {"scale": None}),
        ("granite", {"scale": None}),
        ("deepseek-v3", {"scale": None}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_without_a_rule_the_output_changes(
    family: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family)
    manager = manager_of(model, 16)
    monkeypatch.setattr(attention, "rule_of", broken(**fields))
    assert tokens_of(model, manager) != expected_of(family, NEW)


@pytest.mark.parametrize("family", ["llama", "deepseek-v2"])
def test_an_overwritten_page_changes_the_output(family: str) -> None:
    model = model_of(family)
    manager = manager_of(model, 16)
    assert tokens_of(model, manager) == expected_of(family, NEW)
    page = manager.match_prefix(prompts_of()[-1], return_pages=True)[1][0]
    manager.fetch([])[0].blocks[page] = 3.0
    assert tokens_of(model, manager) != expected_of(family, NEW)


# -- bfloat16 -------------------------------------------------------------------------------------
def logits_through_pages(model: Any, tokens: list[int], chunk: int) -> Any:
    """Return the logits of every token, given all tokens before it."""
    from kvcore import TextGenerationContext
    from kvcore.integrations.transformers import PackedBatch, paged_attention

    manager = manager_of(model, 3)
    context = TextGenerationContext("row", tokens, active_idx=chunk)
    manager.claim("row")
    parts = []
    with paged_attention(model), torch.inference_mode():
        while context.start_idx < len(tokens):
            context.active_idx = min(context.start_idx + chunk, len(tokens))
            packed = PackedBatch(manager.fetch([context])[0], [context])
            rows = torch.arange(context.active_length).numpy()
            parts.append(model(**packed.model_inputs(rows)).logits[0])
            context.update(0)
            manager.step([context])
    return torch.cat(parts).float()


def logits_alone(model: Any, tokens: list[int], attention_name: str) -> Any:
    before = model.config._attn_implementation
    model.set_attn_implementation(attention_name)
    try:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(family: str) -> None:
    """Teacher-forced: transformers' own paths differ from each other in bfloat16."""
    exact, model = hf_models.build(family), hf_models.build(family).to(torch.bfloat16)
    mine, alone = [], {"eager": [], "sdpa": []}  # type: ignore[var-annotated]
    for prompt, answer in zip(prompts_of(), expected_of(family, NEW), strict=True):
        tokens = prompt + answer
        truth = logits_alone(exact, tokens, "sdpa")
        mine.append((logits_through_pages(model, tokens, 9) - truth).abs())
        for name, errors in alone.items():
            errors.append((logits_alone(model, tokens, name) - truth).abs())
    best = min(float(torch.cat(errors).mean()) for errors in alone.values())
    assert float(torch.cat(mine).mean()) <= 1.25 * best
