# SPDX-License-Identifier: Apache-2.0
"""Models generate the same tokens through KVCoreCache as through DynamicCache."""

from __future__ import annotations

import copy
import mmap
import re
from pathlib import Path
from typing import Any

import pytest

from conftest import require

torch = require("torch")
transformers = require("transformers")

from cache_models import (  # noqa: E402
    FAMILIES,
    MODES,
    expected,
    generate,
    held_pages,
    make_config,
    make_model,
    prompts,
)
from kvcore import CapacityError, InsufficientBlocksError, paged  # noqa: E402
from kvcore.integrations.transformers import KVCoreCache  # noqa: E402
from kvcore.integrations.transformers.names import CACHE  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- equality ------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_dynamic_cache(family: str, mode: str) -> None:
    model = make_model(family)
    for page_size in (3, 16):
        cache = KVCoreCache(model.config, page_size=page_size, num_pages=300)
        assert torch.equal(MODES[mode](model, cache), expected(family, mode))
        assert held_pages(cache) == cache.held_pages
        cache.reset()
        assert held_pages(cache) == 0


def test_tokens_of_bfloat16_models_are_those_of_dynamic_cache() -> None:
    model = copy.deepcopy(make_model("llama")).to(torch.bfloat16)
    cache = KVCoreCache(model.config, page_size=3)
    want = generate(model, prompts(), transformers.DynamicCache(config=model.config))
    assert torch.equal(generate(model, prompts(), cache), want)
    assert cache.manager is not None
    assert cache.manager.params.dtype == "bfloat16"


def test_logits_do_not_depend_on_the_pages_at_all() -> None:
    """The logits are equal bit for bit: the same K and V enter the same attention."""
    model = make_model("qwen3")
    ids = prompts(2, 20)

    def logits(cache: Any) -> Any:
        with torch.no_grad():
            parts = [model(part, **{CACHE: cache}).logits for part in ids.split(7, dim=1)]
        return torch.cat(parts, dim=1)

    one, other = (logits(KVCoreCache(model.config, page_size=size)) for size in (1, 5))
    assert torch.equal(one, other)
    torch.testing.assert_close(one, logits(transformers.DynamicCache(config=model.config)))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_attention_named_kvcore_reads_the_cache_as_any_other(family: str) -> None:
    model = copy.deepcopy(make_model(family))
    model.set_attn_implementation("kvcore")
    for mode in ("greedy", "beams", "lookup"):
        cache = KVCoreCache(model.config, page_size=5)
        assert torch.equal(MODES[mode](model, cache), expected(family, mode))


def test_compiled_models_leave_their_graph_for_the_cache() -> None:
    model = copy.deepcopy(make_model("llama"))
    ids = prompts(2)
    want = generate(model, ids, transformers.DynamicCache(config=model.config), max_new_tokens=3)
    model.forward = torch.compile(model.forward, backend="eager")
    cache = KVCoreCache(model.config, page_size=3)
    try:
        assert torch.equal(generate(model, ids, cache, max_new_tokens=3), want)
    finally:
        torch.compiler.reset()


# -- errors must be detected ---------------------------------------------------------------------
def nothing(*args: Any, **kwargs: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("owner", "verb", "mode"),
    [
        (KVCoreCache, "reorder_cache", "beams"),
        (KVCoreCache, "batch_select_indices", "selected"),
        (paged, "make_copier", "beams"),
    ],
)
def test_output_changes_where_a_verb_does_nothing(
    monkeypatch: pytest.MonkeyPatch, owner: Any, verb: str, mode: str
) -> None:
    model = make_model("llama")
    monkeypatch.setattr(owner, verb, nothing)
    cache = KVCoreCache(model.config, page_size=16, num_pages=300)
    try:
        tokens = MODES[mode](model, cache)
    except ValueError as error:
        assert "rows" in str(error)  # both results detect it
    else:
        assert not torch.equal(tokens, expected("llama", mode))


