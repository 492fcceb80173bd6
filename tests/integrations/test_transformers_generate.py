# SPDX-License-Identifier: Apache-2.0
"""The arguments of generate(), on one tiny model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conftest import require

torch = require("torch")
transformers = require("transformers")

from hf_models import expected_of, model_of, prompts_of  # noqa: E402
from kvcore import PagedKVCacheManager  # noqa: E402
from kvcore.integrations.transformers import (  # noqa: E402
    GenerationResult,
    PackedBatch,
    cache_params,
    generate,
)
from kvcore.integrations.transformers.requests import read_prompts  # noqa: E402
from kvcore.integrations.transformers.sampling import Sampler  # noqa: E402

torch.set_num_threads(1)

NEW = 14


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of("llama")


@pytest.fixture
def manager(model: Any) -> PagedKVCacheManager:
    return PagedKVCacheManager(
        cache_params(model, 4), max_batch_size=16, max_seq_len=128, num_pages=200
    )


def test_results_come_in_order_and_are_frozen(model: Any) -> None:
    results = generate(model, prompts_of(), max_new_tokens=NEW)
    assert [r.prompt_index for r in results] == list(range(7))
    assert [r.token_ids for r in results] == expected_of("llama", NEW)
    assert {r.finish_reason for r in results} == {"length"}
    assert isinstance(results[0], GenerationResult)
    with pytest.raises(AttributeError):
        results[0].token_ids = []  # type: ignore[misc]


def test_no_prompts_give_no_results(model: Any) -> None:
    assert generate(model, []) == []


def test_prompts_may_be_arrays(model: Any) -> None:
    given = [np.array(prompts_of()[1]), torch.tensor(prompts_of()[2])]
    results = generate(model, given, max_new_tokens=NEW)
    assert [r.token_ids for r in results] == expected_of("llama", NEW)[1:3]


def test_a_kept_manager_reuses_the_prefixes_of_earlier_calls(
    model: Any, manager: PagedKVCacheManager
) -> None:
    first = generate(model, prompts_of(), manager=manager, max_new_tokens=NEW)
    again = generate(model, prompts_of(), manager=manager, max_new_tokens=NEW)
    assert first[0].cached_tokens == first[4].cached_tokens == 0
    # All of a prompt except its last token, which must run.
    assert [r.cached_tokens for r in again] == [len(p) - 1 for p in prompts_of()]
    assert [r.token_ids for r in again] == [r.token_ids for r in first]


def test_prompts_of_one_call_share_what_one_of_them_computes(
    model: Any, manager: PagedKVCacheManager
) -> None:
    results = generate(model, prompts_of(), manager=manager, max_new_tokens=NEW)
    assert [r.cached_tokens for r in results[4:]] == [0, 32, 32]  # whole pages
    alike = generate(model, [[5] * 40] * 3, manager=manager, max_new_tokens=2)
    assert [r.cached_tokens for r in alike] == [0, 39, 39]


def test_max_batch_tokens_bounds_a_forward(
    model: Any, manager: PagedKVCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    original = PackedBatch.model_inputs

    def counted(self: PackedBatch, rows: Any = None) -> dict[str, Any]:
        inputs = original(self, rows)
        counts.append((inputs["input_ids"].shape[1], len(inputs["logits_to_keep"])))
        return inputs

    monkeypatch.setattr(PackedBatch, "model_inputs", counted)
    for most in (1, 3, 10):
        counts.clear()
        results = generate(
            model, prompts_of(), manager=manager, max_new_tokens=NEW, max_batch_tokens=most
        )
        assert [r.token_ids for r in results] == expected_of("llama", NEW)
        manager.reset_prefix_cache()
        assert max(tokens for tokens, _ in counts) == most
        assert all(kept <= tokens for tokens, kept in counts)


def test_a_model_that_answers_all_logits_works(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = model.forward

    def answer_all(*args: Any, logits_to_keep: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", answer_all)
    results = generate(model, prompts_of(), max_new_tokens=4, max_batch_tokens=20)
    assert [r.token_ids for r in results] == [e[:4] for e in expected_of("llama", NEW)]


def test_more_prompts_than_slots_wait(model: Any) -> None:
    manager = PagedKVCacheManager(
        cache_params(model, 4), max_batch_size=2, max_seq_len=128, num_pages=200
    )
    results = generate(model, prompts_of(), manager=manager, max_new_tokens=NEW)
    assert [r.token_ids for r in results] == expected_of("llama", NEW)


# -- the end of a sequence ------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["int", "list", "auto"])
def test_eos_ends_a_sequence_and_stays_in_it(
    model: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = expected_of("llama", NEW)
    eos = expected[2][4]
    given: Any = {"int": eos, "list": [eos, 198], "auto": "auto"}[form]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [eos, 198])
    stops = {eos} if form == "int" else {eos, 198}
    results = generate(model, prompts_of(), max_new_tokens=NEW, eos_token_id=given)
    for result, whole in zip(results, expected, strict=True):
        end = next((i + 1 for i, token in enumerate(whole) if token in stops), None)
        assert result.token_ids == whole[:end]
        assert result.finish_reason == ("length" if end is None else "eos")
    ended = generate(model, prompts_of(), max_new_tokens=NEW, eos_token_id=None)
    assert [r.token_ids for r in ended] == expected


def test_one_new_token(model: Any) -> None:
    results = generate(model, prompts_of(), max_new_tokens=1, num_return_sequences=2)
    assert [r.token_ids for r in results[::2]] == [e[:1] for e in expected_of("llama", NEW)]


def test_a_pool_of_a_narrow_dtype_answers_nearly_the_same(model: Any) -> None:
    params = cache_params(model, 16, dtype="int8", kv_scale_granularity=8)
    manager = PagedKVCacheManager(params, max_batch_size=8, max_seq_len=128, num_pages=60)
    results = generate(model, prompts_of(), manager=manager, max_new_tokens=NEW)
    first = [r.token_ids[0] for r in results]
    assert sum(a == e[0] for a, e in zip(first, expected_of("llama", NEW), strict=True)) >= 6


# -- sampling -------------------------------------------------------------------------------------
def test_a_seed_makes_drawing_reproducible_whatever_runs_beside(model: Any) -> None:
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": NEW}
    prompts = prompts_of()

    def drawn(chosen: list[list[int]], **more: Any) -> list[list[int]]:
        return [r.token_ids for r in generate(model, chosen, **(options | more))]

    first = drawn(prompts, seed=7)
    assert drawn(prompts, seed=7, max_batch_tokens=9) == first
    small = PagedKVCacheManager(
        cache_params(model, 4), max_batch_size=5, max_seq_len=128, num_pages=18
    )
    assert drawn(prompts, seed=7, manager=small) == first
    assert drawn(prompts[:2], seed=7) == first[:6]
    assert drawn(prompts, seed=8) != first
    assert len({tuple(tokens) for tokens in first}) == len(first)


def test_without_a_seed_torch_has_it(model: Any) -> None:
    def drawn() -> list[int]:
        return generate(model, [[1, 2, 3]], do_sample=True, max_new_tokens=NEW)[0].token_ids

    torch.manual_seed(3)
    first = drawn()
    assert drawn() != first
    torch.manual_seed(3)
    assert drawn() == first


def test_a_low_temperature_is_greedy(model: Any) -> None:
    results = generate(
        model, prompts_of(), do_sample=True, temperature=1e-4, seed=1, max_new_tokens=NEW
    )
    assert [r.token_ids for r in results] == expected_of("llama", NEW)


def test_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    shares = torch.tensor([0.5, 0.0, 0.3, 0.2])
    (request,) = read_prompts([[1]], 4, 4000, 1)
    sampler = Sampler(do_sample=True, temperature=2.0, seed=5)
    sampler.prepare(request)
    counts = np.zeros(4)
    logits = 2.0 * torch.log(shares)[None]
    for _ in range(4000):
        (token,) = sampler.choose(logits, [request])
        request.context.update(int(token))
        counts[token] += 1
    assert counts[1] == 0
    assert np.abs(counts / 4000 - shares.numpy()).max() < 0.03


def test_sequences_of_a_prompt_share_its_pages(model: Any, manager: PagedKVCacheManager) -> None:
    prompt = prompts_of()[-1]  # 53 tokens, 14 pages of 4
    results = generate(
        model,
        [prompt],
        manager=manager,
        num_return_sequences=8,
        do_sample=True,
        seed=2,
        max_new_tokens=6,
    )
    assert manager.metrics.input_tokens < 53 + 8 * 6  # the prompt ran once
    assert manager.metrics.peak_used_pages <= 13 + 8 * 3
    assert [r.cached_tokens for r in results] == [0] + [53] * 7
    assert [r.prompt_index for r in results] == [0] * 8


def test_greedy_sequences_of_a_prompt_are_equal(model: Any) -> None:
    results = generate(model, prompts_of()[:2], max_new_tokens=NEW, num_return_sequences=2)
    expected = expected_of("llama", NEW)
    assert [r.token_ids for r in results] == [expected[i] for i in (0, 0, 1, 1)]


# -- telling the caller ---------------------------------------------------------------------------
def test_stream_gets_every_token_in_order(model: Any) -> None:
    seen: dict[int, list[int]] = {}
    results = generate(
        model,
        prompts_of(),
        max_new_tokens=NEW,
        stream=lambda index, token: seen.setdefault(index, []).append(token),
    )
    assert [seen[r.prompt_index] for r in results] == [r.token_ids for r in results]


def test_progress_is_told_after_each_forward(model: Any) -> None:
    told: list[tuple[int, int]] = []
    generate(model, prompts_of(), max_new_tokens=NEW, progress=lambda *now: told.append(now))
    assert told == sorted(told)
    assert told[-1] == (7, 7 * NEW)


def test_progress_shows_a_bar_and_clears_it(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    results = generate(model, [[1, 2]], max_new_tokens=3, progress=True)
    assert len(results[0].token_ids) == 3
    assert capsys.readouterr().out == ""


# -- as any attention of transformers -------------------------------------------------------------
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "qwen2-moe", "deepseek-v3"])
def test_model_generates_the_same_with_kvcore_attention_set(family: str) -> None:
    """Without pages it attends over its inputs, including padding."""
    model, prompts = model_of(family), prompts_of()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    before = model.config._attn_implementation
    model.set_attn_implementation("kvcore")
    try:
        whole = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
    finally:
        model.set_attn_implementation(before)
    assert whole[:, longest:].tolist() == expected_of(family, NEW)
