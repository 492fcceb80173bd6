# SPDX-License-Identifier: Apache-2.0
"""Thousands of extra keys: the cost grows with their number, and costlier keys are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from foreign_context import Context
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.keys import KeyChain, page_keys

MOST = 64
N = 2_000
TOKENS = [*range(N)]


def over(n: int, tokens: int = N) -> list[tuple[int, int, bytes]]:
    """Return keys that all reach to the end; the last key covers all tokens from its start on."""
    return [(i, tokens - i, b"%d" % i) for i in range(n)]


def manager_of() -> PagedKVCacheManager:
    params = KVCacheParams("float32", 1, 4, 1, page_size=16, enable_prefix_caching=True)
    return PagedKVCacheManager(params, 2, N + 64, num_pages=2 * N // 16, events=True)


CALLS: dict[str, Callable[[list[tuple[int, int, bytes]]], Any]] = {
    "context": lambda keys: TextGenerationContext("r", TOKENS, extra_keys=keys),
    "page_keys": lambda keys: page_keys(TOKENS, 16, extra_keys=keys),
    "chain": lambda keys: KeyChain(16).extend(TOKENS, keys),
    "match": lambda keys: manager_of().match_prefix(TOKENS, extra_keys=keys),
    "foreign": lambda keys: manager_of().plan(foreign(keys)),
}


def foreign(keys: list[tuple[int, int, bytes]]) -> Any:
    context: Any = Context("r", TOKENS)
    context.extra_keys = keys
    return context


@pytest.mark.parametrize("call", CALLS)
def test_more_keys_over_a_token_than_a_page_may_name_are_refused(call: str) -> None:
    CALLS[call](over(MOST))
    with pytest.raises(ValueError, match=r"65 keys over token 64, must be at most 64: every page"):
        CALLS[call](over(MOST + 1))
    huge = [(i, 2**63 - 1, b"%d" % i) for i in range(MOST + 1)]
    with pytest.raises(ValueError, match=r"keys over token 64|must be at most"):
        CALLS[call](huge)


def test_keys_that_end_make_room_for_others() -> None:
    """Keys may come in any order, if no token has more keys than the limit."""
    keys = [(i, MOST, b"%d" % i) for i in range(N - MOST)]
    context = TextGenerationContext("r", TOKENS, extra_keys=keys[::-1])
    assert context.extra_keys == tuple(keys)
    assert len(page_keys(TOKENS, 16, extra_keys=keys)) == N // 16
    with pytest.raises(ValueError, match="65 keys over token 500"):
        TextGenerationContext("r", TOKENS, extra_keys=[*keys, (500, 1, b"one more")])


def test_rewinding_token_by_token_leaves_the_keys_in_front() -> None:
    keys = [(i, 1, b"%d" % i) for i in TOKENS]
    context = TextGenerationContext("r", TOKENS, extra_keys=keys)
    before = context.extra_keys
    for n in range(N - 1, N - 300, -1):
        context.rewind(n)
        assert context.extra_keys == tuple(keys[:n])
    context.rewind(1)
    assert context.extra_keys == tuple(keys[:1])
    assert before == tuple(keys)  # a tuple that was read before does not change
    manager = manager_of()
    manager.claim("r")
    assert manager.maybe_reserve(context)
    assert manager.fetch([context])[0].cache_lengths.tolist() == [0]
