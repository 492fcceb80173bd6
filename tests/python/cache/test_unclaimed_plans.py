# SPDX-License-Identifier: Apache-2.0
"""Plans without a claim, page ids from a given page on, and matches with lookahead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bounded_requests import PROMPT, claimed, serve
from builders import make_manager
from foreign_context import Context
from grouped_traffic import manager_of, params_of
from kvcore import (
    RequestNotFoundError,
    TextGenerationContext,
)
from kvcore.groups import FullAttention, SlidingWindow
from state_model import state_manager, state_params

# -- plans -----------------------------------------------------------------------------------------


def test_a_plan_needs_no_claim() -> None:
    manager = make_manager(num_pages=8, replicas=2, max_batch_size=2)
    serve(manager, PROMPT)
    for make in (TextGenerationContext, Context):
        context = make("a", PROMPT)
        plan = manager.plan(context)
        assert plan.hit_tokens == 19  # the hit on the best replica
        assert manager.plan(context, replica_idx=0) == plan
        assert manager.plan(context, replica_idx=1).hit_tokens == 0
        for index in (2, -1):
            with pytest.raises(IndexError, match="replica_idx is"):
                manager.plan(context, replica_idx=index)
        manager.claim("a", 1)
        assert manager.plan(context).hit_tokens == 0
        assert manager.plan(context, replica_idx=1) == manager.plan(context)
        with pytest.raises(ValueError, match="replica_idx is 0, but request 'a' is claimed on"):
            manager.plan(context, replica_idx=0)
        manager.release("a")
        with pytest.raises(RequestNotFoundError):
            manager.reserve(context)


def test_a_plan_of_an_unclaimed_request_is_what_its_claim_gets() -> None:
    key = [(2, 3, b"image")]
    params = params_of(FullAttention([0]), SlidingWindow([1], 6), page_size=4)
    managers = [
        make_manager(),
        manager_of(params, blocks=None),
        state_manager(state_params(interval=8), num_states=12),
    ]
    for manager in managers:
        for rest in ({}, {"extra_keys": key}, {"cache_salt": "b"}):
            serve(manager, PROMPT, 8)
            context: Any = TextGenerationContext("a", PROMPT, **rest)
            manager.claim("a")
            assert manager.reserve(context)
            manager.fetch([context])
            context.update(7)
            manager.step([context])
            manager.release("a")
            again = TextGenerationContext("b", PROMPT, active_idx=18, **rest)
            options: dict[str, Any] = {"max_hit": 13, "keep_free": 3, "must_fit": 30}
            plan, bounded = manager.plan(again), manager.plan(again, **options)
            manager.claim("b")
            assert (plan, bounded) == (manager.plan(again), manager.plan(again, **options))
            assert plan.fits
            free = manager.num_free_blocks
            assert manager.reserve(again, **options)
            assert free - manager.num_free_blocks == bounded.new_pages + bounded.evictable_hit_pages
            manager.release("b")


def test_a_full_replica_still_plans() -> None:
    manager = make_manager(max_batch_size=1)
    claimed(manager)
    assert manager.plan(TextGenerationContext("b", PROMPT)).fits


# -- added options ---------------------------------------------------------------------------------


def test_page_ids_from_one_on() -> None:
    manager = make_manager()
    context = claimed(manager)
    assert manager.reserve(context)
    pages = manager.get_req_blocks("a")
    for first in range(8):
        assert manager.get_req_blocks("a", first=first) == pages[first:]
    manager.fetch([context])
    context.update(7)
    assert manager.reserve(context)
    assert manager.get_req_blocks("a", first=len(pages)) == manager.get_req_blocks("a")[5:]
    with pytest.raises(ValueError, match="first is -1, must be at least 0"):
        manager.get_req_blocks("a", first=-1)


def test_page_ids_from_one_on_of_each_bundle() -> None:
    params = params_of(FullAttention([0]), SlidingWindow([1], 6), page_size=4)
    manager = manager_of(params, blocks=None)
    context = claimed(manager)
    assert manager.reserve(context)
    manager.fetch([context])
    context.update(7)
    manager.step([context])
    for bundle in (0, 1):
        pages = manager.get_req_blocks("a", bundle)
        for first in range(len(pages) + 2):
            assert manager.get_req_blocks("a", bundle, first=first) == pages[first:]


def test_match_looks_ahead_and_writes_where_it_is_told() -> None:
    manager = make_manager()
    serve(manager, PROMPT)
    tokens = [*PROMPT[:10], 99, 99]
    pages = manager.match_prefix(tokens, return_pages=True)[1].tolist()
    assert manager.match_prefix(tokens, lookahead=9) == (8, 2)
    assert manager.match_prefix(tokens, lookahead=1) == (8, 1)
    assert manager.match_prefix([5, 6], lookahead=1) == (0, 0)
    assert manager.match_prefix(tokens, cache_salt="none", lookahead=1) == (0, 0)
    out = np.full(5, -7, np.int32)
    n, found = manager.match_prefix(tokens, out=out)
    assert (n, found.tolist(), out.tolist()) == (8, pages, [*pages, -7, -7, -7])
    assert found.base is out
    n, found, ahead = manager.match_prefix(tokens, out=out, lookahead=3, touch=True)
    assert (n, found.tolist(), ahead) == (8, pages, 2)
    n, found, ahead = manager.match_prefix(tokens, return_pages=True, lookahead=3)
    assert (n, found.tolist(), ahead) == (8, pages, 2)
    assert found.dtype == np.int32


def test_match_refuses_bad_room_before_it_is_a_use() -> None:
    manager = make_manager(num_pages=8)
    serve(manager, PROMPT[:4])
    serve(manager, PROMPT[8:12])
    rooms: list[tuple[Any, type[Exception]]] = [
        (np.zeros(0, np.int32), ValueError),
        (np.zeros(4, np.int64), TypeError),
        (np.zeros((2, 2), np.int32), TypeError),
        (np.zeros(8, np.int32)[::2], ValueError),
        ([0], TypeError),
    ]
    for room, kind in rooms:
        with pytest.raises(kind):
            manager.match_prefix(PROMPT, touch=True, out=room)
    with pytest.raises(ValueError, match="lookahead is -1, must be at least 0 tokens"):
        manager.match_prefix(PROMPT, touch=True, lookahead=-1)
    context = claimed(manager, tokens=list(range(100, 128)))
    assert manager.reserve(context)  # evicts the least recently used page
    assert manager.match_prefix(PROMPT) == 0
    assert manager.match_prefix(PROMPT[8:]) == 4


def test_match_looks_ahead_as_far_as_a_hit_goes() -> None:
    params = params_of(FullAttention([0]), SlidingWindow([1], 6), page_size=4)
    manager = manager_of(params, blocks=None)
    serve(manager, PROMPT)
    for n in range(1, 20):
        tokens = [*PROMPT[:n], 99]
        whole, ahead = manager.match_prefix(tokens, lookahead=4)
        hit = manager.plan(TextGenerationContext("a", tokens)).hit_tokens
        assert whole + ahead <= hit or (whole, ahead) == (hit, 0)
        assert whole == manager.match_prefix(tokens)
    states = state_manager(state_params(interval=8), num_states=12)
    serve(states, PROMPT, 8)
    assert states.match_prefix([*PROMPT[:18], 99], lookahead=4) == (16, 0)