@pytest.mark.parametrize("mode", ["lookup", "assisted"])
def test_output_changes_where_rejected_tokens_stay(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    model = make_model("llama")
    monkeypatch.setattr(KVCoreCache, "crop", nothing)
    cache = KVCoreCache(model.config, page_size=3)
    try:
        tokens = MODES[mode](model, cache)
    except (ValueError, RuntimeError, IndexError):
        return
    assert not torch.equal(tokens, expected("llama", mode))


def test_output_changes_where_a_page_is_overwritten() -> None:
    model = make_model("llama")
    cache = KVCoreCache(model.config, page_size=3)
    ids = prompts(1)
    with torch.no_grad():
        model(ids[:, :8], **{CACHE: cache})
    assert cache.manager is not None
    (page,) = cache._rows.pages()[0][1:2]
    cache._rows._blocks[page] = 7.0
    want = generate(model, ids, transformers.DynamicCache(config=model.config))
    assert not torch.equal(generate(model, ids, cache), want)


# -- pages ---------------------------------------------------------------------------------------
def test_beams_hold_far_fewer_pages_than_whole_copies() -> None:
    model = make_model("llama")
    cache = KVCoreCache(model.config, page_size=4)
    generate(model, prompts(1, 64), cache, num_beams=4, max_new_tokens=32)
    whole = 4 * -(-cache.get_seq_length() // 4)
    assert cache.held_pages == held_pages(cache)
    assert cache.held_pages < 0.45 * whole
    assert cache.manager is not None
    assert cache.manager.metrics.peak_used_pages < 0.85 * whole  # each of four rows has the prompt


def test_beams_of_a_prompt_in_the_cache_never_hold_it_twice() -> None:
    """A filled cache is repeated for the beams: this is how beams start from a prefix."""
    model = make_model("llama")
    ids = prompts(1, 64)
    cache = KVCoreCache(model.config, page_size=4)
    with torch.no_grad():
        model(ids[:, :60], **{CACHE: cache})
    cache.batch_repeat_interleave(4)
    assert cache.held_pages == 15
    tokens = generate(model, ids, cache, num_beams=4)
    want = generate(model, ids, transformers.DynamicCache(config=model.config), num_beams=4)
    assert torch.equal(tokens, want)
    assert cache.manager is not None
    assert cache.manager.metrics.peak_used_pages <= 15 + 4 * 5


def test_pages_are_exactly_those_of_the_tokens() -> None:
    model = make_model("llama")
    cache = KVCoreCache(model.config, page_size=3)
    assert (cache.manager, cache.held_pages) == (None, 0)
    generate(model, prompts(3, 10), cache, max_new_tokens=9)
    assert cache.get_seq_length() == 18
    assert cache.held_pages == held_pages(cache) == 3 * 6
    cache.crop(-1)
    assert held_pages(cache) == 3 * 6
    cache.crop(-2)
    assert held_pages(cache) == 3 * 5
    cache.batch_select_indices(torch.tensor([2]))
    assert held_pages(cache) == 5
    cache.crop(-15)
    assert (cache.get_seq_length(), held_pages(cache)) == (0, 0)


def test_a_deleted_cache_holds_nothing_and_its_copies_keep_theirs() -> None:
    model = make_model("llama")
    cache = KVCoreCache(model.config, page_size=3)
    with torch.no_grad():
        model(prompts(2, 7), **{CACHE: cache})
    other = copy.deepcopy(cache)
    assert other.manager is cache.manager
    assert held_pages(other) == 6
    k = other.layers[1].keys.clone()
    del cache
    assert held_pages(other) == 6
    assert torch.equal(other.layers[1].keys, k)
    manager = other.manager
    del other
    assert manager is not None
    assert manager.num_free_blocks == manager.total_num_pages


def test_copies_of_a_prefix_share_it_and_go_their_own_ways() -> None:
    """transformers' recipe for a common system prompt: deep copies of a filled cache."""
    model = make_model("gemma3")
    system, tails = prompts(1, 22, seed=7), prompts(3, 5, seed=8)
    cache = KVCoreCache(model.config, page_size=4, num_pages=100)
    with torch.no_grad():
        model(system, **{CACHE: cache})
    for row, tail in enumerate(tails.split(1)):
        ids = torch.cat([system, tail], dim=1)
        own = copy.deepcopy(cache)
        assert held_pages(cache) == 6
        want = generate(model, ids, transformers.DynamicCache(config=model.config))
        assert torch.equal(generate(model, ids, own), want), row
        assert held_pages(own) == 6 + own.held_pages - 5  # five pages are full and shared
        del own
    assert cache.get_seq_length() == 22


def test_latents_are_stored_as_they_come() -> None:
    model = make_model("deepseek_v3")
    cache = KVCoreCache(model.config, page_size=4)
    generate(model, prompts(1), cache)
    assert cache.manager is not None
    params = cache.manager.params
    assert (params.n_kv_heads, params.row_widths) == (1, (16, 8))
    assert params.bytes_per_token == 2 * 24 * 4


def test_a_pool_that_is_full_leaves_the_cache_as_it_was() -> None:
    model = make_model("llama")
    ids = prompts(2)
    cache = KVCoreCache(model.config, page_size=4, num_pages=7)
    with pytest.raises(InsufficientBlocksError, match="row 1"):  # at token 13
        generate(model, ids, cache)
    assert (cache.get_seq_length(), held_pages(cache)) == (12, 6)
    cache.crop(-3)
    cache.batch_select_indices(torch.tensor([1]))
    want = generate(model, ids[1:], transformers.DynamicCache(config=model.config))
    assert torch.equal(generate(model, ids[1:], cache), want)
    with pytest.raises(CapacityError):
        generate(model, prompts(1, 40), KVCoreCache(model.config, page_size=4, num_pages=7))


def test_memory_of_the_pool_is_taken_when_it_is_written() -> None:
    before = _resident()
    caches = []
    for _ in range(4):
        cache = KVCoreCache(make_config("llama"), page_size=16, available_cache_memory=1 << 30)
        cache.update(torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16), 0)
        caches.append(cache)
    assert _resident() - before < 512 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_examples_of_the_guide_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "drop_in_cache.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) == 3
    exec(re.sub(r"\bcache=", f"{CACHE}=", "\n".join(blocks)), {})
