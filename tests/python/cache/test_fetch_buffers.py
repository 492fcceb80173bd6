# SPDX-License-Identifier: Apache-2.0
"""Arrays of a fetch: they stay unchanged while held, and reused buffers have correct contents."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, make_context, make_manager, prefilled
from kvcore.groups import FullAttention, SlidingWindow

ANY_ORDER_OF_CALLS = True  # the tests check only tables


def rebuilt(manager: kvcore.PagedKVCacheManager, rows: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return the table, built from scratch."""
    pages = [list(manager.get_req_blocks(c.request_id)) for c in rows]
    table = np.full((len(rows), max(map(len, pages), default=0)), manager.total_num_pages)
    for row, blocks in enumerate(pages):
        table[row, : len(blocks)] = blocks
    return table


def check(manager: kvcore.PagedKVCacheManager, rows: Sequence[Any], num_steps: int = 1) -> Any:
    (entry,) = manager.fetch(rows, num_steps)
    expected = rebuilt(manager, rows)
    assert entry.lookup_table.shape == expected.shape
    np.testing.assert_array_equal(entry.lookup_table, expected)
    assert entry.cache_lengths.tolist() == [c.start_idx for c in rows]
    return entry


def rows_of(manager: kvcore.PagedKVCacheManager, *lengths: int) -> list[Any]:
    return [claimed(manager, range(1000 * n, 1000 * n + n)) for n in lengths]


# -- recycled buffers ----------------------------------------------------------------------------
def test_request_moved_and_moved_back() -> None:
    manager = make_manager(4, 64)
    a, b, c = rows_of(manager, 13, 25, 9)
    for batch in ([a, b, c], [b, a, c], [a, b, c], [c, a], [a, b], [b], [a], [c, b, a], [a, b, c]):
        check(manager, batch)


def test_request_that_grew_while_it_was_away() -> None:
    manager = make_manager(1, 64)
    a, b = rows_of(manager, 3, 5)
    check(manager, [a, b])
    check(manager, [b])
    for _ in range(6):
        a.update(1)
        assert manager.maybe_reserve(a)
    check(manager, [a, b])
    check(manager, [b, a])
    a.update(1)
    check(manager, [b, a])


def test_page_swapped_while_the_request_was_away() -> None:
    manager = make_manager(4, 64)
    a, b, c = (claimed(manager, range(12)) for _ in range(3))
    check(manager, [a, b, c])
    check(manager, [c])
    for context in (a, b, c):
        context.update(1)
    manager.step([a, b])
    manager.step([c])
    check(manager, [b, c, a])
    check(manager, [a, b, c])


def test_rows_shrink_and_width_follows() -> None:
    manager = make_manager(1, 64)
    long, short, other = rows_of(manager, 40, 3, 5)
    check(manager, [short, long])
    assert check(manager, [short, other]).lookup_table.shape == (2, 5)
    check(manager, [other, short])
    assert check(manager, [short]).lookup_table.shape == (1, 3)
    manager.release(long.request_id)
    check(manager, [short, other])


def test_row_taken_by_a_new_request_of_the_same_name() -> None:
    manager = make_manager(4, 64)
    first = claimed(manager, range(20), request_id="name")
    other = claimed(manager, range(50, 60))
    check(manager, [first, other])
    manager.release("name")
    blocker = claimed(manager, range(70, 78))
    assert manager.maybe_reserve(blocker)
    again = claimed(manager, range(20, 32), request_id="name")
    check(manager, [again, other])


def test_growing_width_and_batch() -> None:
    manager = make_manager(1, 4096)
    (grows,) = rows_of(manager, 1)
    batch = [grows]
    for n in range(1, 40):
        for _ in range(n):
            grows.update(n)
        batch += rows_of(manager, n)[:1] if n % 3 == 0 else []
        check(manager, batch)


