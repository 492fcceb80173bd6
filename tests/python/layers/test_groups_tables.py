# SPDX-License-Identifier: Apache-2.0
"""Pages and tables of bundles: the place of a layer's rows, hits, and freed pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from grouped_traffic import manager_of, params_of
from kvcore import PagedKVCacheManager, TextGenerationContext, ops
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow, State, bundles

FULL = FullAttention([0])


def claimed(manager: PagedKVCacheManager, name: str, tokens: list[int]) -> TextGenerationContext:
    manager.claim(name)
    return TextGenerationContext(name, tokens)


def finish(manager: PagedKVCacheManager, context: TextGenerationContext) -> None:
    context.update(9)
    manager.step([context])


def live(manager: PagedKVCacheManager, name: str, bundle: int) -> list[int]:
    """Return the columns of a table that have a page."""
    pages = manager.get_req_blocks(name, bundle)
    return [c for c, page in enumerate(pages) if page < manager.total_num_pages]


def fill(inputs: Any, layer: int, n: int, value: float) -> None:
    rows = np.full((n, 1, 4), value, np.float32)
    ops.append(inputs, layer, rows, -rows, inputs.row_offsets)


def test_layer_lies_in_the_pages_of_its_bundle_at_its_place_there() -> None:
    params = params_of(FullAttention([1, 4]), SlidingWindow([0, 2, 3, 5], 64), page_size=4)
    made = bundles(params)
    assert [bundle.layers for bundle in made] == [(1, 4), (0, 2), (3, 5)]
    manager = manager_of(params, num_pages=20)
    (inputs,) = manager.fetch([claimed(manager, "a", list(range(6)))])
    pool: Any = inputs.blocks
    assert pool.shape == (20, 2, 2, 4, 1, 4)  # the widest bundle has two layers
    assert inputs.lookup_table is inputs.tables[0]
    for layer in range(6):
        fill(inputs, layer, 6, layer + 1)
    for table, bundle in zip(inputs.tables, made, strict=True):
        assert table.tolist() == [manager.get_req_blocks("a", made.index(bundle))]
        for place, layer in enumerate(bundle.layers):
            rows = pool[table[0], :, place]  # pages, K and V, tokens, heads, elements
            written = rows.transpose(1, 0, 2, 3, 4).reshape(2, 8, 4)[:, :6]
            assert (written == np.array([layer + 1, -layer - 1])[:, None, None]).all()


def test_symbols_name_every_table_and_the_slots_of_states() -> None:
    states = State([3], {"ssm": ((4,), "float32")}), State([4], {"conv": ((2,), "int8")})
    manager = manager_of(params_of(FULL, SlidingWindow([1, 2], 4), *states, num_layers=5))
    (symbols,) = manager.input_symbols()
    (inputs,) = manager.fetch([claimed(manager, "a", [1, 2, 3])])
    assert symbols.lookup_table is symbols.tables[0]
    for name in ("tables", "states"):
        described, arrays = getattr(symbols, name), getattr(inputs, name)
        assert len(described) == len(arrays) == (3 if name == "tables" else 2)
        for symbol, array in zip(described, arrays, strict=True):
            assert (symbol.dtype, len(symbol.shape)) == (array.dtype.name, array.ndim)
    assert [symbol.shape for symbol in symbols.tables] == [
        ("batch_size", "max_num_pages"),
        ("batch_size", "max_num_pages_1"),
        ("batch_size", "max_num_pages_2"),
    ]
    flat = manager_of(params_of(FULL, groups=None)).input_symbols()[0]
    assert (len(flat.tables), flat.states) == (1, ())


def test_views_name_the_layer_and_find_its_table() -> None:
    manager = manager_of(params_of(FULL, SlidingWindow([1, 2], 4)))
    context = claimed(manager, "a", list(range(7)))
    (inputs,) = manager.fetch([context])
    finish(manager, context)
    (inputs,) = manager.fetch([context])
    for layer in range(3):
        fill(inputs, layer, 1, layer + 10)
    (view,) = manager.fetch_collection([context])
    for layer in range(3):
        assert view.get_key_cache(layer).load(0, 0, 7, 0) == layer + 10
        assert view.get_value_cache(layer).load(0, 0, 7, 0) == -layer - 10
    assert view.get_key_cache(0).load(0, 0, 1, 0) == 0
    for layer in (1, 2):
        for verb in ("load", "store"):
            given = (0, 0, 1, 0) if verb == "load" else (0, 0, 1, 0, 5.0)
            with pytest.raises(IndexError, match=r"tok 1 of row 0 has no block: entry 0"):
                getattr(view.get_key_cache(layer), verb)(*given)


def test_what_holes_hide_is_not_read_or_written() -> None:
    manager = manager_of(params_of(FULL, SlidingWindow([1], 4)))
    context = claimed(manager, "a", list(range(12)))
    manager.fetch([context])
    finish(manager, context)
    (inputs,) = manager.fetch([context])
    assert (inputs.tables[1][0, :4] == manager.total_num_pages).all()
    ops.gather(inputs, 0)
    with pytest.raises(IndexError, match="has no page"):
        ops.gather(inputs, 1)
    rows, offsets = np.ones((12, 1, 4), np.float32), np.array([0, 12], np.uint32)
    with pytest.raises(IndexError, match="has no page"):
        ops.scatter(inputs, 1, rows, rows, offsets)


LAYER_VERBS: dict[str, Callable[[Any, Any], object]] = {
    "append": lambda inputs, rows: ops.append(inputs, 1, rows, rows, inputs.row_offsets),
    "scatter": lambda inputs, rows: ops.scatter(inputs, 1, rows, rows, inputs.row_offsets),
    "gather": lambda inputs, rows: ops.gather(inputs, 1),
    "attention": lambda inputs, rows: ops.attention(inputs, 1, rows, inputs.row_offsets),
    "cascade": lambda inputs, rows: ops.cascade_attention(inputs, 1, rows, inputs.row_offsets, []),
    "slots": lambda inputs, rows: ops.build_slots(inputs, inputs.row_offsets, layer=1),
}


@pytest.mark.parametrize("verb", LAYER_VERBS)
def test_a_layer_in_no_group_has_no_rows(verb: str) -> None:
    manager = manager_of(params_of(FULL, SlidingWindow([2], 4)))
    context = claimed(manager, "a", [1, 2, 3])
    (inputs,) = manager.fetch([context])
    rows = np.ones((3, 1, 4), np.float32)
    with pytest.raises(IndexError, match="layer 1 is in no attention group"):
        LAYER_VERBS[verb](inputs, rows)
    (view,) = manager.fetch_collection([context])
    with pytest.raises(IndexError, match="layer 1 is in no attention group"):
        view.get_key_cache(1)


WRITES: dict[str, Callable[[Any, Any], object]] = {
    "append": lambda inputs, rows: ops.append(inputs, 2, rows, rows, inputs.row_offsets),
    "scatter": lambda inputs, rows: ops.scatter(inputs, 2, rows, rows, inputs.row_offsets),
    "slots": lambda inputs, rows: ops.append_slots(
        inputs, 2, rows, rows, ops.build_slots(inputs, inputs.row_offsets, layer=2)
    ),
}


@pytest.mark.parametrize("verb", WRITES)
def test_a_layer_that_reads_those_of_another_reads_them_alone(verb: str) -> None:
    groups = FullAttention([0]), SlidingWindow([1], 4)
    manager = manager_of(params_of(*groups, shared={2: 1, 3: 0}, num_layers=4))
    (inputs,) = manager.fetch([claimed(manager, "a", list(range(6)))])
    for layer in range(2):
        fill(inputs, layer, 6, layer + 1)
    rows = np.ones((6, 1, 4), np.float32)
    before = np.array(inputs.blocks)
    with pytest.raises(ValueError, match=r"layer 2 reads .* of layer 1 and has none to write"):
        WRITES[verb](inputs, 7 * rows)
    assert (inputs.blocks == before).all()
    lengths = np.array([6], np.uint32)
    for layer, owner in ((2, 1), (3, 0)):
        for mine, those in zip(
            ops.gather(inputs, layer, lengths=lengths),
            ops.gather(inputs, owner, lengths=lengths),
            strict=True,
        ):
            np.testing.assert_array_equal(mine, those)
    with pytest.raises(ValueError, match="window is 5, layer 2 keeps 4 tokens"):
        ops.attention(inputs, 2, rows, inputs.row_offsets, window=5)


def test_tables_count_pages_of_their_own_size_and_hits_the_largest() -> None:
    params = params_of(
        FullAttention([0], n_kv_heads=1), SlidingWindow([1], 20, n_kv_heads=4), page_size=4
    )
    assert [bundle.page_size for bundle in bundles(params)] == [16, 4]
    manager = manager_of(params, partial_page_reuse=False, enable_runtime_checks=True)
    prompt = list(range(44))
    context = claimed(manager, "a", prompt)
    (inputs,) = manager.fetch([context])
    assert [table.shape for table in inputs.tables] == [(1, 3), (1, 12)]
    finish(manager, context)
    assert live(manager, "a", 1)[-5:] == [7, 8, 9, 10, 11]  # tokens from 25 on are read
    assert manager.match_prefix(prompt) == 32
    assert manager.match_prefix(prompt[:31]) == 16
    manager.release("a")
    again = claimed(manager, "b", [*prompt[:40], 900])
    assert manager.reserve(again)
    assert again.start_idx == 32
    assert set(live(manager, "b", 1)) >= set(range(3, 11))  # tokens 13 to 40


def test_any_free_page_serves_any_bundle() -> None:
    """No page is set aside: a window may take a full layer's old page, and the other way round."""
    manager = manager_of(params_of(FULL, SlidingWindow([1], 4)), num_pages=8)
    owners: list[set[int]] = [set(), set()]
    sizes = [3, 5, 1, 6, 4, 2, 7]
    for turn in range(120):
        if manager.contains(turn - 2):
            manager.release(turn - 2)
        context = TextGenerationContext(turn, [turn] * sizes[turn % 7], active_idx=1)
        manager.claim(turn)
        if manager.reserve(context):
            for bundle in range(2):
                owners[bundle] |= set(manager.get_req_blocks(turn, bundle)) - {8}
    assert owners[0] == owners[1] == set(range(8))


