# SPDX-License-Identifier: Apache-2.0
"""A prompt waits for another prompt in computation that will save half of its tokens or more."""

from __future__ import annotations

from typing import Any

import pytest

from builders import make_manager
from kvcore import TextGenerationContext
from kvcore.scheduler import Request, Scheduler, is_soon_cached

PROMPT = list(range(40))


def request(name: str, tokens: list[int], **fields: Any) -> Request:
    return Request(TextGenerationContext(name, tokens, **fields), 2)


def waits(first: Request, second: Request) -> bool:
    """Return true if the second request waits while the prompt of the first runs."""
    manager = make_manager(4, 64)
    scheduler = Scheduler(manager)
    scheduler.add(first)
    assert scheduler.next_batch() is not None
    found = is_soon_cached(manager, second, scheduler.prefills)
    scheduler.close()
    return found


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (PROMPT, True),
        ([*PROMPT[:20], *range(100, 118)], True),  # 20 of 38
        ([*PROMPT[:20], *range(100, 122)], False),  # 20 of 42
        (PROMPT[:3], False),  # less than a page
        ([99, *PROMPT[1:]], False),
    ],
)
def test_half_of_the_tokens_that_are_not_cached_must_be_saved(
    tokens: list[int], expected: bool
) -> None:
    assert waits(request("a", PROMPT), request("b", tokens)) is expected


def test_prompts_of_different_keys_do_not_wait_for_each_other() -> None:
    for fields in ({"extra_key": "lora"}, {"cache_salt": "me"}, {"extra_keys": [(0, 4, b"x")]}):
        assert not waits(request("a", PROMPT), request("b", PROMPT, **fields))
        assert not waits(request("a", PROMPT, **fields), request("b", PROMPT))
        assert waits(request("a", PROMPT, **fields), request("b", PROMPT, **fields))


def test_what_is_cached_already_is_not_waited_for() -> None:
    manager = make_manager(4, 64)
    scheduler = Scheduler(manager)
    scheduler.add(request("a", PROMPT))
    while batch := scheduler.next_batch():
        scheduler.update(batch, [1] * len(batch.requests))
    scheduler.add(request("b", PROMPT))
    assert scheduler.next_batch() is not None
    assert not is_soon_cached(manager, request("c", PROMPT), scheduler.prefills)


def test_without_a_cache_or_a_context_nobody_waits() -> None:
    manager = make_manager(4, 64, caching=False)
    running = request("a", PROMPT)
    assert not is_soon_cached(manager, request("b", PROMPT), [running])
    later = Request(lambda: TextGenerationContext("b", PROMPT), 2, num_prompt=40)
    assert not is_soon_cached(make_manager(4, 64), later, [running])