def test_draft_pages_reserved_ahead_are_in_the_table() -> None:
    manager = make_manager(2, 64)
    batch = rows_of(manager, 3, 4)
    assert check(manager, batch, num_steps=9).lookup_table.shape == (2, 6)
    assert check(manager, batch, num_steps=1).lookup_table.shape == (2, 6)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_agree_with_a_table_rebuilt(seed: int) -> None:
    """Held arrays of any age keep their contents; reused buffers have correct contents."""
    draw = random.Random(seed)
    manager = make_manager(draw.choice([1, 2, 3]), 120, enable_runtime_checks=seed % 4 == 0)
    alive: list[Any] = []
    held: list[tuple[Any, Any]] = []
    for turn in range(250):
        if len(alive) < 9 and draw.random() < 0.4:
            length = draw.randint(1, 12)
            alive.append(claimed(manager, [draw.randrange(2) for _ in range(length)]))
        if alive and draw.random() < 0.15:
            manager.release(alive.pop(draw.randrange(len(alive))).request_id)
        batch = draw.sample(alive, draw.randint(0, len(alive)))
        num_steps = draw.choice([1, 1, 4])
        try:
            entry = check(manager, batch, num_steps)
        except kvcore.InsufficientBlocksError:
            manager.release(alive.pop(0).request_id)
            continue
        if draw.random() < 0.3:
            array = draw.choice([entry.lookup_table, entry.cache_lengths, entry.max_lengths])
            kept = array[: draw.randint(0, len(array))] if draw.random() < 0.5 else array
            held.append((kept, np.array(kept)))
        del entry
        if len(held) > 5 or draw.random() < 0.1:
            held = held[draw.randint(0, 3) :]
        for context in batch:
            for _ in range(draw.choice([0, 1, num_steps])):
                context.update(draw.randrange(2))
        manager.step([c for c in batch if draw.random() < 0.8])
        for array, copy in held:
            np.testing.assert_array_equal(array, copy, f"turn {turn}, seed {seed}")


# -- held arrays ---------------------------------------------------------------------------------
def test_every_fetch_of_a_growing_request_can_be_kept() -> None:
    manager = make_manager(1, 512)
    context = claimed(manager, [5])
    kept = []
    for n in range(1, 300):
        (entry,) = manager.fetch([context])
        kept.append((n, entry, list(manager.get_req_blocks(context.request_id))))
        context.update(n)
        manager.step([context])
    for n, entry, pages in kept:
        assert entry.lookup_table.tolist() == [pages]
        assert entry.cache_lengths.tolist() == [n - 1]
        assert entry.max_lengths.tolist() == [[1, n]]


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "array": lambda array: array,
    "slice": lambda array: array[:],
    "memoryview": memoryview,
    "dlpack": np.from_dlpack,
}


@pytest.mark.parametrize("field", ["lookup_table", "cache_lengths"])
@pytest.mark.parametrize("form", HOLDERS)
def test_any_way_of_holding_an_array_counts(field: str, form: str) -> None:
    manager = make_manager(1, 64)
    rows = rows_of(manager, 4, 6)
    kept = HOLDERS[form](getattr(manager.fetch(rows)[0], field))
    expected = np.asarray(kept).tolist()
    gc.collect()
    for _ in range(6):
        for context in rows:
            context.update(1)
        rows.reverse()
        manager.fetch(rows)
    assert np.asarray(kept).tolist() == expected


def test_arrays_outlive_the_manager() -> None:
    manager = make_manager(4, 64, blocks="allocate")
    context = prefilled(manager, range(10))
    (entry,) = manager.fetch([context])
    pages = list(manager.get_req_blocks(context.request_id))
    entry.blocks[:] = 7
    blocks, table = entry.blocks, entry.lookup_table
    del manager, entry
    gc.collect()
    junk = [np.zeros((64, 2, 2, 4, 1, 2), np.float32) for _ in range(8)]
    assert (blocks == 7).all()
    assert table.tolist() == [pages]
    assert len(junk) == 8


def test_incremented_inputs_do_not_move_with_later_fetches() -> None:
    manager = make_manager(1, 64)
    rows = rows_of(manager, 4, 6)
    inputs = manager.fetch(rows, num_steps=2)
    later = manager.increment_cache_lengths(inputs, np.array([0, 4, 10], np.uint32))
    table = later[0].lookup_table.tolist()
    del inputs
    for _ in range(6):
        for context in rows:
            context.update(1)
        rows.reverse()
        manager.fetch(rows)
    assert later[0].cache_lengths.tolist() == [4, 6]
    assert later[0].lookup_table.tolist() == table


def test_writing_into_a_handed_out_array_does_not_reach_the_manager() -> None:
    manager = make_manager(1, 64)
    rows = rows_of(manager, 4, 6)
    (entry,) = manager.fetch(rows)
    pages = [list(manager.get_req_blocks(c.request_id)) for c in rows]
    if entry.cache_lengths.flags.writeable:
        entry.cache_lengths[:] = 63
        entry.max_lengths[:] = 63
    del entry
    assert [list(manager.get_req_blocks(c.request_id)) for c in rows] == pages
    for _ in range(4):
        check(manager, rows)