def test_swaps_name_a_bundle_only_where_there_are_several() -> None:
    for groups, columns in (((SlidingWindow([0, 1], 64),), 3), ((FULL, SlidingWindow([1], 64)), 4)):
        manager = manager_of(params_of(*groups))
        contexts = [claimed(manager, name, list(range(6))) for name in "ab"]
        manager.fetch(contexts)
        for context in contexts:
            context.update(9)
        swaps = manager.step(contexts)
        assert (len(swaps), swaps.shape[1]) == (3 * len(groups), columns)
        assert swaps.dtype == np.int32
        assert manager.step(contexts).shape == (0, columns)


@pytest.mark.parametrize(
    ("group", "skipped"),
    [
        (SlidingWindow([1], 4), {0: 0, 4: 1, 5: 2, 6: 3, 7: 4, 11: 8}),
        (ChunkedLocal([1], 8), {0: 0, 7: 0, 8: 8, 13: 8, 16: 16}),
    ],
)
def test_a_page_comes_back_in_the_step_that_no_token_of_it_outlives(
    group: Any, skipped: dict[int, int]
) -> None:
    manager = manager_of(params_of(FULL, group), enable_runtime_checks=True)
    context = claimed(manager, "a", list(range(20)))
    context.active_idx = 1
    seen = {}
    for n in range(17):
        assert context.start_idx == n
        first = group.skipped_tokens(n)
        seen[n] = first
        assert all(column >= first // 2 for column in live(manager, "a", 1)), n
        manager.fetch([context])
        assert live(manager, "a", 1) == list(range(first // 2, n // 2 + 1))
        free, given_back = manager.num_free_blocks, manager.group_metrics[1].given_back
        finish(manager, context)
        context.active_idx = n + 2
        left = group.skipped_tokens(n + 1) // 2 - first // 2
        assert manager.group_metrics[1].given_back == given_back + left
        assert manager.num_free_blocks == free + left  # cached, and evictable
    assert {n: seen[n] for n in skipped} == skipped


def test_what_a_window_has_left_is_no_longer_the_requests_and_serves_others() -> None:
    manager = manager_of(params_of(FULL, SlidingWindow([1], 4)), num_pages=40)
    context = claimed(manager, "a", list(range(20)))
    manager.fetch([context])
    finish(manager, context)
    assert live(manager, "a", 1) == [8, 9]
    assert manager.match_prefix(list(range(6))) == 6
    other = claimed(manager, "b", [*range(6), 50, 51])
    assert manager.reserve(other)
    assert (other.start_idx, live(manager, "b", 1)) == (6, [1, 2, 3])
    manager.release("b")
    # Every request can use its room: 20 free pages, and the 8 unread pages.
    assert manager.num_free_blocks == 40 - 10 - 2
    assert manager.reserve(claimed(manager, "c", list(range(100, 128))))
    assert manager.match_prefix(list(range(6))) == 0
    assert manager.match_prefix(list(range(20))) == 20


def test_a_repeated_prompt_of_three_bundles_holds_the_end_of_windows() -> None:
    manager = manager_of(params_of(FULL, SlidingWindow([1, 2], 32), page_size=16))
    first = claimed(manager, "a", list(range(55)))
    assert manager.reserve(first)
    assert [live(manager, "a", b) for b in range(3)] == [[0, 1, 2, 3]] * 3
    manager.fetch([first])
    finish(manager, first)
    manager.release("a")
    again = claimed(manager, "b", [*range(48), 900, 901, 902, 903, 904])
    assert (manager.plan(again).hit_tokens, manager.plan(again).new_pages) == (48, 3)
    assert manager.reserve(again)
    assert [live(manager, "b", b) for b in range(3)] == [[0, 1, 2, 3], [1, 2, 3], [1, 2, 3]]


def test_windows_lost_under_full_pages_are_holes_that_a_later_prompt_fills() -> None:
    manager = manager_of(
        params_of(FULL, SlidingWindow([1], 4)), num_pages=64, partial_page_reuse=False
    )
    prompt = list(range(8))

    def matched() -> list[int]:
        return [manager.match_prefix(prompt[:n]) for n in (8, 6, 4)]

    def serve(name: str) -> int:
        context = claimed(manager, name, prompt)
        manager.fetch([context])
        start = context.start_idx
        finish(manager, context)
        manager.release(name)
        return start

    serve("a")
    assert matched() == [8, 6, 4]
    many = claimed(manager, "many", list(range(100, 196)))
    many.active_idx = 20
    assert manager.reserve(many)  # needs 58 pages, 56 are free
    manager.release("many")
    assert matched() == [8, 0, 0]
    assert manager.group_metrics[1].holes == 2
    assert serve("b") == 0  # one token must run, and a hit of 6 has a hole
    assert matched() == [8, 6, 4]
    assert (manager.group_metrics[1].holes, manager.group_metrics[1].filled) == (0, 2)


def test_a_pin_holds_what_a_hit_needs_and_no_more() -> None:
    manager = manager_of(params_of(FULL, SlidingWindow([1], 4)), num_pages=24)
    context = claimed(manager, "a", list(range(16)))
    manager.fetch([context])
    finish(manager, context)
    manager.release("a")
    with manager.pin(list(range(12))) as pinned:
        assert pinned.num_tokens == 12
        assert manager.num_free_blocks == 24 - 6 - 2
        many = claimed(manager, "b", [7] * 28)  # takes the rest: 14 full pages, 2 window pages
        many.active_idx = 4
        assert manager.reserve(many)
        assert manager.num_free_blocks == 0
        assert manager.match_prefix(list(range(16))) == 12
        assert manager.match_prefix(list(range(10))) == 0
        manager.release("b")
    assert manager.num_free_blocks == 24
