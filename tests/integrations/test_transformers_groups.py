# SPDX-License-Identifier: Apache-2.0
"""Models with windows, chunks and shared layers keep the tokens in reach, and generate the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from conftest import require

torch = require("torch")
require("transformers")

from generated import (  # noqa: E402
    LONGEST,
    NEW,
    check_cold_and_cached,
    checked_manager,
    tokens_of,
)
from hf_models import GROUPED, build, expected_of, model_of, plain, prompts_of  # noqa: E402
from kvcore import KVCacheParams, PagedKVCacheManager  # noqa: E402
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow, bundles  # noqa: E402
from kvcore.integrations.transformers import (  # noqa: E402
    attention,
    cache_params,
    generate,
)
from kvcore.integrations.transformers.rules import rule_of  # noqa: E402
from kvcore.layers.layer_map import has_windows  # noqa: E402
from kvcore.sizing import longest_sequence, pages_per_sequence  # noqa: E402

torch.set_num_threads(1)

FEW = ["gemma3", "gpt-oss", "mistral", "llama4-chunks"]
WINDOWED = {"qwen2", "phi3", "phimoe", "qwen2-moe", "llama4", "gemma2", "cohere2"}
ALONE = {"mistral", "phi3", "phimoe", "starcoder2"}  # only windows, which are never short
REST = sorted({*WINDOWED, *GROUPED} - set(FEW))


def manager_of(model: Any, page: int, tokens: int, pages: int = 0, **options: Any) -> Any:
    """Return a manager for all prompts at once, or with `pages` pages."""
    params = cache_params(model, page, **options)
    many = pages or 8 * pages_per_sequence(params, LONGEST + page, tokens)
    return checked_manager(params, many)


def check_family(family: str, page: int, tokens: int = 11) -> None:
    model, expected = model_of(family), expected_of(family, NEW)
    manager = manager_of(model, page, tokens)
    assert has_windows(manager.params)
    check_cold_and_cached(model, manager, expected, tokens)
    assert manager.metrics.cache_tokens > 0.3 * sum(map(len, prompts_of()))


@pytest.mark.parametrize("family", FEW)
def test_family_generates_the_same(family: str) -> None:
    check_family(family, 3)


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("family", FEW)
def test_family_generates_the_same_at_every_page_size(family: str, page: int) -> None:
    check_family(family, page)


@pytest.mark.slow
@pytest.mark.parametrize("family", REST)
def test_other_families_generate_the_same(family: str) -> None:
    check_family(family, 3)
    check_family(family, 16, tokens=2048)


def check_preemption(family: str) -> None:
    """The pool holds little more than the longest sequence."""
    model = model_of(family)
    params = cache_params(model, 3)
    pages = next(n for n in range(1000) if longest_sequence(params, n, 20) >= LONGEST) + 2
    manager = manager_of(model, 3, 20, pages)
    manager.reset_metrics()
    assert tokens_of(model, manager, 20) == expected_of(family, NEW)
    metrics = manager.metrics
    assert metrics.evicted_pages
    assert metrics.resumed_tokens + metrics.recomputed_tokens > 0  # some hit, or ran, again


@pytest.mark.parametrize("family", ["gemma3"])
def test_preempted_requests_generate_the_same(family: str) -> None:
    check_preemption(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*FEW, *REST} - {"gemma3"} - ALONE))
def test_preempted_requests_of_others_generate_the_same(family: str) -> None:
    check_preemption(family)


def test_sequences_of_a_prompt_share_its_pages() -> None:
    model = model_of("gemma3")
    manager = manager_of(model, 4, 64)
    results = generate(
        model, prompts_of(), manager=manager, max_new_tokens=NEW, num_return_sequences=3
    )
    tokens = [result.token_ids for result in results]
    assert tokens == [each for each in expected_of("gemma3", NEW) for _ in range(3)]


@pytest.mark.slow
def test_sampling_does_not_depend_on_what_is_kept() -> None:
    model = model_of("gpt-oss")
    options = {"do_sample": True, "seed": 3, "num_return_sequences": 2}
    flat = manager_of(model, 4, 64, groups=False)
    drawn = tokens_of(model, flat, 64, **options)
    assert tokens_of(model, manager_of(model, 4, 64), 64, **options) == drawn


def test_a_manager_that_generate_makes_has_groups() -> None:
    results = generate(model_of("gemma2"), prompts_of(), max_new_tokens=NEW, max_batch_tokens=9)
    assert [r.token_ids for r in results] == expected_of("gemma2", NEW)


# -- params --------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", [*FEW, "gemma4", "gemma4-shared", "qwen2-moe"])
def test_groups_are_those_of_the_config(family: str) -> None:
    config = model_of(family).config.get_text_config(decoder=True).to_dict()
    read = KVCacheParams.from_hf_config(config, "float32", page_size=16, enable_prefix_caching=True)
    assert cache_params(model_of(family)) == read


def test_groups_may_be_left_out() -> None:
    flat = cache_params(model_of("gemma3"), 8, groups=False)
    assert flat == KVCacheParams("float32", 2, 16, 4, page_size=8, enable_prefix_caching=True)
    assert cache_params(model_of("llama"), 8) == cache_params(model_of("llama"), 8, groups=False)
    with pytest.raises(TypeError, match="groups"):
        cache_params(model_of("gemma3"), groups=None)  # type: ignore[arg-type]


def test_layers_of_other_widths_take_groups_of_their_own() -> None:
    params = cache_params(model_of("gemma4"), 16)
    assert params.groups == (FullAttention([1, 3], head_dim=16), SlidingWindow([0, 2], 7))
    assert [bundle.page_size for bundle in bundles(params)] == [16, 32]
    with pytest.raises(ValueError, match="its layers differ in their K and V"):
        cache_params(model_of("gemma4"), groups=False)


def test_layers_that_read_others_keep_nothing() -> None:
    params = cache_params(model_of("gemma3n"))
    assert params.shared == {4: 3, 5: 2}
    assert params.groups == (FullAttention([2]), SlidingWindow([0, 1, 3], 7))
    flat = manager_of(model_of("gemma3n"), 4, 30, groups=False)
    assert flat.params.layers_per_page == 6
    assert tokens_of(model_of("gemma3n"), flat, 30) == expected_of("gemma3n", NEW)


# -- the kept pages ------------------------------------------------------------------------------
def held_tables(manager: Any) -> set[int]:
    """Return the pages of all claimed requests, of every bundle."""
    requests = [(run, i, 0) for run in manager.runs for i in range(7)]
    return {
        page
        for request in requests
        if manager.contains(request)
        for bundle in range(len(bundles(manager.params)))
        for page in manager.get_req_blocks(request, bundle)
    }


class Forgetful(PagedKVCacheManager):
    """A manager that overwrites every page in no request, before each forward."""

    def fetch(self, batch: Any, num_steps: int = 1) -> Any:
        inputs = super().fetch(batch, num_steps)
        self.runs = {context.request_id[0] for context in batch}
        blocks = inputs[0].blocks
        lost = sorted(set(range(len(blocks))) - held_tables(self))
        blocks[lost] = np.nan
        self.most_held = max(getattr(self, "most_held", 0), len(blocks) - len(lost))
        return inputs


@pytest.mark.parametrize(
    "family", ["gemma3", "llama4-chunks", pytest.param("mistral", marks=pytest.mark.slow)]
)
def test_attention_reads_no_page_that_is_given_back(family: str) -> None:
    """Every page outside a table is NaN, and the output contains no NaN."""
    model = model_of(family)
    params = cache_params(model, 2, enable_prefix_caching=False)
    manager = Forgetful(params, 8, 128, num_pages=900)
    assert tokens_of(model, manager, 13) == expected_of(family, NEW)
    flat = cache_params(model, 2, groups=False)
    everything = sum(-(-(len(p) + NEW - 1) // 2) for p in prompts_of()) * flat.bytes_per_page
    assert manager.most_held * params.bytes_per_page < 0.8 * everything


def test_a_long_prompt_takes_little_more_than_its_full_layers() -> None:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    model = build("gemma3", num_hidden_layers=6, layer_types=kinds, max_position_embeddings=1024)
    prompt = [list(range(1, 180)) * 3]
    pages: dict[bool, int] = {}
    answers = []
    for groups in (True, False):
        params = cache_params(model, 8, groups=groups)
        manager = PagedKVCacheManager(params, 1, 1024, num_pages=600)
        (result,) = generate(model, prompt, manager=manager, max_new_tokens=4, max_batch_tokens=64)
        answers.append(result.token_ids)
        pages[groups] = manager.metrics.peak_used_pages * params.bytes_per_page
    assert answers[0] == answers[1] == plain(model, prompt, 4)[0]
    assert pages[True] < 0.35 * pages[False]


# -- chunks --------------------------------------------------------------------------------------
@pytest.mark.parametrize("groups", [True, False])
def test_chunked_layers_go_on_beyond_their_chunk(groups: bool) -> None:
    """Also beyond the length at which queries are scaled, in shorter and longer forwards."""
    model = model_of("llama4-chunks")
    for budget in (5, 40):
        manager = manager_of(model, 4, budget, groups=groups)
        assert tokens_of(model, manager, budget) == expected_of("llama4-chunks", NEW)


@pytest.fixture
def kvcore_attention() -> Iterator[Any]:
    model = model_of("llama4-chunks")
    before = model.config._attn_implementation
    model.set_attn_implementation("kvcore")
    yield model
    model.set_attn_implementation(before)


def test_chunks_begin_behind_the_padding(kvcore_attention: Any) -> None:
    prompts = prompts_of()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    whole = kvcore_attention.generate(ids, attention_mask=mask, **options)
    kvcore_attention.set_attn_implementation("eager")
    assert torch.equal(whole, kvcore_attention.generate(ids, attention_mask=mask, **options))
    kvcore_attention.set_attn_implementation("kvcore")
    with torch.inference_mode():
        ours = kvcore_attention(ids[-1:], use_cache=False).logits
    kvcore_attention.set_attn_implementation("eager")
    with torch.inference_mode():
        theirs = kvcore_attention(ids[-1:], use_cache=False).logits
    assert torch.allclose(ours, theirs, atol=1e-4)


# -- each test above detects its feature ---------------------------------------------------------
@pytest.mark.parametrize(
    ("family", "fields", "is_refused"),
    [
        ("gemma3", {"window": 6}, False),
        ("gemma3", {"window": 8}, True),
        ("llama4-chunks", {"chunk": 4}, False),
        ("llama4-chunks", {"chunk": 16}, True),
    ],
    ids=["narrower", "wider", "shorter", "longer"],
)
def test_another_rule_changes_the_output(
    family: str,
    fields: dict[str, Any],
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, right = model_of(family), rule_of
    manager = manager_of(model, 4, 64)
    (name,) = fields

    def other(*given: Any) -> Any:
        rule = right(*given)
        return rule if getattr(rule, name) is None else dataclasses.replace(rule, **fields)

    monkeypatch.setattr(attention, "rule_of", other)
    if is_refused:
        with pytest.raises(ValueError, match="layer 0 keeps"):
            tokens_of(model, manager, 64)
    else:
        assert tokens_of(model, manager, 64) != expected_of(family, NEW)


def test_unscaled_queries_change_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcore.integrations.transformers import batch

    monkeypatch.setattr(batch, "query_scales", lambda *_: None)
    model = model_of("llama4-chunks")
    assert tokens_of(model, manager_of(model, 4, 5), 5) != expected_of("llama4-chunks", NEW)


def test_layers_that_read_others_do_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcore import ops

    written: list[int] = []
    append = ops.append

    def noted(inputs: Any, layer: int, *rest: Any, **options: Any) -> None:
        written.append(layer)
        append(inputs, layer, *rest, **options)

    monkeypatch.setattr(ops, "append", noted)
    model = model_of("gemma3n")
    tokens_of(model, manager_of(model, 4, 64), 64)
    assert set(written) == {0, 1, 2, 3}


# -- managers that do not fit --------------------------------------------------------------------
GEMMA: dict[str, Any] = {
    "dtype": "float32",
    "n_kv_heads": 2,
    "head_dim": 16,
    "num_layers": 4,
    "page_size": 4,
}


@pytest.mark.parametrize(
    ("family", "groups", "shared", "reason"),
    [
        ("gemma3", [FullAttention([1, 3]), SlidingWindow([0, 2], 6)], None, "window of 6"),
        ("gemma3", [FullAttention([0, 2]), SlidingWindow([1, 3], 7)], None, "layer 1 brings"),
        ("gemma3", [FullAttention([1, 3]), ChunkedLocal([0, 2], 70)], None, "chunks of 70"),
        ("gemma3", [FullAttention([1, 2, 3])], None, "layer 0 is in no attention group"),
        ("gemma3", [FullAttention([0, 1, 2])], {3: 1}, "of layer 1"),
        ("gemma3", [FullAttention([0, 1, 2]), FullAttention([3], head_dim=32)], None, "of 32"),
        ("llama4-chunks", [FullAttention([3]), ChunkedLocal([0, 1, 2], 12)], None, "chunks of 12"),
        ("llama4-chunks", [FullAttention([3]), SlidingWindow([0, 1, 2], 8)], None, "window of 8"),
        ("llama", [SlidingWindow([0, 1, 2, 3], 100)], None, "for all tokens"),
    ],
)
def test_a_manager_that_keeps_less_is_refused(
    family: str, groups: Any, shared: Any, reason: str
) -> None:
    params = KVCacheParams(**GEMMA, groups=groups, shared=shared)
    manager = PagedKVCacheManager(params, 2, 64, num_pages=64)
    with pytest.raises(ValueError, match=reason):
        generate(model_of(family), [[1, 2]], manager=manager)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("gemma3", [FullAttention([0, 1, 2, 3])]),
        ("gemma3", [FullAttention([1, 3]), SlidingWindow([0, 2], 20)]),
        ("gemma3", [FullAttention([0, 1, 3]), SlidingWindow([2], 7)]),
        ("llama4-chunks", [FullAttention([3]), ChunkedLocal([0, 1, 2], 16)]),
    ],
)
def test_a_manager_that_keeps_more_generates_the_same(family: str, groups: Any) -> None:
    params = KVCacheParams(**GEMMA, enable_prefix_caching=True, groups=groups)
    manager = PagedKVCacheManager(params, 8, 128, num_pages=600)
    assert tokens_of(model_of(family), manager, 30) == expected_of(family, NEW)
