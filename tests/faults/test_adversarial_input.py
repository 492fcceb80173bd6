# SPDX-License-Identifier: Apache-2.0
"""Inputs that break managers of this kind: extremes of size, order, identity and type."""

from __future__ import annotations

import decimal
import itertools
import random
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, make_context, make_manager, prefilled, put_in_cache
from foreign_context import Context

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

MILLION = 1_000_000


# -- sizes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("page_size", [1, 16, 128, 4096])
def test_prompt_of_a_million_tokens(page_size: int) -> None:
    pages = MILLION // page_size + 2
    manager = make_manager(page_size, pages, enable_runtime_checks=False)
    tokens = np.random.default_rng(0).integers(-(2**31), 2**31, MILLION, dtype=np.int32)
    context = make_context(tokens)
    manager.external_claim(context.request_id)
    assert manager.maybe_reserve(context)
    (entry,) = manager.fetch([context])
    assert entry.lookup_table.shape == (1, -(-MILLION // page_size))
    assert entry.max_lengths.tolist() == [[MILLION, MILLION]]
    context.update(1)
    manager.step([context])
    assert manager.match_prefix(tokens) == MILLION // page_size * page_size
    late = tokens.copy()
    late[MILLION // 2] ^= 1
    assert manager.match_prefix(late) == MILLION // 2 // page_size * page_size
    manager.release(context.request_id)
    other = make_context(late)
    manager.external_claim(other.request_id)
    plan = manager.plan(other)
    assert manager.maybe_reserve(other)
    assert other.start_idx == plan.hit_tokens
    assert 0 <= plan.hit_tokens - MILLION // 2 // page_size * page_size < page_size
    manager.release(other.request_id)
    manager.check_integrity()
    assert manager.num_free_blocks == pages


@pytest.mark.parametrize("page_size", [1, 2, 128])
def test_pool_of_one_page(page_size: int) -> None:
    manager = make_manager(page_size, 1)
    for n in range(30):
        context = claimed(manager, [n % 3] * page_size)
        rival = claimed(manager, [7])
        assert manager.maybe_reserve(context)
        assert manager.maybe_reserve(rival) is False
        assert manager.num_free_blocks == 0
        manager.fetch([context])
        context.update(5)
        manager.step([context])
        manager.release(rival.request_id)
        manager.release(context.request_id)
        assert manager.num_free_blocks == 1
        assert manager.match_prefix([n % 3] * page_size) == page_size
    too_long = claimed(manager, [1] * (page_size + 1))
    with pytest.raises(kvcore.CapacityError, match=r"\b2\b.*\b1\b"):
        manager.maybe_reserve(too_long)


def test_page_larger_than_anything() -> None:
    manager = make_manager(2**30, 3)
    batch = [claimed(manager, range(n)) for n in (1, 100, 7)]
    manager.fetch(batch)
    for context in batch:
        context.update(1)
    manager.step(batch)
    assert manager.num_free_blocks == 0
    assert [len(manager.get_req_blocks(c.request_id)) for c in batch] == [1, 1, 1]


def test_pool_of_a_million_pages_costs_nothing_until_used() -> None:
    manager = make_manager(16, MILLION, replicas=4, enable_runtime_checks=False)
    assert manager.num_free_blocks == 4 * MILLION
    put_in_cache(manager, range(100), replica_idx=3)
    assert manager.num_free_blocks == 4 * MILLION


@pytest.mark.parametrize("num_steps", [2**31, 2**62, 2**63 - 1, 2**70])
def test_absurd_number_of_steps(num_steps: int) -> None:
    manager = make_manager()
    context = claimed(manager, range(5))
    for call in (manager.maybe_reserve, lambda c, n: manager.fetch([c], n)):
        with pytest.raises((kvcore.CapacityError, ValueError, OverflowError)):
            call(context, num_steps)
    manager.check_integrity()
    assert manager.num_free_blocks == 16
    assert context.start_idx == 0


# -- identity ------------------------------------------------------------------------------------
class Clash:
    """An id with a constant hash, which is equal only to itself."""

    def __hash__(self) -> int:
        return 1


class Grumpy:
    """An id whose comparison raises."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("do not compare me")

    def __repr__(self) -> str:
        raise RuntimeError("do not print me either")


IDS: list[Any] = [
    0, -1, 2**80, "", "x", "\0", b"x", None, 1.5, float("nan"), float("inf"), ("x", 1), (), 3 + 4j,
    frozenset({1, 2}), decimal.Decimal("1.1"), range(3), int, len, Clash(), Clash(), "\ud800",
]  # fmt: skip


def test_any_hashable_is_a_request_id() -> None:
    manager = make_manager(4, 64)
    for name in IDS:
        assert not manager.contains(name)
        manager.external_claim(name)
        assert manager.contains(name)
    batch = [kvcore.TextGenerationContext(name, [i, 2, 3]) for i, name in enumerate(IDS)]
    manager.fetch(batch)
    pages = [manager.get_req_blocks(name)[0] for name in IDS]
    assert len(set(pages)) == len(IDS)
    for name in IDS:
        manager.release(name)
        with pytest.raises(kvcore.RequestNotFoundError):
            manager.release(name)
    assert manager.num_free_blocks == 64


def test_equal_ids_are_one_request() -> None:
    manager = make_manager()
    manager.external_claim(1)
    for same in (True, 1.0, np.int64(1)):
        assert manager.contains(same)
        with pytest.raises(kvcore.AlreadyClaimedError):
            manager.external_claim(same)
    manager.release(1.0)
    assert not manager.contains(1)


def test_id_that_raises_when_compared_or_printed() -> None:
    manager = make_manager()
    first, second = Grumpy(), Grumpy()
    manager.external_claim(first)
    assert manager.contains(first)
    for call in (manager.external_claim, manager.contains, manager.release):
        with pytest.raises(RuntimeError, match="compare"):
            call(second)
    manager.release(first)
    assert manager.num_free_blocks == 16


def test_name_taken_over_by_another_context() -> None:
    """Requests are identified by id: after a release the same id is another request."""
    manager = make_manager()
    old = prefilled(manager, range(10), request_id="name")
    manager.release("name")
    new = claimed(manager, range(50, 53), request_id="name")
    assert manager.maybe_reserve(new)
    assert len(manager.get_req_blocks("name")) == 1
    with pytest.raises(ValueError, match=r"start_idx is 10, but the 1 pages .* hold only 4 tokens"):
        manager.step([old])
    manager.check_integrity()


# -- order ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_releases_in_every_order(order: tuple[int, ...], dedup: bool) -> None:
    """Requests that share 0, 1, 2 and 3 pages with one another."""
    manager = make_manager(2, 24, dedup=dedup)
    prompts = [[1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 4, 4], [1, 1, 5, 5], [1, 1, 2, 2, 3, 3]]
    batch = [claimed(manager, prompt) for prompt in prompts]
    manager.fetch(batch)
    for context in batch:
        context.update(9)
    manager.step(batch)
    for index in order:
        manager.release(batch[index].request_id)
    assert manager.num_free_blocks == 24
    assert [manager.match_prefix(p) for p in prompts] == [6, 6, 4, 6]
    assert manager.maybe_reserve(claimed(manager, range(100, 148)))
    assert [manager.match_prefix(p) for p in prompts] == [0, 0, 0, 0]


def test_claims_and_releases_shuffled() -> None:
    manager = make_manager(4, 4096, max_batch_size=5000, enable_runtime_checks=False)
    draw = random.Random(1)
    names = list(range(4000))
    for _ in range(5):
        draw.shuffle(names)
        for name in names:
            manager.external_claim(name)
            assert manager.maybe_reserve(kvcore.TextGenerationContext(name, [name]))
        draw.shuffle(names)
        for name in names:
            manager.release(name)
    manager.check_integrity()
    assert manager.num_free_blocks == 4096


# -- types ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([2**31], ValueError),
        ([-(2**31) - 1], ValueError),
        (np.array([2**40]), ValueError),
        (np.zeros((1, 4), np.int32), ValueError),
        (np.zeros(4, np.float32), TypeError),
        (np.zeros(4, np.int8), TypeError),
        (np.zeros(4, np.uint32), TypeError),
        (np.zeros(4, "U3"), TypeError),
        (["1"], TypeError),
        ([1.0], TypeError),
        ("1234", TypeError),
        (7, TypeError),
        (None, TypeError),
    ],
)
def test_queries_take_tokens_as_contexts_do(tokens: Any, error: type[Exception]) -> None:
    manager = make_manager()
    for call in (manager.match_prefix, manager.pin):
        with pytest.raises(error):
            call(tokens)


def test_queries_take_lists_and_arrays_in_any_order_of_memory() -> None:
    manager = make_manager()
    put_in_cache(manager, range(8))
    wide = np.zeros((8, 3), np.int64)
    wide[:, 1] = range(8)
    frozen = np.arange(8, dtype=np.int32)
    frozen.flags.writeable = False
    for tokens in (list(range(8)), wide[:, 1], np.arange(7, -1, -1)[::-1], frozen, tuple(range(8))):
        assert manager.match_prefix(tokens) == 8
        manager.pin(tokens).release()


def test_batches_may_be_any_sequence() -> None:
    manager = make_manager()
    batch = [claimed(manager, range(5)), claimed(manager, range(7))]
    for kind in (tuple, list):
        assert manager.maybe_reserve_batch(kind(batch)) == 2
        assert manager.fetch(kind(batch))[0].cache_lengths.tolist() == [0, 0]
        assert manager.step(kind(batch)).shape == (0, 3)
        assert manager.get_data_parallel_splits(kind(batch)).tolist() == [0, 2]


def foreign(**values: Any) -> Any:
    context = Context("foreign", range(10))
    for name, value in values.items():
        setattr(context, name, value)
    return context


def test_foreign_context_may_lack_a_namespace() -> None:
    context = Context("foreign", range(10))
    del context.extra_key, context.cache_salt
    manager = make_manager()
    manager.external_claim("foreign")
    assert manager.maybe_reserve(context)
    assert manager.plan(context).fits
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    assert manager.match_prefix(range_of(10)) == 8


def range_of(n: int) -> Any:
    return np.arange(n, dtype=np.int32)


@pytest.mark.parametrize("missing", ["request_id", "start_idx", "active_idx"])
def test_context_without_a_part_of_the_protocol_is_refused(missing: str) -> None:
    context = Context("foreign", range(10))
    delattr(context, missing)
    manager = make_manager()
    manager.external_claim("foreign")
    for call in (manager.maybe_reserve, lambda c: manager.fetch([c]), lambda c: manager.step([c])):
        with pytest.raises((TypeError, AttributeError), match=missing):
            call(context)
    assert manager.num_free_blocks == 16
