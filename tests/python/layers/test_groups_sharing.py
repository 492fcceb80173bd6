# SPDX-License-Identifier: Apache-2.0
"""Sharing when layers do not all keep every token: prefixes, namespaces, duplicates."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from grouped_traffic import SHAPES, Traffic, manager_of, params_of
from kvcore import PagedKVCacheManager, TextGenerationContext
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow, bundles

FULL = FullAttention([0])


def columns_in_common(
    manager: PagedKVCacheManager, pair: tuple[TextGenerationContext, TextGenerationContext]
) -> int:
    """Return the token count of whole written columns in which both requests read equal pages."""
    made = bundles(manager.params)
    size, none = max(bundle.page_size for bundle in made), manager.total_num_pages
    tables = [
        [manager.get_req_blocks(context.request_id, b) for b in range(len(made))]
        for context in pair
    ]

    def agree(column: int) -> bool:
        for b, bundle in enumerate(made):
            each = size // bundle.page_size
            for page in range(column * each, (column + 1) * each):
                one, other = (table[b][page] for table in tables)
                if one != other and none not in (one, other):
                    return False
        return True

    whole = range(min(context.start_idx for context in pair) // size)
    return size * sum(1 for _ in itertools.takewhile(agree, whole))


@pytest.mark.parametrize("shape", ["one width", "chunks", "no full group", "other heads"])
def test_a_prefix_is_shared_where_every_bundle_that_is_still_read_shares_it(shape: str) -> None:
    traffic, compared, shared_pairs = Traffic(SHAPES[shape], 5, num_pages=80), 0, 0
    manager = traffic.manager
    size = max(bundle.page_size for bundle in bundles(manager.params))
    for _ in range(100):
        traffic.act(["claim", "step", "step", "fork", "release"], 1)
        batch = list(traffic.live.values())
        told: dict[tuple[int, int], int] = {}
        for group in manager.shared_prefixes(batch):
            for pair in itertools.combinations(group.rows, 2):
                told[pair] = max(told.get(pair, 0), group.num_tokens)
        for pair in itertools.combinations(range(len(batch)), 2):
            one, other = batch[pair[0]], batch[pair[1]]
            common = columns_in_common(manager, (one, other))
            if one.tokens[:common].tolist() != other.tokens[:common].tolist():
                continue  # only windows, in which the two requests read different tokens
            found = told.get(pair, 0)
            assert found >= common
            assert found // size * size <= common
            compared += 1
            shared_pairs += found > 0
    assert compared > 100
    assert shared_pairs > 10
    traffic.end()


@pytest.mark.parametrize("group", [SlidingWindow([1], 4), ChunkedLocal([1], 8)])
def test_namespaces_share_no_page_of_any_bundle(group: Any) -> None:
    manager = manager_of(params_of(FULL, group))
    names: list[dict[str, Any]] = [
        {}, {"extra_key": "a"}, {"cache_salt": "a"}, {"extra_key": "a", "cache_salt": "b"}
    ]  # fmt: skip
    contexts = [TextGenerationContext(n, list(range(9)), **name) for n, name in enumerate(names)]
    for context in contexts:
        manager.claim(context.request_id)
        assert manager.reserve(context)
        assert context.start_idx == 0
        manager.fetch([context])
        context.update(1)
        assert len(manager.step([context])) == 0
    for bundle in range(2):
        pages = [
            page
            for context in contexts
            for page in manager.get_req_blocks(context.request_id, bundle)
            if page < manager.total_num_pages
        ]
        assert len(pages) == len(set(pages))
    assert [manager.match_prefix(list(range(9)), **name) for name in names] == [8] * 4
    assert manager.match_prefix(list(range(9)), extra_key="b") == 0


@pytest.mark.parametrize("dedup", [True, False])
def test_twins_have_one_page_of_each_bundle_unless_they_are_kept(dedup: bool) -> None:
    manager = manager_of(params_of(FULL, SlidingWindow([1], 4)), dedup=dedup)
    contexts = [TextGenerationContext(name, list(range(8))) for name in "ab"]
    for context in contexts:
        manager.claim(context.request_id)
    manager.fetch(contexts)
    for context in contexts:
        context.update(1)
    swaps = manager.step(contexts)
    tables = [[manager.get_req_blocks(name, bundle) for bundle in range(2)] for name in "ab"]
    assert (tables[0][0] == tables[1][0]) == dedup
    assert (tables[0][1][2:] == tables[1][1][2:]) == dedup
    assert swaps.shape == (8 if dedup else 0, 4)
    held = 64 - manager.num_free_blocks
    assert held == (4 + 2 if dedup else 8 + 4)
    for name in "ab":
        manager.release(name)
    assert manager.num_free_blocks == 64
    assert manager.match_prefix(list(range(8))) == 8


@pytest.mark.parametrize("group", [SlidingWindow([1], 8), ChunkedLocal([1], 8)])
@pytest.mark.parametrize("drafts", [1, 2, 5])
def test_pages_are_kept_as_long_as_drafts_may_be_cut(group: Any, drafts: int) -> None:
    """A request may rewind by `drafts` tokens from any position, and its pages are still held."""
    manager = manager_of(params_of(FULL, group), max_draft_tokens=drafts)
    context = TextGenerationContext("a", list(range(12)))
    manager.claim("a")
    for turn in range(24):
        manager.fetch([context])
        context.update(turn)
        manager.step([context])
        n, none = context.start_idx, manager.total_num_pages
        live = [c for c, page in enumerate(manager.get_req_blocks("a", 1)) if page != none]
        first = group.skipped_tokens(n - drafts) // 2
        assert live[0] <= first
        assert live[0] >= group.skipped_tokens(n - drafts - 1) // 2  # and no longer
        if turn % 3 == 2:
            for beyond in (n - drafts - 1, 0):
                with pytest.raises(ValueError, match=f"max_draft_tokens of {drafts}"):
                    manager.truncate("a", beyond)
            manager.truncate("a", n - drafts)
            context.rewind(n - drafts)
            context.extend(list(range(700, 700 + drafts + 2)))
    manager.release("a")
    assert manager.num_free_blocks == manager.total_num_pages
