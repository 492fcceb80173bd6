# SPDX-License-Identifier: Apache-2.0
"""KVCoreCache without a model: the calls that transformers makes, and the calls that it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import require

torch = require("torch")
transformers = require("transformers")

from cache_models import generate, make_config, make_model, prompts, seeded  # noqa: E402
from kvcore import Device  # noqa: E402
from kvcore.integrations.transformers import KVCoreCache, cache_pool, memory  # noqa: E402

LAYERS, HEADS, K_DIM, V_DIM = 2, 2, 5, 3


def small(**how: Any) -> KVCoreCache:
    return KVCoreCache(make_config("llama"), **({"page_size": 3, "num_pages": 200} | how))


def states(rows: int, tokens: int, *, seed: int = 0, dtype: Any = None) -> tuple[Any, Any]:
    made = torch.randn(rows, HEADS, tokens, K_DIM + V_DIM, generator=seeded(seed)).to(dtype)
    return made.split([K_DIM, V_DIM], dim=-1)  # type: ignore[no-any-return]


def filled(rows: int = 2, tokens: int = 7, **how: Any) -> KVCoreCache:
    cache = small(**how)
    for layer in range(LAYERS):
        cache.update(*states(rows, tokens, seed=layer), layer)
    return cache


# -- against DynamicCache ------------------------------------------------------------------------
STEPS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 8)),
    st.tuples(st.just("reorder_cache"), st.integers(0, 999)),
    st.tuples(st.just("batch_select_indices"), st.integers(0, 999)),
    st.tuples(st.just("batch_repeat_interleave"), st.integers(1, 3)),
    st.tuples(st.just("crop"), st.integers(0, 9)),
    st.tuples(st.just("deepcopy"), st.integers(0, 1)),
    st.tuples(st.just("reset"), st.just(0)),
)


class Twins:
    """A KVCoreCache and a DynamicCache that get the same calls."""

    def __init__(self, page_size: int) -> None:
        self.ours = small(page_size=page_size, num_pages=2000)
        self.theirs = transformers.DynamicCache(config=make_config("llama"))
        self.rows = 2
        self.seed = 0
        self.others: list[Any] = []

    def update(self, tokens: int) -> None:
        for layer in range(LAYERS):
            self.seed += 1
            given = states(self.rows, tokens, seed=self.seed)
            got = self.ours.update(*given, layer)
            want = self.theirs.update(*given, layer)
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])

    def reorder_cache(self, seed: int) -> None:
        order = torch.randint(0, self.rows, (self.rows,), generator=seeded(seed))
        self.both("reorder_cache", order)

    def batch_select_indices(self, seed: int) -> None:
        some = torch.randint(0, self.rows, (1 + seed % 4,), generator=seeded(seed))
        self.select(some)

    def select(self, some: Any) -> None:
        self.both("batch_select_indices", some)
        self.rows = len(some) if self.ours.get_seq_length() else self.rows

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.rows * repeats <= 12:
            self.both("batch_repeat_interleave", repeats)
            self.rows *= repeats if self.ours.get_seq_length() else 1

    def crop(self, tokens: int) -> None:
        # At length 0 DynamicCache and KVCoreCache keep their rows, but selecting does nothing.
        if tokens < self.ours.get_seq_length():
            self.both("crop", -tokens)

    def deepcopy(self, which: int) -> None:
        """Continue with the copy or with the original; the other must not change."""
        copies = copy.deepcopy(self.ours), copy.deepcopy(self.theirs)
        kept = self.ours, self.theirs
        if which:
            copies, kept = kept, copies
        self.others.append(copies)
        self.ours, self.theirs = kept

    def reset(self, _: int) -> None:
        self.ours.reset()
        # Not by its reset, which leaves zeros up to 5.17.
        self.theirs = transformers.DynamicCache(config=make_config("llama"))

    def both(self, verb: str, *arguments: Any) -> None:
        getattr(self.ours, verb)(*arguments)
        getattr(self.theirs, verb)(*arguments)

    def check(self) -> None:
        for ours, theirs in [(self.ours, self.theirs), *self.others]:
            assert ours.get_seq_length() == theirs.get_seq_length()
            assert ours.get_mask_sizes(4, 1) == theirs.get_mask_sizes(4, 1)
            assert ours.is_initialized == theirs.is_initialized
            for own, its in zip(ours.layers, theirs.layers, strict=True):
                if ours.get_seq_length():
                    assert torch.equal(own.keys, its.keys)
                    assert torch.equal(own.values, its.values)
        manager = self.ours.manager
        if manager is not None:
            manager.check_integrity()
            tables = [ours._rows.pages() for ours, _ in [(self.ours, None), *self.others]]
            pages = {page for rows in tables for row in rows for page in row}
            assert manager.total_num_pages - manager.num_free_blocks == len(pages)


@given(page_size=st.sampled_from([1, 3, 4, 16]), steps=st.lists(STEPS, max_size=12))
def test_any_calls_leave_what_dynamic_cache_has(page_size: int, steps: list[Any]) -> None:
    twins = Twins(page_size)
    twins.update(5)
    for verb, argument in steps:
        getattr(twins, verb)(argument)
        twins.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_elements_come_back_bit_for_bit(dtype: Any) -> None:
    cache = small()
    first, second = states(3, 4, dtype=dtype), states(3, 2, seed=1, dtype=dtype)
    first[0][0, 0, 0, 0] = torch.nan
    given_back = cache.update(*first, 0)
    assert given_back[0] is first[0]  # no earlier token, so no read
    for got, *parts in zip(cache.update(*second, 0), first, second, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), torch.cat(parts, 2).view(torch.uint8))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_states_may_lie_in_memory_in_any_order(order: tuple[int, ...]) -> None:
    cache = filled(2, 4)
    k, v = states(2, 3, seed=5)
    back = [order.index(axis) for axis in range(4)]
    strided = [x.permute(order).contiguous().permute(back) for x in (k, v)]
    got = cache.update(*strided, 0)
    assert torch.equal(got[0][:, :, 4:], k)
    assert torch.equal(got[1][:, :, 4:], v)


# -- the contract --------------------------------------------------------------------------------
def test_crop_takes_what_every_version_passes() -> None:
    cache = filled(2, 9)
    k = cache.layers[0].keys
    cache.crop(0)
    assert cache.get_seq_length() == 9
    cache.crop(torch.tensor(-2))  # off the end
    assert cache.get_seq_length() == 7
    cache.crop(20)  # to a length, as up to 5.17: beyond its end
    assert cache.get_seq_length() == 7
    cache.crop(4)
    assert cache.get_seq_length(1) == 4
    assert torch.equal(cache.layers[0].keys, k[:, :, :4])
    cache.crop(-100)
    assert (cache.get_seq_length(), cache.held_pages) == (0, 0)


def test_lengths_masks_and_flags() -> None:
    cache = filled(2, 7)
    assert (cache.get_max_length(), cache.get_max_cache_shape()) == (-1, -1)
    assert cache.layers[0].get_max_cache_shape() == cache.layers[0].get_max_length() == -1
    assert cache.get_mask_sizes(4, 1) == (11, 0)
    assert cache.get_query_offset() == cache.get_seq_length() == 7
    assert (cache.is_compileable, cache.is_croppable, cache.is_sliding) == (
        False,
        True,
        [False] * LAYERS,
    )
    assert cache.is_initialized
    assert len(cache) == LAYERS
    cache.activate_past_recording()
    cache.reset()
    assert not cache.is_initialized
    assert cache.get_seq_length() == 0
    assert cache.layers[0].keys is cache.layers[0].values is None


def test_a_pass_under_way_has_its_layers_one_behind_the_other() -> None:
    cache = filled(2, 7)
    cache.update(*states(2, 2), 0)
    assert (cache.get_seq_length(0), cache.get_seq_length(1)) == (9, 7)
    assert cache.get_mask_sizes(2, 1) == (9, 0)


def test_a_mask_selects_rows() -> None:
    cache = filled(3, 4)
    k = cache.layers[1].keys
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert torch.equal(cache.layers[1].keys, k[[0, 2]])


def test_layers_without_k_and_v_of_their_own_take_no_pages() -> None:
    """Gemma 3n: the last layers read the K and V of earlier layers."""
    config = transformers.Gemma3nTextConfig(num_hidden_layers=10, num_kv_shared_layers=4)
    cache = KVCoreCache(config)
    cache.update(*states(1, 3), 5)
    assert len(cache) == len(transformers.DynamicCache(config=config))
    assert cache.manager is not None
    assert cache.manager.params.num_layers == 6


# -- how large the pool is -----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "5000000", "memory.current": "1000000"}, 4_000_000),
        ({"memory.max": "5000000", "memory.current": "6000000"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "300000",
                "memory/memory.usage_in_bytes": "100000",
            },
            200_000,
        ),
        ({"memory.max": "max", "memory.current": "1000000"}, None),
        ({}, None),
    ],
)
def test_free_memory_is_what_the_control_group_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], free: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    found = memory.free_memory(Device("cpu"))
    assert found == free if free is not None else found > 10_000_000


@pytest.mark.parametrize(("free", "pages"), [(768_000, 1000), (1 << 50, (1 << 20) // 3), (0, 1)])
def test_without_a_size_the_pool_may_have_half_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, free: int, pages: int
) -> None:
    monkeypatch.setattr(cache_pool, "free_memory", lambda _: free)
    cache = filled(1, 3, num_pages=None)
    assert cache.manager is not None
    assert cache.manager.params.bytes_per_page == 384
    assert cache.manager.total_num_pages == pages


# -- refusals ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("MambaConfig", "recurrent state"),
        ("JambaConfig", "recurrent state"),
        ("Qwen3NextConfig", "recurrent state"),
        ("DeepseekV32Config", "indexer keys"),
        ("T5Config", "cross attention"),
        ("BartConfig", "cross attention"),
        ("Gemma4TextConfig", "differ in head_dim"),
    ],
)
def test_models_that_keep_more_are_refused_at_once(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        KVCoreCache(getattr(transformers, name)())


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ({"page_size": 0}, ValueError, "page_size is 0"),
        ({"num_pages": 0}, ValueError, "num_pages is 0"),
        ({"threads": 0}, ValueError, "threads is 0"),
        ({"page_size": 1.5}, TypeError, "page_size is a float"),
        ({"num_pages": 4, "available_cache_memory": 4}, ValueError, "at most one"),
    ],
)
def test_bad_settings_are_refused(how: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        small(**how)


def test_something_that_is_no_config_is_refused() -> None:
    with pytest.raises(TypeError, match="dict"):
        KVCoreCache({"num_hidden_layers": 2})


def test_memory_below_a_page_is_refused_when_its_size_is_known() -> None:
    cache = small(num_pages=None, available_cache_memory=100)
    with pytest.raises(ValueError, match="one page needs 384 bytes"):
        cache.update(*states(1, 2), 0)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (states(3, 1), ValueError, "3 rows, the cache holds 2"),
        (states(2, 0), ValueError, "0 tokens"),
        (states(2, 1, dtype=torch.float16), ValueError, "float16"),
        ((torch.ones(2, 1, 1, K_DIM), torch.ones(2, 1, 1, V_DIM)), ValueError, "1 heads of 5"),
        ((torch.ones(2, 2, 1, 4), torch.ones(2, 2, 1, 4)), ValueError, "2 heads of 4"),
        ((torch.ones(2, 2, 1, K_DIM), torch.ones(2, 2, 2, V_DIM)), ValueError, "equal but for dim"),
        ((torch.ones(2, 2, K_DIM), torch.ones(2, 2, V_DIM)), ValueError, "equal but for dim"),
        ([x.requires_grad_() for x in states(2, 1, seed=9)], ValueError, "requires grad"),
        ([x.to("meta") for x in states(2, 1)], TypeError, "on meta"),
    ],
)  # fmt: skip
def test_states_that_do_not_fit_change_nothing(
    given: Any, error: type[Exception], text: str
) -> None:
    cache = filled(2, 7)
    k = cache.layers[0].keys
    for _ in range(2):
        with pytest.raises(error, match=text):
            cache.update(*given, 0)
    assert (cache.get_seq_length(), cache.held_pages) == (7, 6)
    assert torch.equal(cache.layers[0].keys, k)
    cache.update(*states(2, 1), 0)
    assert cache.get_seq_length() == 8


def test_a_pass_that_broke_off_is_told_and_mended_by_crop() -> None:
    cache = filled(2, 7)
    before = [(layer.keys, layer.values) for layer in cache.layers]
    cache.update(*states(2, 3), 0)  # nothing for layer 1
    cache.update(*states(2, 1), 0)
    with pytest.raises(ValueError, match="crop"):
        cache.update(*states(2, 1), 1)
    cache.crop(7)
    for layer, (k, v) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, k)
        assert torch.equal(layer.values, v)
    cache.update(*states(2, 1), 0)
    cache.update(*states(2, 1), 1)


def test_rows_that_do_not_exist_are_refused() -> None:
    cache = filled(2, 7)
    with pytest.raises(IndexError):
        cache.batch_select_indices(torch.tensor([0, 2]))
    with pytest.raises(IndexError, match="row is 2"):
        cache.reorder_cache(torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="repeats is 0"):
        cache.batch_repeat_interleave(0)
    assert (cache.get_seq_length(), cache.held_pages) == (7, 6)


@pytest.mark.parametrize(
    ("verb", "arguments"), [("reset", []), ("crop", [-1]), ("reorder_cache", [torch.tensor([0])])]
)
def test_a_single_layer_cannot_lose_tokens_of_all(verb: str, arguments: list[Any]) -> None:
    cache = filled(1, 7)
    with pytest.raises(NotImplementedError, match="call it on the KVCoreCache"):
        getattr(cache.layers[0], verb)(*arguments)
    assert cache.get_seq_length(1) == 7


def test_generate_refuses_a_second_cache() -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(model, prompts(1), small(), cache_implementation="static")


def test_generate_refuses_another_batch() -> None:
    model = make_model("llama")
    cache = KVCoreCache(model.config)
    generate(model, prompts(2), cache)
    with pytest.raises(ValueError, match="3 rows, the cache holds 2"):
        generate(model, prompts(3, 40), cache)
