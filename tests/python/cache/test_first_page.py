# SPDX-License-Identifier: Apache-2.0
"""Page ids that start after the caller's reserved page ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, make_manager, make_params, prefilled, put_in_cache
from kvcore.groups import SlidingWindow


def test_pages_in_front_are_never_handed_out() -> None:
    manager = make_manager(4, 8, first_page=3)
    context = claimed(manager, range(32))
    assert manager.maybe_reserve(context)
    assert manager.get_req_blocks(context.request_id) == list(range(3, 11))
    assert (manager.total_num_pages, manager.num_free_blocks) == (8, 0)
    (inputs,) = manager.fetch([context])
    assert inputs.lookup_table[0].tolist() == list(range(3, 11))
    for verb in (manager.forget, manager.hold):
        for page in (0, 2, 11):
            with pytest.raises(kvcore.InvalidHandleError, match=r"3 \.\. 10"):
                verb([page])


def test_unused_entries_of_tables_name_no_page() -> None:
    manager = make_manager(4, 8, first_page=1)
    contexts = [claimed(manager, range(12)), claimed(manager, range(50, 54))]
    (inputs,) = manager.fetch(contexts)
    table = np.asarray(inputs.lookup_table)
    assert table[0, :3].tolist() == [1, 2, 3]
    assert table[1, 0] == 4
    assert (table[1, 1:] > 8).all()


@pytest.mark.parametrize("own", [False, True])
def test_pools_have_the_pages_in_front_too(*, own: bool) -> None:
    shape = (9, 2, 2, 4, 1, 2)
    blocks: Any = [np.zeros(shape, np.float32)] if own else "allocate"
    manager = make_manager(4, 8, blocks=blocks, first_page=1)
    pool = manager.get_device_tensors()[0] if hasattr(manager, "get_device_tensors") else None
    if pool is not None:
        assert pool.shape == shape
    first = prefilled(manager, range(6))
    second = claimed(manager, [0, 1, 2, 3, 9, 9])
    assert manager.maybe_reserve(second)
    assert 0 not in manager.get_req_blocks(second.request_id)
    (view,) = manager.fetch_collection([first])
    assert view is not None
    with pytest.raises(ValueError, match=r"blocks has shape \(8, 2, .* must be \(9, 2, "):
        make_manager(4, 8, blocks=[np.zeros((8, *shape[1:]), np.float32)], first_page=1)


def test_memory_holds_the_pages_in_front_too() -> None:
    params = make_params(4)
    size = 8 * params.bytes_per_page

    def made(first_page: Any) -> kvcore.PagedKVCacheManager:
        return kvcore.PagedKVCacheManager(
            params, 4, 64, available_cache_memory=size, first_page=first_page
        )

    assert made(1).total_num_pages == 7
    with pytest.raises(kvcore.CapacityError, match="first_page reserves 8 page ids"):
        made(8)
    for wrong in (-1, 1 << 40):
        with pytest.raises((ValueError, kvcore.CapacityError)):
            made(wrong)
    for odd in (True, 1.0, "1"):
        with pytest.raises(TypeError):
            made(odd)


def test_windows_name_no_page_by_the_id_behind_the_last() -> None:
    groups = (
        kvcore.groups.FullAttention((0,)),
        kvcore.groups.SlidingWindow((1,), window=4),
    )
    manager = make_manager(2, 16, first_page=1, params={"groups": groups})
    context = prefilled(manager, range(12))
    for _ in range(4):
        manager.fetch([context])
        context.update(1)
        manager.step([context])
    rows = [manager.get_req_blocks(context.request_id, bundle) for bundle in range(2)]
    assert all(1 <= page <= 16 for page in rows[0])
    assert {page for page in rows[1] if page > 16} == {17}


def test_pages_are_taken_again_from_the_last_on() -> None:
    manager = make_manager(4, 3, first_page=1)
    put_in_cache(manager, range(12))
    context = claimed(manager, range(50, 62))
    assert manager.maybe_reserve(context)  # evicts all pages
    assert manager.get_req_blocks(context.request_id) == [3, 2, 1]
    manager.release(context.request_id)
    context = claimed(manager, range(50, 62))
    assert manager.maybe_reserve(context)
    assert manager.get_req_blocks(context.request_id) == [1, 2, 3]


def test_what_windows_have_lost_is_the_id_behind_the_last_page() -> None:
    params = kvcore.KVCacheParams(
        *("float32", 1, 2, 2),
        page_size=4,
        enable_prefix_caching=True,
        groups=(SlidingWindow((0, 1), window=4),),
    )
    manager = kvcore.PagedKVCacheManager(params, 4, 64, num_pages=8, blocks=None, first_page=1)
    for name, tokens in (("a", range(16)), ("b", range(100, 124))):
        context = kvcore.TextGenerationContext(name, list(tokens))
        manager.claim(name)
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        if name == "a":
            context.update(1)
            manager.step([context])
    prompt, out = list(range(16)), np.zeros(8, np.int32)
    length, pages = manager.match_prefix(prompt, return_pages=True)
    assert (length, pages[:2].tolist()) == (16, [9, 9])
    for found in (
        manager.match_prefix(prompt, return_pages=True, lookahead=1),
        manager.match_prefix(prompt, out=out),
    ):
        assert np.array_equal(found[1], pages)
