# SPDX-License-Identifier: Apache-2.0
"""KVCoreCache with groups: window layers keep only their window, as in DynamicCache."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from conftest import require

torch = require("torch")
transformers = require("transformers")

from cache_models import (  # noqa: E402
    MODES,
    expected,
    held_pages,
    make_config,
    make_model,
    seeded,
)
from kvcore.groups import FullAttention, SlidingWindow  # noqa: E402
from kvcore.integrations.transformers import KVCoreCache  # noqa: E402

torch.set_num_threads(1)

WINDOWED = ["gemma3", "gemma2", "gpt_oss"]
FEW = [("gemma3", mode) for mode in ("greedy", "assisted")]


def check_mode(family: str, mode: str, page_size: int) -> None:
    model = make_model(family)
    cache = KVCoreCache(model.config, page_size=page_size, num_pages=300, groups=True)
    assert torch.equal(MODES[mode](model, cache), expected(family, mode))
    assert held_pages(cache) == cache.held_pages
    assert any(cache.is_sliding)
    cache.reset()
    assert held_pages(cache) == 0


@pytest.mark.parametrize(("family", "mode"), FEW)
def test_tokens_are_those_of_dynamic_cache(family: str, mode: str) -> None:
    check_mode(family, mode, 3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("family", WINDOWED)
def test_tokens_of_others_are_those_of_dynamic_cache(family: str, mode: str) -> None:
    check_mode(family, mode, 4)


@pytest.mark.parametrize("mode", ["beams"])
def test_attention_named_kvcore_reads_the_cache_as_any_other(mode: str) -> None:
    model = make_model("gemma3")
    before = model.config._attn_implementation
    model.set_attn_implementation("kvcore")
    try:
        check_mode("gemma3", mode, 3)
    finally:
        model.set_attn_implementation(before)


# -- calls of transformers on a cache ------------------------------------------------------------
def states(rows: int, tokens: int, seed: int) -> tuple[Any, Any]:
    both = torch.randn((2, rows, 2, tokens, 12), generator=seeded(seed))
    return both[0], both[1]


class Twins:
    """A cache with groups and a cache of transformers, with the same calls."""

    def __init__(self, page_size: int) -> None:
        config = make_config("gemma3")
        self.ours = KVCoreCache(config, page_size=page_size, num_pages=400, groups=True)
        self.theirs = transformers.DynamicCache(config=config)
        self.rows, self.seed = 2, 0

    def update(self, tokens: int) -> None:
        for layer in range(2):
            sizes = [c.get_mask_sizes(tokens, layer) for c in (self.ours, self.theirs)]
            assert sizes[0] == sizes[1]
            self.seed += 1
            given = states(self.rows, tokens, self.seed)
            got, want = self.ours.update(*given, layer), self.theirs.update(*given, layer)
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
            assert got[0].shape[2] == sizes[0][0]

    def check(self) -> None:
        assert self.ours.get_seq_length() == self.theirs.get_seq_length()
        assert self.ours.is_sliding == self.theirs.is_sliding
        for own, its in zip(self.ours.layers, self.theirs.layers, strict=True):
            assert torch.equal(own.keys, its.keys)
            assert torch.equal(own.values, its.values)
        assert held_pages(self.ours) == self.ours.held_pages


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_updates_return_what_dynamic_cache_does(page_size: int) -> None:
    twins = Twins(page_size)
    for step, tokens in enumerate((5, 1, 1, 3, 20, 1, 1, 9, 1, 1)):
        twins.update(tokens)
        twins.check()
        if step % 3 == 1:
            for cache in (twins.ours, twins.theirs):
                cache.reorder_cache(torch.tensor([1, 0]))
            twins.check()
    assert twins.ours.manager is not None
    assert twins.ours.manager.params.groups == (FullAttention([1]), SlidingWindow([0], 7))
    kept, keys = copy.deepcopy(twins.ours), twins.ours.layers[0].keys
    twins.update(12)
    twins.ours.reset()
    assert kept.get_seq_length() == 43
    assert torch.equal(kept.layers[0].keys, keys)
    assert held_pages(kept) == kept.held_pages


def test_windows_hold_few_pages() -> None:
    twins = Twins(2)
    for tokens in [40] + [1] * 20:
        twins.update(tokens)
    # 60 tokens of the full layer; of the other at most the 6 that are read and a new one.
    assert twins.ours.held_pages <= 2 * (30 + 5)


@pytest.mark.parametrize("lost", [0, 1, 4, 9])
def test_tokens_of_the_last_pass_can_be_forgotten(lost: int) -> None:
    """Assisted generation does this: its rejected tokens may have moved the window."""
    config = make_config("gemma3")
    cache = KVCoreCache(config, page_size=2, num_pages=100, groups=True)
    full = KVCoreCache(config, page_size=2, num_pages=100)
    for tokens in (30, 9):
        for layer in range(2):
            given = states(2, tokens, tokens + layer)
            for each in (cache, full):
                each.update(*given, layer)
    for each in (cache, full):
        each.crop(-lost)
    assert cache.get_seq_length() == 39 - lost
    assert held_pages(cache) == cache.held_pages
    given = states(2, 3, 7)
    got, want = cache.update(*given, 0)[0], full.update(*given, 0)[0]
    assert torch.equal(got, want[:, :, -got.shape[2] :])
    assert got.shape[2] == 6 + 3


def test_all_tokens_of_the_first_pass_can_be_forgotten() -> None:
    twins = Twins(4)
    twins.update(9)
    twins.ours.crop(-9)
    assert (twins.ours.get_seq_length(), held_pages(twins.ours)) == (0, 0)
    twins.theirs = transformers.DynamicCache(config=make_config("gemma3"))
    twins.update(11)
    twins.check()


def test_tokens_before_the_last_pass_stay() -> None:
    twins = Twins(4)
    twins.update(20)
    twins.update(2)
    with pytest.raises(ValueError, match="must be at least 20; make the cache with groups=False"):
        twins.ours.crop(-3)
    twins.check()
    twins.update(4)
    twins.check()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_layers_that_are_all_alike_keep_everything(family: str) -> None:
    cache = KVCoreCache(make_config(family), num_pages=10, groups=True)
    for tokens in (9, 3):
        assert cache.update(*states(1, tokens, 1), 0)[0].shape[2] in (9, 12)
        cache.update(*states(1, tokens, 2), 1)
    assert cache.manager is not None
    assert cache.manager.params.groups is None
    assert not any(cache.is_sliding)


def test_groups_is_a_flag() -> None:
    with pytest.raises(TypeError, match="groups"):
        KVCoreCache(make_config("llama"), groups="yes")  # type: ignore[arg-type]