def test_failed_fetch_leaves_the_buffers_right() -> None:
    manager = make_manager(1, 16)
    small, large = rows_of(manager, 6, 9)
    check(manager, [small, large])
    late = claimed(manager, range(300, 305))
    with pytest.raises(kvcore.InsufficientBlocksError):
        manager.fetch([large, small, late])
    with pytest.raises(kvcore.RequestNotFoundError):
        manager.fetch([large, make_context([1])])
    check(manager, [small, large])
    check(manager, [large, small])


def test_failed_fetch_keeps_no_buffer() -> None:
    manager = make_manager(1, 16)
    (row,) = rows_of(manager, 6)
    late = claimed(manager, range(300, 314))
    address = manager.fetch([row])[0].lookup_table.ctypes.data
    with pytest.raises(kvcore.InsufficientBlocksError):
        manager.fetch([row, late])
    assert manager.fetch([row])[0].lookup_table.ctypes.data == address


def test_batch_list_is_read_again_when_its_contexts_have_changed() -> None:
    """The same list object with the same contexts can belong to other claims."""
    first, second = make_manager(), make_manager()
    batch = [prefilled(first, range(9)), prefilled(first, range(20, 30))]
    for context in batch:
        second.claim(context.request_id)
    first.fetch(batch)
    assert np.array(second.fetch(batch)[0].lookup_table).shape == (2, 3)
    second.release(batch[0].request_id)  # a new claim has other pages
    second.claim(batch[0].request_id)
    other = claimed(second, range(50, 54))
    assert second.reserve(other)
    (inputs,) = second.fetch(batch)
    assert inputs.lookup_table[0].tolist() == list(second.get_req_blocks(batch[0].request_id))
    (inputs,) = first.fetch(batch)
    assert inputs.lookup_table[0].tolist() == list(first.get_req_blocks(batch[0].request_id))


def test_context_at_the_address_of_one_that_is_gone() -> None:
    manager = make_manager(num_pages=64)
    names = [f"request-at-one-address-{i}" for i in range(32)]
    for i, name in enumerate(names):
        manager.claim(name)
        batch = [make_context(range(100 * i, 100 * i + 5), name)]
        (inputs,) = manager.fetch(batch)
        assert inputs.lookup_table[0].tolist() == list(manager.get_req_blocks(name))
        del batch


@pytest.mark.parametrize("seed", range(4))
def test_tables_of_bundles_are_held_one_by_one(seed: int) -> None:
    """Buffers are reused bundle by bundle, so that new pairs of buffers form."""
    draw = random.Random(seed)
    groups = [FullAttention((0,)), SlidingWindow((1,), 8)]
    manager = make_manager(4, 400, params={"num_layers": 2, "groups": groups})
    batch = rows_of(manager, 9, 14, 20)
    held: list[tuple[Any, Any]] = []
    for _ in range(200):
        tables = manager.fetch(batch)[0].tables
        for bundle, table in enumerate(tables):
            pages = [manager.get_req_blocks(c.request_id, bundle) for c in batch]
            expected = np.full(table.shape, manager.total_num_pages)
            for row, blocks in enumerate(pages):
                expected[row, : len(blocks)] = blocks
            np.testing.assert_array_equal(table, expected)
        if draw.random() < 0.6:
            table = draw.choice(tables)
            held.append((table, table.copy()))
        del table, tables
        while held and draw.random() < 0.5:
            array, copy = held.pop(draw.randrange(len(held)))
            np.testing.assert_array_equal(array, copy)
            del array
        if draw.random() < 0.5 and batch[0].end_idx < 200:
            for context in batch:
                context.update(1)
            manager.step(batch)


# -- tables of several bundles -------------------------------------------------------------------
@pytest.mark.parametrize("held", [(0,), (1,), (2,), (1, 2), (0, 2)], ids=str)
def test_tables_of_some_bundles_are_held_from_step_to_step(held: Sequence[int]) -> None:
    groups = [FullAttention([0]), SlidingWindow([1], 8), SlidingWindow([2], 3)]
    params = kvcore.KVCacheParams("float32", 1, 4, 3, page_size=4, groups=groups)
    manager = kvcore.PagedKVCacheManager(params, 4, 128, num_pages=90)
    context = kvcore.TextGenerationContext("r", list(range(10)))
    manager.claim("r")
    kept: list[Any] = []
    while context.end_idx < 60:
        (inputs,) = manager.fetch([context])
        found = [table[0].tolist() for table in inputs.tables]
        assert found == [manager.get_req_blocks("r", bundle=bundle) for bundle in range(3)]
        # The holder keeps reading its arrays: the next fetch writes other buffers.
        kept = [inputs.tables[bundle] for bundle in held]
        del inputs
        context.update(1)
        manager.step([context])
    assert len(kept) == len(held)
