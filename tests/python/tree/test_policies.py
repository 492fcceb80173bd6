# SPDX-License-Identifier: Apache-2.0
"""Eviction order of each policy, in a tree and in managers, and the choice of a policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from builders import make_manager
from grouped_traffic import manager_of, params_of
from kvcore import PrefixTree, TextGenerationContext, policies
from kvcore._core import CacheConfig
from kvcore.groups import FullAttention, SlidingWindow

A, B, C = 11, 12, 13
PRIORITIES = {A: 2, B: 0, C: 1}
NAMES = tuple(policies.BY_NAME)
CASES = [
    ("lru", (A, A, B, C), [A, B, C]),
    ("fifo", (A, A, B, C), [A, B, C]),
    ("lfu", (A, A, B, C), [B, C, A]),
    ("slru", (A, A, B, C), [B, C, A]),
    ("arc", (A, A, B, C), [B, C, A]),
    ("priority", (A, A, B, C), [B, C, A]),
    ("lru", (B, C, A, B), [C, A, B]),
    ("fifo", (B, C, A, B), [B, C, A]),
    ("lfu", (B, C, A, B), [C, A, B]),
]


@pytest.mark.parametrize(("eviction", "uses", "victims"), CASES)
def test_a_tree_evicts_branches_in_the_order_of_its_policy(
    eviction: str, uses: tuple[int, ...], victims: list[int]
) -> None:
    tree = PrefixTree(1, eviction=eviction)
    for token in uses:
        tree.insert([token], [token], priority=PRIORITIES[token])
    assert [tree.evict(1).item() for _ in victims] == victims
    tree.check_integrity()


def serve(mgr: Any, prompt: list[int], name: str, **terms: Any) -> None:
    """Serve a request that computes its prompt and one token."""
    context = TextGenerationContext(name, prompt, **terms)
    mgr.claim(name)
    assert mgr.reserve(context)
    context.update(7)
    mgr.step([context])
    mgr.release(name)


def victims_of(mgr: Any, known: dict[int, list[int]], count: int = 3) -> list[int]:
    """Return the prompts that lose pages first, while unseen requests take pages one by one."""
    gone: list[int] = []
    while len(gone) < count:
        name = f"unseen {mgr.num_free_blocks}"
        mgr.claim(name)
        assert mgr.reserve(TextGenerationContext(name, [900 + mgr.num_free_blocks]))
        gone += [each for each in known if each not in gone and not mgr.match_prefix(known[each])]
    return gone


@pytest.mark.parametrize(
    ("eviction", "uses", "victims"), [case for case in CASES if case[0] != "priority"]
)
def test_a_manager_counts_a_use_per_request(
    eviction: str, uses: tuple[int, ...], victims: list[int]
) -> None:
    mgr = make_manager(page_size=1, num_pages=8, eviction=eviction)
    # A prompt has one page, and a hit on it leaves one token to run.
    prompts = {token: [token, 5] for token in (A, B, C)}
    for i, token in enumerate(uses):
        serve(mgr, prompts[token], f"r{i}")
    assert victims_of(mgr, {token: [token] for token in prompts}) == victims


@pytest.mark.parametrize("eviction", ["lfu", "slru"])
def test_a_hit_is_a_use_where_its_request_evicts_the_rest_of_the_run(eviction: str) -> None:
    mgr = make_manager(page_size=1, num_pages=5, eviction=eviction)
    serve(mgr, [A, 5], "first")
    serve(mgr, [A, 6, 6, 6, 6], "second")
    assert mgr.metrics.cache_tokens == 1
    assert mgr.match_prefix([A, 5]) == 1
    serve(mgr, [C], "third")
    assert victims_of(mgr, {A: [A], C: [C]}, 2) == [C, A]


def run_prompt(mgr: Any, prompt: list[int], name: str) -> TextGenerationContext:
    """Compute a prompt and one token, and keep the claim."""
    context = TextGenerationContext(name, prompt)
    mgr.claim(name)
    decode(mgr, context)
    return context


def decode(mgr: Any, context: TextGenerationContext) -> None:
    assert mgr.reserve(context)
    context.update(7)
    mgr.step([context])


def evict(mgr: Any, prompt: list[int]) -> None:
    """Take pages until a prompt is not cached as a whole, and give the pages back."""
    taken = 0
    while mgr.match_prefix(prompt) == len(prompt):
        mgr.claim(f"taker {taken}")
        assert mgr.reserve(TextGenerationContext(f"taker {taken}", [900]))
        taken += 1
    for i in range(taken):
        mgr.release(f"taker {i}")


def test_cost_counts_each_page_of_a_run_from_the_floor_when_it_came() -> None:
    mgr = make_manager(page_size=1, num_pages=8, eviction=policies.Cost(attention_tokens=1000))
    serve(mgr, [C], "third")
    run_prompt(mgr, [B, 5], "held")
    context = run_prompt(mgr, [A], "grows")
    decode(mgr, context)
    evict(mgr, [C])  # the floor is the worth of a page of depth 1
    decode(mgr, context)
    mgr.release("grows")
    evict(mgr, [A, 7, 7])  # the last page came later than the previous page
    mgr.release("held")
    assert victims_of(mgr, {A: [A], B: [B]}, 2) == [A, B]


def test_a_manager_evicts_the_lowest_priority_first() -> None:
    mgr = make_manager(page_size=1, num_pages=8, eviction="priority")
    prompts = {token: [token, 5] for token in (A, B, C)}
    for i, token in enumerate((A, A, B, C)):
        serve(mgr, prompts[token], f"r{i}", priority=PRIORITIES[token])
    assert victims_of(mgr, {token: [token] for token in prompts}) == [B, C, A]


GROUPS: dict[str, Any] = {
    "flat": (FullAttention([0, 1]),),
    "window": (FullAttention([0]), SlidingWindow([1], 4)),
    "windows alone": (SlidingWindow([0, 1], 4),),
}


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("eviction", NAMES)
def test_whatever_a_policy_keeps_is_there_for_who_needs_it(eviction: str, kind: str) -> None:
    """A policy refuses no request: it evicts even pages of the highest priority, with any ttl."""
    rng, now = random.Random(eviction + kind), [0.0]
    mgr = manager_of(params_of(*GROUPS[kind]), 40, eviction=eviction, clock=lambda: now[0])
    mgr.claim("held")
    assert mgr.reserve(TextGenerationContext("held", [7] * 8))  # 4 pages, or 8 with windows
    for turn in range(60):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 16))]
        terms: dict[str, Any] = {"priority": rng.choice([0, 50, 100])}
        terms |= rng.choice([{}, {"ttl": 5}, {"retention": [(0, None, 100, 1e6)]}])
        serve(mgr, prompt, f"r{turn}", **terms)
        now[0] += rng.random()
        # All free pages; the window takes a page for its first chunk.
        free = mgr.num_free_blocks
        columns = {"flat": free, "window": free - 1, "windows alone": 20}[kind]
        unseen = TextGenerationContext("unseen", [50 + turn] * (2 * columns), active_idx=1)
        mgr.claim("unseen")
        plan = mgr.plan(unseen)
        assert plan.fits
        assert mgr.reserve(unseen)
        assert mgr.num_free_blocks == (free - 1 if kind == "windows alone" else 0)
        mgr.release("unseen")
        assert mgr.num_free_blocks == free


def test_reserving_again_and_matching_are_no_use() -> None:
    mgr = make_manager(page_size=1, num_pages=4, eviction="lfu")
    serve(mgr, [A, 5], "a")
    serve(mgr, [B, 5], "b")
    serve(mgr, [B, 5], "b again")
    # Matches do not count as uses, and all reservations of one request count as one use.
    held = TextGenerationContext("held", [A, 6])
    mgr.claim("held")
    for _ in range(5):
        assert mgr.reserve(held)
        assert mgr.match_prefix([A]) == 1
        mgr.plan(held)
    mgr.release("held")
    serve(mgr, [B, 5], "b once more")
    assert victims_of(mgr, {A: [A], B: [B]}, 1) == [A]


@pytest.mark.parametrize("eviction", NAMES)
def test_a_match_that_touches_is_a_use(eviction: str) -> None:
    tree = PrefixTree(1, eviction=eviction)
    for token in (A, B, C):
        tree.insert([token, token + 10], [token, token + 10])
    untouched = PrefixTree(1, eviction=eviction)
    for token in (A, B, C):
        untouched.insert([token, token + 10], [token, token + 10])
    pages, handle = tree.match([A, 99], touch=True)
    assert (pages.tolist(), handle.num_pages) == ([A], 1)
    untouched.match([A, 99])
    order = [tree.evict(1).item() for _ in range(6)]
    before = [untouched.evict(1).item() for _ in range(6)]
    assert order.index(A) > before.index(A) or eviction == "fifo"
    assert tree.match([1], touch=True)[0].size == 0


def test_a_touch_of_a_manager_is_a_use() -> None:
    for touch, victim in ((False, A), (True, B)):
        mgr = make_manager(page_size=1, num_pages=4, eviction="lru")
        serve(mgr, [A, 5], "a")
        serve(mgr, [B, 5], "b")
        assert mgr.match_prefix([A, 5], touch=touch) == 2
        assert mgr.match_prefix([A], touch=touch, return_pages=True)[0] == 1
        assert victims_of(mgr, {A: [A], B: [B]}, 1) == [victim]
    assert make_manager(page_size=1, num_pages=4).match_prefix([1], touch=True) == 0


def test_a_policy_is_a_frozen_value_with_a_name() -> None:
    known = policies.EvictionPolicy.__subclasses__()
    assert {each.name: each for each in known} == policies.BY_NAME
    for each in known:
        assert len({each(), each()}) == 1
        assert each.__name__ in policies.__all__
        PrefixTree(2, eviction=each())
        make_manager(num_pages=4, eviction=each()).check_integrity()
    with pytest.raises(AttributeError):
        policies.Cost().attention_tokens = 5  # type: ignore[misc]


def test_cost_says_what_its_number_may_be() -> None:
    assert policies.Cost(attention_tokens=16).attention_tokens == 16
    for wrong in (0, -1, 2**31):
        with pytest.raises(ValueError, match="attention_tokens is"):
            policies.Cost(attention_tokens=wrong)
    for odd in (1.5, "16", None, True):
        with pytest.raises(TypeError, match="attention_tokens is"):
            policies.Cost(attention_tokens=odd)  # type: ignore[arg-type]


def makers() -> list[Callable[[Any], object]]:
    return [
        lambda eviction: PrefixTree(2, eviction=eviction),
        lambda eviction: CacheConfig(eviction=eviction),
        lambda eviction: make_manager(num_pages=4, eviction=eviction),
    ]


@pytest.mark.parametrize("make", makers(), ids=["tree", "config", "paged"])
def test_what_is_no_policy_is_refused(make: Callable[[Any], object]) -> None:
    with pytest.raises(ValueError, match="eviction is 'best', must be one of 'lru', 'lfu'"):
        make("best")
    for odd in (None, 3, policies.LRU, policies.EvictionPolicy(), b"lru"):
        with pytest.raises(TypeError, match="eviction is"):
            make(odd)


def test_a_priority_is_within_its_bounds() -> None:
    tree = PrefixTree(1, eviction="priority")
    for wrong in (-1, 101, 2**40):
        with pytest.raises(ValueError, match=r"priority is -?\d+, must be 0 .. 100"):
            tree.insert([1], [1], priority=wrong)
    with pytest.raises(TypeError, match=r"priority is a .*, must be an int"):
        tree.insert([1], [1], priority=None)  # type: ignore[call-overload]
    assert tree.num_cached == 0


def test_pages_keep_the_highest_priority_they_were_given() -> None:
    tree = PrefixTree(1, eviction="priority")
    tree.insert([1, 2], [1, 2], priority=10)
    tree.insert([3], [3], priority=20)
    tree.insert([1], [1], priority=90)  # only the first page
    tree.insert([3], [3], priority=5)
    tree.insert([4], [4])
    assert [tree.evict(1).item() for _ in range(4)] == [2, 3, 4, 1]
