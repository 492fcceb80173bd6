# SPDX-License-Identifier: Apache-2.0
"""The prefix cache: namespaces, pins, eviction order, partial reuse, reset."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, make_context, make_manager, prefilled, put_in_cache

PROMPT = list(range(12))


def hit_of(manager: kvcore.PagedKVCacheManager, tokens: list[int], **rest: Any) -> int:
    """Return the number of tokens that a new request reuses, and release the request."""
    context = claimed(manager, tokens, **rest)
    assert manager.maybe_reserve(context)
    manager.release(context.request_id)
    return context.start_idx


# -- namespaces ----------------------------------------------------------------------------------
NAMESPACES: list[tuple[str | None, str | None]] = [
    (None, None),
    ("", None),
    (None, ""),
    ("", ""),
    ("a", "b"),
    ("ab", ""),
    ("", "ab"),
    ("a", None),
    (None, "a"),
    ("b", "a"),
    ("a\0", "b"),
    ("a", "\0b"),
    ("None", None),
    ("x" * 1000, None),
    ("x" * 999 + "y", None),
    ("\ud800", None),
    ("\ud801", None),
    ("ä", None),
    ("a\u0308", None),
]


def test_no_two_namespaces_share_a_page() -> None:
    manager = make_manager(4, 4 * len(NAMESPACES))
    for count, (extra_key, cache_salt) in enumerate(NAMESPACES):
        names: Any = {"extra_key": extra_key, "cache_salt": cache_salt}
        assert manager.match_prefix(PROMPT, **names) == 0
        assert manager.get_or_recommend_replica(make_context(PROMPT, **names)) == 0
        context = prefilled(manager, PROMPT, **names)
        assert manager.metrics.cache_tokens == 0, (count, names)
        manager.release(context.request_id)
    for extra_key, cache_salt in NAMESPACES:
        names = {"extra_key": extra_key, "cache_salt": cache_salt}
        assert manager.match_prefix(PROMPT, **names) == 12
        assert hit_of(manager, PROMPT, **names) == 11
        with manager.pin(PROMPT, extra_key, cache_salt) as pinned:
            assert pinned.num_tokens == 12
    pages = [manager.match_prefix(PROMPT, *n, return_pages=True)[1] for n in NAMESPACES]
    assert len(set(np.concatenate(pages).tolist())) == 3 * len(NAMESPACES)


@pytest.mark.parametrize("position", [0, 1, 31, 62, 63])
def test_salts_that_differ_in_one_byte_are_different(position: int) -> None:
    salt = "0123456789abcdef" * 4
    other = salt[:position] + "!" + salt[position + 1 :]
    manager = make_manager()
    put_in_cache(manager, PROMPT, cache_salt=salt)
    assert hit_of(manager, PROMPT, cache_salt=other) == 0
    assert hit_of(manager, PROMPT, cache_salt=salt) == 11
    assert hit_of(manager, PROMPT, extra_key=salt) == 0


def test_empty_namespaces_cost_nothing() -> None:
    manager = make_manager(enable_runtime_checks=False)
    for n in range(20_000):
        assert manager.match_prefix(PROMPT, f"adapter {n}") == 0
        assert hit_of(manager, PROMPT, cache_salt=f"tenant {n}") == 0
    manager.check_integrity()
    assert manager.num_free_blocks == 16


@pytest.mark.parametrize("other", [{"extra_key": "lora"}, {"cache_salt": "tenant"}])
@pytest.mark.parametrize("verb", ["maybe_reserve", "plan", "maybe_reserve_batch", "fetch"])
def test_claim_stays_in_the_namespace_it_began_in(verb: str, other: dict[str, Any]) -> None:
    manager = make_manager(enable_runtime_checks=True)
    first = claimed(manager, PROMPT)
    assert manager.maybe_reserve(first)
    second = make_context(PROMPT, request_id=first.request_id, **other)
    before = (manager.num_free_blocks, manager.metrics, second.start_idx)
    call = getattr(manager, verb)
    with pytest.raises(ValueError, match=f"request {first.request_id!r}.*namespace.*claim again"):
        call(second if verb in ("maybe_reserve", "plan") else [second])
    assert (manager.num_free_blocks, manager.metrics, second.start_idx) == before
    manager.fetch([first])
    first.update(0)
    manager.step([first])
    assert manager.match_prefix(PROMPT) == len(PROMPT)
    assert manager.match_prefix(PROMPT, **other) == 0


# -- match ---------------------------------------------------------------------------------------
def test_match_counts_whole_pages_without_a_cap() -> None:
    manager = make_manager()
    put_in_cache(manager, PROMPT)
    for length in range(16):
        assert manager.match_prefix(list(range(length))) == min(length // 4 * 4, 12)
    assert manager.match_prefix([]) == 0
    assert manager.match_prefix([9, *PROMPT]) == 0
    assert manager.match_prefix([*PROMPT[:7], 99, *PROMPT[8:]]) == 4


def test_match_gives_the_pages() -> None:
    manager = make_manager()
    context = prefilled(manager, PROMPT)
    count, pages = manager.match_prefix(PROMPT, return_pages=True)
    assert count == 12
    assert pages.dtype == np.int32
    assert pages.tolist() == list(manager.get_req_blocks(context.request_id))[:3]
    count, pages = manager.match_prefix([99], return_pages=True)
    assert (count, len(pages), pages.dtype) == (0, 0, np.dtype(np.int32))


def test_match_plan_and_recommend_touch_nothing() -> None:
    """Queries do not refresh a prompt: the oldest prompt stays the next to be evicted."""
    manager = make_manager(4, 4)
    put_in_cache(manager, range(8))
    put_in_cache(manager, range(50, 58))
    waiting = claimed(manager, [*range(8), 99])
    for _ in range(5):
        assert manager.match_prefix(range_of(8)) == 8
        assert manager.plan(waiting).hit_tokens == 8
        assert manager.get_or_recommend_replica(make_context(range(8))) == 0
    put_in_cache(manager, range(70, 74))
    assert manager.match_prefix(range_of(8)) == 4
    assert manager.match_prefix(list(range(50, 58))) == 8


def range_of(n: int) -> Any:
    return np.arange(n, dtype=np.int32)


# -- eviction ------------------------------------------------------------------------------------
def test_pages_go_oldest_release_first_and_tail_before_head() -> None:
    manager = make_manager(4, 9)
    prompts = [list(range(n, n + 12)) for n in (0, 100, 200)]
    running = [prefilled(manager, p[:11]) for p in prompts]
    for index in (1, 0, 2):
        manager.release(running[index].request_id)
        assert manager.match_prefix(prompts[index]) == 8
    order = []
    for n in range(3, 9):
        context = claimed(manager, range(1000, 1000 + 4 * (n + 1)))
        assert manager.maybe_reserve(context)
        manager.release(context.request_id)
        order.append([manager.match_prefix(p) for p in prompts])
    assert order == [[8, 4, 8], [8, 0, 8], [4, 0, 8], [0, 0, 8], [0, 0, 4], [0, 0, 0]]
    assert manager.metrics.evicted_pages == 6


def test_reuse_makes_a_prompt_young_again() -> None:
    manager = make_manager(4, 4)
    put_in_cache(manager, range(8))
    put_in_cache(manager, range(50, 58))
    assert hit_of(manager, [*range(8), 99]) == 8
    put_in_cache(manager, range(70, 78))
    assert manager.match_prefix(range_of(8)) == 8
    assert manager.match_prefix(list(range(50, 58))) == 0


def test_shared_prefix_is_as_young_as_its_youngest_user() -> None:
    manager = make_manager(4, 6)
    put_in_cache(manager, [*range(8), *range(50, 54)])
    put_in_cache(manager, range(70, 74))
    put_in_cache(manager, [*range(8), *range(60, 64)])
    context = claimed(manager, range(200, 212))
    assert manager.maybe_reserve(context)
    assert manager.match_prefix([*range(8), *range(50, 54)]) == 8
    assert manager.match_prefix([*range(8), *range(60, 64)]) == 12
    assert manager.match_prefix(list(range(70, 74))) == 0


def test_pages_in_use_are_never_evicted() -> None:
    manager = make_manager(4, 6)
    running = prefilled(manager, range(8))
    for n in range(20):
        put_in_cache(manager, range(100 * n + 100, 100 * n + 108))
        assert manager.match_prefix(range_of(8)) == 8
    greedy = claimed(manager, range(5000, 5020))
    assert manager.maybe_reserve(greedy) is False
    manager.release(running.request_id)
    assert manager.maybe_reserve(greedy)


# -- pins ----------------------------------------------------------------------------------------
def test_pinned_pages_stay_and_are_not_free() -> None:
    manager = make_manager(4, 6)
    put_in_cache(manager, range(8))
    assert manager.num_free_blocks == 6
    with manager.pin(range_of(8)) as pinned:
        assert pinned.num_tokens == 8
        assert manager.num_free_blocks == 4
        for n in range(10):
            put_in_cache(manager, range(100 * n + 100, 100 * n + 108))
        assert manager.match_prefix(range_of(8)) == 8
        assert not manager.reset_prefix_cache()
        assert manager.match_prefix(range_of(8)) == 0
        assert manager.maybe_reserve(claimed(manager, range(500, 520))) is False
    assert manager.num_free_blocks == 6
    assert manager.maybe_reserve(claimed(manager, range(500, 520)))


def test_pin_covers_whole_cached_pages_only() -> None:
    manager = make_manager()
    put_in_cache(manager, range(8))
    for tokens, count in (([], 0), ([9], 0), (range(7), 4), (range(8), 8), (range(50), 8)):
        pinned = manager.pin(list(tokens))
        assert pinned.num_tokens == count
        assert manager.num_free_blocks == 16 - count // 4
        pinned.release()
    assert manager.num_free_blocks == 16


def test_pins_are_counted() -> None:
    manager = make_manager()
    put_in_cache(manager, PROMPT)
    pins = [manager.pin(PROMPT[:n]) for n in (4, 8, 12, 8, 4)]
    assert manager.num_free_blocks == 13
    for pinned, free in zip(pins, (13, 13, 14, 15, 16), strict=True):
        pinned.release()
        assert manager.num_free_blocks == free
        with pytest.raises(kvcore.InvalidHandleError):
            pinned.release()
    assert manager.num_free_blocks == 16


def test_pin_ends_when_the_block_raises() -> None:
    manager = make_manager()
    put_in_cache(manager, PROMPT)
    with pytest.raises(KeyError), manager.pin(PROMPT):
        raise KeyError
    assert manager.num_free_blocks == 16


def test_unpinning_counts_as_use() -> None:
    manager = make_manager(4, 4)
    put_in_cache(manager, range(8))
    put_in_cache(manager, range(50, 58))
    manager.pin(range_of(8)).release()
    put_in_cache(manager, range(70, 74))
    assert manager.match_prefix(range_of(8)) == 8
    assert manager.match_prefix(list(range(50, 58))) == 4


def test_pin_on_the_replica_asked_for() -> None:
    manager = make_manager(replicas=2)
    put_in_cache(manager, PROMPT, replica_idx=1)
    assert manager.pin(PROMPT).num_tokens == 0
    assert manager.match_prefix(PROMPT, replica_idx=0) == 0
    with manager.pin(PROMPT, replica_idx=1) as pinned:
        assert pinned.num_tokens == 12
        assert manager.num_free_blocks == 29
        assert not manager.reset_prefix_cache()
        assert manager.num_free_blocks == 29


def test_forgotten_pin_does_not_break_the_manager() -> None:
    manager = make_manager()
    put_in_cache(manager, PROMPT)
    pinned = manager.pin(PROMPT)
    del pinned
    gc.collect()
    manager.check_integrity()
    assert manager.match_prefix(PROMPT) == 12


# -- partial pages -------------------------------------------------------------------------------
@pytest.mark.parametrize("length", range(1, 14))
def test_hit_inside_a_page_is_copied(length: int) -> None:
    manager = make_manager()
    put_in_cache(manager, PROMPT)
    context = claimed(manager, [*PROMPT[:length], 99])
    plan = manager.plan(context)
    assert manager.maybe_reserve(context)
    expected = min(length, 12)
    assert (plan.hit_tokens, plan.copied_tokens) == (expected, expected % 4)
    assert context.start_idx == expected
    metrics = manager.metrics
    assert (metrics.cache_tokens, metrics.copied_tokens) == (expected, expected % 4)
    pages = list(manager.get_req_blocks(context.request_id))
    cached = manager.match_prefix(PROMPT, return_pages=True)[1].tolist()
    whole = expected // 4
    copies = [[0, cached[whole], pages[whole], expected % 4]] if expected % 4 else []
    assert manager.take_copies().tolist() == copies
    assert manager.take_copies().shape == (0, 4)


def test_best_of_many_siblings_is_copied() -> None:
    manager = make_manager(16, 64)
    for n in range(15):
        put_in_cache(manager, [*range(16), *range(100, 100 + n), *[-n - 1] * (16 - n)])
    for n in range(15):
        context = claimed(manager, [*range(16), *range(100, 100 + n), -n - 1, -99])
        assert manager.plan(context).copied_tokens == n + 1


def test_partial_reuse_can_be_switched_off() -> None:
    manager = make_manager(partial_page_reuse=False)
    put_in_cache(manager, PROMPT)
    assert hit_of(manager, [*PROMPT[:11], 99]) == 8
    assert manager.metrics.copied_tokens == 0
    assert manager.take_copies().shape == (0, 4)


def test_only_victim_being_the_source_drops_the_partial_hit() -> None:
    manager = make_manager(4, 3)
    put_in_cache(manager, range(8))
    context = claimed(manager, [0, 1, 2, 3, 4, 5, *[99] * 5])
    plan = manager.plan(context)
    assert (plan.hit_tokens, plan.copied_tokens, plan.new_pages) == (4, 0, 2)
    assert (plan.evicted_pages, plan.fits) == (1, True)
    assert manager.maybe_reserve(context)
    assert context.start_idx == 4
    assert manager.take_copies().shape == (0, 4)


# -- reset ---------------------------------------------------------------------------------------
def test_reset_forgets_all_pages_on_every_replica() -> None:
    manager = make_manager(replicas=3)
    for replica in range(3):
        put_in_cache(manager, PROMPT, replica_idx=replica)
    running = prefilled(manager, [*PROMPT[:4], *range(50, 58)], replica_idx=1)
    assert not manager.reset_prefix_cache()
    assert [manager.match_prefix(PROMPT, replica_idx=r) for r in range(3)] == [0, 0, 0]
    assert manager.match_prefix(running.tokens, replica_idx=1) == 0
    shared = claimed(manager, [*PROMPT[:4], 9], replica_idx=1)
    assert manager.maybe_reserve(shared)
    assert shared.start_idx == 0


# -- large trees ---------------------------------------------------------------------------------
def test_hundred_thousand_siblings_under_one_node() -> None:
    count, size = 100_000, 4
    manager = make_manager(size, count + 8, max_batch_size=8, enable_runtime_checks=False)
    put_in_cache(manager, [1, 2, 3, 4])
    draw = random.Random(5)
    for n in range(count):
        page = [n % 97, n // 97 % 97, n // 97**2, 5]
        put_in_cache(manager, [1, 2, 3, 4, *page])
    manager.check_integrity()
    for _ in range(2000):
        n = draw.randrange(count)
        page = [n % 97, n // 97 % 97, n // 97**2, 5]
        assert manager.match_prefix([1, 2, 3, 4, *page]) == 8
        context = claimed(manager, [1, 2, 3, 4, *page[:3], 6, 6])
        assert manager.plan(context).copied_tokens == 3
        manager.release(context.request_id)
    assert manager.num_free_blocks == count + 8
    big = claimed(manager, range(1000, 1000 + size * (count // 2)))
    assert manager.maybe_reserve(big)
    assert manager.metrics.evicted_pages >= count // 2 - 8
    manager.check_integrity()


def test_prompts_that_are_permutations_or_shifts_do_not_collide() -> None:
    """Sums, xors and rolling hashes of these pages are equal; their tokens are not."""
    manager = make_manager(4, 256)
    pages = [[1, 2, 3, 4], [4, 3, 2, 1], [2, 1, 4, 3], [0, 0, 0, 10], [10, 0, 0, 0], [0, 0, 0, 0]]
    pages += [
        [-1, -1, -1, -1],
        [2**31 - 1] * 4,
        [-(2**31)] * 4,
        [1 << 16, 0, 0, 0],
        [0, 1 << 16, 0, 0],
    ]
    for page in pages:
        for other in pages:
            assert manager.match_prefix([*page, *other]) < 8
            put_in_cache(manager, [*page, *other])
    for page in pages:
        for other in pages:
            assert manager.match_prefix([*page, *other]) == 8
