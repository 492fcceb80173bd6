# SPDX-License-Identifier: Apache-2.0
"""Windows that leave_windows gives back, and the pages of a hit in each bundle."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from builders import in_groups
from kvcore import (
    KVCacheParams,
    LayerOptions,
    PagedKVCacheManager,
    RequestNotFoundError,
    TextGenerationContext,
)
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow

NEVER = 2**63 - 1


def manager_of(*groups: Any, pages: int = 40, **options: Any) -> PagedKVCacheManager:
    params = KVCacheParams(
        "float32", 1, 1, len(groups), page_size=2, enable_prefix_caching=True, groups=groups
    )
    options = {"keep_windows": True, "reserve_chunks": True, "blocks": None} | options
    return PagedKVCacheManager(
        params, 4, 60, num_pages=pages, enable_runtime_checks=True, **in_groups(options)
    )


def run(manager: PagedKVCacheManager, context: Any, chunk: int) -> None:
    """Reserve and step a chunk before it has run, as engines that schedule ahead do."""
    context.active_idx = context.start_idx + chunk
    assert manager.reserve(context)
    manager.fetch([context])
    context.update(7)
    manager.step([context])


def held(manager: PagedKVCacheManager, name: object, bundle: int) -> list[bool]:
    return [page < manager.total_num_pages for page in manager.get_req_blocks(name, bundle)]


def test_step_keeps_what_windows_have_passed_until_they_are_left() -> None:
    manager = manager_of(FullAttention([0]), SlidingWindow([1], 4))
    context = TextGenerationContext("r", list(range(20)))
    manager.claim("r")
    run(manager, context, 12)
    assert held(manager, "r", 1) == [True] * 6
    assert manager.leave_windows("r", 6) == 7  # tokens 3 .. 5 are read: the first page holds 2
    assert held(manager, "r", 1) == [False, *[True] * 5]
    assert manager.leave_windows("r", 4) == 7  # fewer tokens give no page back
    assert manager.leave_windows("r", 12) == 13
    assert held(manager, "r", 1) == [False] * 4 + [True] * 2
    assert held(manager, "r", 0) == [True] * 6
    run(manager, context, 4)
    assert held(manager, "r", 1) == [False] * 4 + [True] * 4


def test_what_was_passed_but_not_left_can_be_gone_back_to() -> None:
    manager = manager_of(FullAttention([0]), SlidingWindow([1], 4))
    context = TextGenerationContext("r", list(range(20)))
    manager.claim("r")
    run(manager, context, 12)
    manager.leave_windows("r", 6)
    with pytest.raises(ValueError, match="cannot be truncated to 4 tokens"):
        manager.truncate("r", 4)
    manager.truncate("r", 6)
    assert held(manager, "r", 1) == [False, True, True]


@pytest.mark.parametrize("tokens", [-1, 13])
def test_counts_out_of_range_change_nothing(tokens: int) -> None:
    manager = manager_of(FullAttention([0]), SlidingWindow([1], 4))
    context = TextGenerationContext("r", list(range(20)))
    manager.claim("r")
    run(manager, context, 12)
    with pytest.raises(
        ValueError, match=rf"'r' cannot leave .* {tokens} tokens, must be 0 \.\. 12"
    ):
        manager.leave_windows("r", tokens)
    assert held(manager, "r", 1) == [True] * 6


def test_a_manager_whose_steps_leave_windows_says_so() -> None:
    manager = manager_of(FullAttention([0]), SlidingWindow([1], 4), keep_windows=False)
    manager.claim("r")
    with pytest.raises(ValueError, match="make the manager with keep_windows"):
        manager.leave_windows("r", 0)


def test_without_windows_there_is_never_anything_to_leave() -> None:
    params = KVCacheParams("float32", 1, 1, 1, page_size=2, enable_prefix_caching=True)
    manager = PagedKVCacheManager(
        params, 4, 60, num_pages=20, layers=LayerOptions(keep_windows=True)
    )
    manager.claim("r")
    assert manager.leave_windows("r", 0) == NEVER


def test_only_claimed_requests_leave_windows() -> None:
    manager = manager_of(FullAttention([0]), SlidingWindow([1], 4))
    with pytest.raises(
        RequestNotFoundError, match="request 'nobody' is not claimed; call claim first"
    ):
        manager.leave_windows("nobody", 0)


def test_what_is_not_stepped_yet_can_be_left_and_cached_without_it() -> None:
    """Tokens that an engine loads from elsewhere may leave the window before their step."""
    manager = manager_of(FullAttention([0]), SlidingWindow([1], 4))
    context = TextGenerationContext("r", list(range(20)))
    manager.claim("r")
    context.active_idx = 12
    manager.reserve(context)
    manager.leave_windows("r", 12)
    assert held(manager, "r", 1) == [False] * 4 + [True] * 2
    with pytest.raises(ValueError, match="windows have given their pages back"):
        manager.fetch([context])
    context.update(7)
    manager.step([context])
    manager.release("r")
    assert manager.match_prefix(list(range(12))) == 12
    assert manager.match_prefix(list(range(8))) == 0  # the pages of its window are gone


@pytest.mark.parametrize("drafts", [0, 2])
def test_drafts_are_kept_that_much_longer(drafts: int) -> None:
    manager = manager_of(FullAttention([0]), SlidingWindow([1], 4), max_draft_tokens=drafts)
    context = TextGenerationContext("r", list(range(20)))
    manager.claim("r")
    run(manager, context, 12)
    kept = drafts + 1 if drafts else 0
    assert manager.leave_windows("r", 4 + kept) == 5 + kept
    assert manager.leave_windows("r", 5 + kept) == 7 + kept


def test_pages_of_a_hit_are_those_that_a_request_with_it_has() -> None:
    groups = (FullAttention([0]), SlidingWindow([1], 4), ChunkedLocal([2], 8))
    manager = manager_of(*groups)
    tokens = list(range(20))
    context = TextGenerationContext("r", tokens)
    manager.claim("r")
    run(manager, context, 12)
    manager.release("r")
    found = [manager.match_prefix(tokens, return_pages=True, bundle=b) for b in range(3)]
    room = np.zeros(8, np.int32)
    again = manager.match_prefix(tokens, out=room, bundle=1)
    other = TextGenerationContext("s", tokens)
    manager.claim("s")
    assert manager.reserve(other, max_hit=12)
    for bundle, (hit, pages) in enumerate(found):
        assert hit == 12
        assert pages.tolist() == manager.get_req_blocks("s", bundle)[:6]
    assert again[1].tolist() == found[1][1].tolist()
    assert room[:6].tolist() == found[1][1].tolist()
    none = manager.total_num_pages
    assert [page == none for page in found[1][1]] == [True] * 4 + [False] * 2
    assert [page == none for page in found[2][1]] == [True] * 4 + [False] * 2


def test_pages_of_a_hit_in_smaller_pages() -> None:
    groups = (FullAttention([0], n_kv_heads=2), SlidingWindow([1], 6, n_kv_heads=1))
    manager = manager_of(*groups)
    tokens = list(range(20))
    context = TextGenerationContext("r", tokens)
    manager.claim("r")
    run(manager, context, 16)
    manager.release("r")
    hit, wide = manager.match_prefix(tokens, return_pages=True, bundle=0)
    with pytest.raises(ValueError, match=f"must have it for {len(wide)}"):
        manager.match_prefix(tokens, out=np.zeros(len(wide) - 1, np.int32), touch=True)
    other = TextGenerationContext("s", tokens)
    manager.claim("s")
    manager.reserve(other, max_hit=hit)
    for bundle in (0, 1):
        _, pages = manager.match_prefix(tokens, return_pages=True, bundle=bundle)
        assert pages.tolist() == manager.get_req_blocks("s", bundle)[: len(pages)]


@pytest.mark.parametrize("bundle", [-1, 2])
def test_only_bundles_that_exist_have_pages(bundle: int) -> None:
    manager = manager_of(FullAttention([0]), SlidingWindow([1], 4))
    with pytest.raises(IndexError, match=rf"bundle is {bundle}, must be 0 \.\. 1"):
        manager.match_prefix([1, 2, 3], return_pages=True, bundle=bundle)


def test_threads_may_leave_windows_of_requests_that_others_release() -> None:
    manager = manager_of(FullAttention([0]), SlidingWindow([1], 4), pages=400)
    begin = threading.Barrier(2)
    errors: list[BaseException] = []

    def leave() -> None:
        begin.wait()
        for n in range(300):
            try:
                manager.leave_windows("r", n % 13)
            except RequestNotFoundError:
                pass
            except ValueError as refused:
                if "0 .. " not in str(refused):
                    errors.append(refused)

    thread = threading.Thread(target=leave)
    thread.start()
    begin.wait()
    for seed in range(60):
        context = TextGenerationContext("r", [seed, *range(19)])
        manager.claim("r")
        try:
            run(manager, context, 12)
        except ValueError as refused:  # the other thread left its window between the calls
            assert "windows have given their pages back" in str(refused)
        manager.release("r")
    thread.join()
    assert not errors
    manager.check_integrity()
    assert manager.num_free_blocks == manager.total_num_pages
