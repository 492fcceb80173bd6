# SPDX-License-Identifier: Apache-2.0
"""Images and other inputs that share token ids: the pages that requests with extra keys share."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, error_of, make_context, make_manager, prefilled, put_in_cache
from foreign_context import Context
from kvcore import ops
from kvcore.native.contexts import drop_unused, num_stand_ins
from tier_steps import moved, serve, tiered

SYSTEM = [1, 2, 3, 4, 5, 6]
IMAGE = 9
PROMPT = [*SYSTEM, *[IMAGE] * 6, 7, 8]  # the image starts inside page 1 of 4 tokens

Keys = list[tuple[int, int, bytes]]
CAT: Keys = [(6, 6, b"cat")]
DOG: Keys = [(6, 6, b"dog")]


class KeyedContext(Context):
    """A foreign context with extra keys."""

    def __init__(self, *args: Any, extra_keys: Keys | None = None, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.extra_keys = extra_keys


def hit_of(manager: Any, tokens: list[int], keys: Keys | None = None) -> int:
    """Return the tokens that a new request reuses, as planned and as reserved, and release it."""
    context = claimed(manager, tokens, extra_keys=keys)
    plan = manager.plan(context)
    assert manager.maybe_reserve(context)
    assert plan.hit_tokens == context.start_idx
    manager.release(context.request_id)
    return context.start_idx


# -- shared pages --------------------------------------------------------------------------------
def test_a_key_counts_from_its_start_on() -> None:
    manager = make_manager(4, 32)
    put_in_cache(manager, PROMPT, extra_keys=CAT)
    assert hit_of(manager, PROMPT, CAT) == 12
    assert hit_of(manager, PROMPT, DOG) == 6  # copies the start of page 1, up to the image
    assert hit_of(manager, PROMPT) == 6
    assert hit_of(manager, PROMPT, [(7, 5, b"cat")]) == 6
    assert hit_of(manager, PROMPT, [(6, 5, b"cat")]) == 6  # the other length makes it another image
    assert hit_of(manager, [*PROMPT[:13], 50], CAT) == 12
    manager = make_manager(4, 32, partial_page_reuse=False)
    put_in_cache(manager, PROMPT, extra_keys=CAT)
    assert [hit_of(manager, PROMPT, k) for k in (CAT, DOG, None)] == [12, 4, 4]


def test_keys_in_any_order_and_repeated_are_the_same() -> None:
    manager = make_manager(4, 32)
    keys = [(1, 2, b"x"), (6, 6, b"cat"), (6, 6, b"adapter"), (0, 14, b"")]
    put_in_cache(manager, PROMPT, extra_keys=keys)
    assert hit_of(manager, PROMPT, [*keys[::-1], keys[0]]) == 12
    assert hit_of(manager, PROMPT, keys[:3]) == 0
    assert hit_of(manager, PROMPT, [*keys[:2], keys[3]]) == 6
    context = make_context(PROMPT, extra_keys=[*keys, keys[2]])
    assert context.extra_keys == tuple(sorted(keys))
    assert make_context(PROMPT, extra_keys=[]).extra_keys is None


def test_keys_that_start_at_other_tokens_are_different() -> None:
    manager = make_manager(1, 32)
    put_in_cache(manager, [5, 6], extra_keys=[(0, 1, b"a")])
    assert manager.match_prefix([7, 6], extra_keys=[(0, 1, b"a")]) == 0
    put_in_cache(manager, [7, 6], extra_keys=[(0, 1, b"a")])
    assert manager.match_prefix([5, 6], extra_keys=[(0, 1, b"a")]) == 2


def test_match_pin_and_recommend_take_keys() -> None:
    manager = make_manager(4, 32, replicas=2)
    context = claimed(manager, PROMPT, replica_idx=1, extra_keys=CAT)
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    context.update(0)
    manager.step([context])
    pages = manager.get_req_blocks(context.request_id)
    manager.release(context.request_id)

    def matched(keys: Any, tokens: Any = PROMPT) -> Any:
        return manager.match_prefix(tokens, replica_idx=1, extra_keys=keys)

    assert [matched(k) for k in (CAT, DOG, None)] == [12, 4, 4]
    assert matched(CAT, PROMPT[:8]) == 8  # the prefix ends inside the image
    found = manager.match_prefix(PROMPT, replica_idx=1, extra_keys=CAT, return_pages=True)
    assert (found[0], found[1].tolist()) == (12, pages[:3])
    with manager.pin(PROMPT, replica_idx=1, extra_keys=CAT) as pinned:
        assert pinned.num_tokens == 12
    with manager.pin(PROMPT, replica_idx=1, extra_keys=DOG) as pinned:
        assert pinned.num_tokens == 4
    put_in_cache(manager, PROMPT[:8])
    asked: list[Any] = [
        make_context(PROMPT, extra_keys=CAT),
        make_context(PROMPT, extra_keys=DOG),
        make_context(PROMPT),
        KeyedContext("k", PROMPT, extra_keys=CAT),
        Context("c", PROMPT),
    ]
    assert [manager.get_or_recommend_replica(c) for c in asked] == [1, 0, 0, 1, 0]


def test_questions_leave_nothing_behind() -> None:
    manager = make_manager(4, 32)
    drop_unused()
    before = num_stand_ins()
    assert manager.match_prefix(PROMPT, extra_keys=CAT) == 0
    put_in_cache(manager, PROMPT, extra_keys=CAT)
    drop_unused()
    known = num_stand_ins()
    manager.match_prefix(PROMPT, extra_keys=[(6, 6, b"never seen")])
    manager.get_or_recommend_replica(KeyedContext("k", PROMPT, extra_keys=[(6, 6, b"nor this")]))
    assert num_stand_ins() == known
    assert known <= before + 1


def test_what_was_written_for_other_images_is_told_apart_by_dedup() -> None:
    manager = make_manager(4, 32)
    contexts = [claimed(manager, PROMPT, extra_keys=k) for k in (CAT, DOG, CAT)]
    assert manager.maybe_reserve_batch(contexts) == 3  # the requests share no page
    manager.fetch(contexts)
    kvcore.update_batch(contexts, [0, 0, 0])
    swaps = manager.step(contexts)
    assert swaps[:, :2].tolist() == [[1, 0], [2, 0], [2, 1], [2, 2]]
    pages = [manager.get_req_blocks(c.request_id)[:3] for c in contexts]
    assert pages[0] == pages[2]
    assert pages[0][0] == pages[1][0]
    assert not set(pages[0][1:]) & set(pages[1][1:])
    groups = [(g.rows, g.num_tokens) for g in manager.shared_prefixes(contexts)]
    assert groups == [((0, 2), 12), ((0, 1, 2), 4)]


def test_reset_forgets_them() -> None:
    manager = make_manager(4, 32)
    put_in_cache(manager, PROMPT, extra_keys=CAT)
    manager.reset_prefix_cache()
    assert manager.match_prefix(PROMPT, extra_keys=CAT) == 0
    put_in_cache(manager, PROMPT, extra_keys=DOG)
    assert manager.match_prefix(PROMPT, extra_keys=DOG) == 12


def test_the_host_tier_keeps_images_apart() -> None:
    manager, pool = tiered()
    prompt = [*SYSTEM, *[IMAGE] * 14]
    assert serve(manager, pool, prompt, extra_keys=[(6, 14, b"cat")]) == 0
    serve(manager, pool, range(100, 130))  # 8 pages: the device keeps no page of the first prompt
    assert manager.match_prefix(prompt, extra_keys=[(6, 14, b"cat")]) == 0
    drop_unused()
    assert serve(manager, pool, prompt, extra_keys=[(6, 14, b"dog")]) == 4
    serve(manager, pool, range(100, 130))
    assert serve(manager, pool, prompt, extra_keys=[(6, 14, b"cat")]) == 16
    assert moved(manager)[1] > 4
    serve(manager, pool, range(100, 130))
    assert serve(manager, pool, prompt, extra_keys=[(6, 14, b"dog")]) == 16


# -- contexts ------------------------------------------------------------------------------------
def test_tokens_are_the_real_ones_however_the_context_grows() -> None:
    context = make_context(PROMPT, extra_keys=CAT, active_idx=5)
    context.update(0)
    assert context.tokens.tolist() == PROMPT
    ids = list(PROMPT)
    snapshot = context.tokens
    for token in range(200):
        context.update(token)
        ids.append(token)
    context.extend([1, 2, 3])
    kvcore.update_batch([context], [4])
    ids += [1, 2, 3, 4]
    assert context.tokens.tolist() == ids
    assert snapshot.tolist() == PROMPT
    assert context.start_idx == len(ids) - 1
    assert context.extra_keys == tuple(CAT)


def test_packed_tokens_are_the_real_ones() -> None:
    manager = make_manager(4, 32)
    own = claimed(manager, PROMPT, extra_keys=CAT)
    foreign = KeyedContext("foreign", PROMPT, extra_keys=DOG)
    manager.claim("foreign")
    inputs = manager.fetch([own, foreign])
    packed = ops.pack(inputs[0], [own, foreign])
    assert packed.tokens.tolist() == [*PROMPT, *PROMPT]


def test_what_is_generated_behind_an_image_is_shared_by_its_requests_alone() -> None:
    manager = make_manager(4, 64)
    context = prefilled(manager, PROMPT, sampled=20, extra_keys=CAT)
    for token in range(21, 29):
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(token)
        manager.step([context])
    told = context.tokens.tolist()
    assert manager.match_prefix(told, extra_keys=CAT) == 20
    assert manager.match_prefix(told, extra_keys=DOG) == 4
    manager.release(context.request_id)
    assert hit_of(manager, [*told, 3], CAT) == 20


def test_chunks_of_a_keyed_prompt() -> None:
    manager = make_manager(4, 64)
    context = claimed(manager, PROMPT, active_idx=7, extra_keys=CAT)
    while context.end_idx == len(PROMPT):
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(0)
        manager.step([context])
        if context.active_idx > context.start_idx + 3:
            context.active_idx = context.start_idx + 3
    assert manager.match_prefix(PROMPT, extra_keys=CAT) == 12
    assert manager.match_prefix(PROMPT) == 4


def test_rewind_drops_the_keys_behind() -> None:
    keys = [(2, 3, b"a"), (6, 6, b"cat"), (13, 1, b"b")]
    context = make_context(PROMPT, extra_keys=keys)
    context.rewind(14)
    assert context.extra_keys == tuple(keys)
    context.rewind(8)
    assert context.extra_keys == tuple(keys[:2])  # the image's end is cut, its start is not
    context.rewind(6)
    assert context.extra_keys == tuple(keys[:1])
    context.extend(PROMPT[6:])
    manager = make_manager(4, 32)
    put_in_cache(manager, PROMPT, extra_keys=keys[:1])
    manager.claim(context.request_id)
    assert manager.maybe_reserve(context)
    assert context.start_idx == 12
    context.rewind(1)
    assert context.extra_keys is None
    assert context.tokens.tolist() == [1]


def test_truncate_and_write_again() -> None:
    manager = make_manager(4, 32)
    context = prefilled(manager, PROMPT, sampled=50, extra_keys=CAT)
    manager.truncate(context.request_id, 5)
    context.rewind(6)
    context.extend(PROMPT[6:])  # the same ids without an image
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    context.update(0)
    manager.step([context])
    assert manager.match_prefix(PROMPT) == 12
    assert manager.match_prefix(PROMPT, extra_keys=CAT) == 12
    assert manager.match_prefix(PROMPT, extra_keys=DOG) == 4


def test_a_context_moves_on_to_another_manager() -> None:
    context = make_context(PROMPT, extra_keys=CAT)
    for page_size in (4, 2):
        manager = make_manager(page_size, 32)
        manager.claim(context.request_id)
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(0)
        manager.step([context])
        assert manager.match_prefix(PROMPT, extra_keys=CAT) == 14 // page_size * page_size
        assert manager.match_prefix(PROMPT, extra_keys=DOG) == 6 // page_size * page_size
        manager.release(context.request_id)
        context.rewind(14)


def test_contexts_are_pickled_and_copied_with_their_keys() -> None:
    context = make_context(PROMPT, extra_keys=CAT)
    context.rewind(8)  # inside the image
    for again in (pickle.loads(pickle.dumps(context)), copy.copy(context)):
        assert again.extra_keys == context.extra_keys == tuple(CAT)
        assert again.tokens.tolist() == PROMPT[:8]


def test_foreign_contexts_with_keys() -> None:
    manager = make_manager(4, 32)
    first = KeyedContext("first", PROMPT, extra_keys=CAT)
    manager.claim("first")
    assert manager.maybe_reserve(first)
    manager.fetch([first])
    first.update(0)
    manager.step([first])
    assert hit_of(manager, PROMPT, CAT) == 12
    assert hit_of(manager, PROMPT, DOG) == 6
    second = KeyedContext("second", PROMPT, extra_keys=CAT)
    manager.claim("second")
    assert manager.maybe_reserve(second)
    assert second.start_idx == 12
    wrong = KeyedContext("wrong", PROMPT, extra_keys=[(6, 6, "cat")])  # type: ignore[list-item]
    manager.claim("wrong")
    assert isinstance(error_of(lambda: manager.maybe_reserve(wrong)), TypeError)


# -- forks ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("keys", [CAT, None, [*CAT, (14, 1, b"new")]])
def test_children_inherit_or_agree(keys: Keys | None) -> None:
    manager = make_manager(4, 32)
    parent = prefilled(manager, PROMPT, extra_keys=CAT)
    child = make_context([*PROMPT, 30, 31], extra_keys=keys)
    manager.fork(parent.request_id, child)
    assert child.extra_keys == tuple(keys or CAT)
    assert child.start_idx == 14
    assert manager.maybe_reserve(child)
    manager.fetch([child])
    child.update(0)
    manager.step([child])
    assert manager.match_prefix([*PROMPT, 30, 31], extra_keys=keys or CAT) == 16
    assert manager.match_prefix([*PROMPT, 30, 31], extra_keys=DOG) == 4


@pytest.mark.parametrize("make", [make_context, lambda t, **r: KeyedContext("child", t, **r)])
@pytest.mark.parametrize("keys", [DOG, [(6, 6, b"cat"), (2, 1, b"x")], [(13, 1, b"cat")]])
def test_children_with_other_keys_are_refused(make: Any, keys: Keys) -> None:
    manager = make_manager(4, 32)
    parent = prefilled(manager, PROMPT, extra_keys=CAT)
    good = make_context([*PROMPT, 9])
    child = make([*PROMPT, 30], extra_keys=keys)
    error = error_of(lambda: manager.fork(parent.request_id, good, child))
    assert isinstance(error, ValueError)
    assert "extra key" in str(error)
    assert not manager.contains(child.request_id)
    assert (good.extra_keys, good.start_idx, child.start_idx) == (None, 0, 0)


def test_a_child_with_keys_of_a_parent_without() -> None:
    manager = make_manager(4, 32)
    parent = prefilled(manager, PROMPT)
    child = make_context([*PROMPT, 30], extra_keys=CAT)
    assert isinstance(error_of(lambda: manager.fork(parent.request_id, child)), ValueError)
    late = make_context([*PROMPT, 30], extra_keys=[(14, 1, b"late")])
    manager.fork(parent.request_id, late)
    assert late.start_idx == 14


def test_a_fork_in_front_of_the_image_may_have_another() -> None:
    manager = make_manager(4, 32)
    parent = claimed(manager, PROMPT, active_idx=5, extra_keys=CAT)
    assert manager.maybe_reserve(parent)
    manager.fetch([parent])
    parent.update(0)
    manager.step([parent])
    children = [make_context(PROMPT, extra_keys=keys) for keys in (DOG, CAT, None)]
    manager.fork(parent.request_id, *children)
    assert [c.start_idx for c in children] == [5, 5, 5]
    assert [c.extra_keys for c in children] == [tuple(DOG), tuple(CAT), None]


# -- the tree without a manager ------------------------------------------------------------------
def test_a_tree_keeps_keys_apart() -> None:
    tree = kvcore.PrefixTree(page_size=2)
    assert tree.insert([1, 2, 5, 5], [7, 8], extra_keys=[(2, 2, b"a")]).tolist() == [7, 8]
    assert tree.insert([1, 2, 5, 5], [9, 10], extra_keys=[(2, 2, b"b")]).tolist() == [7, 10]
    assert tree.insert([1, 2, 5, 5], [11, 12]).tolist() == [7, 12]
    found = [
        tree.match([1, 2, 5, 5, 6], extra_keys=keys)[0].tolist()
        for keys in (
            [(2, 2, b"a")],
            [(2, 2, b"b")],
            None,
            [(2, 2, b"c")],
            [(2, 2, b"a"), (4, 1, b"")],
        )
    ]
    assert found == [[7, 8], [7, 10], [7, 12], [7], [7, 8]]
    drop_unused()
    assert tree.match([1, 2, 5, 5], extra_keys=[(2, 9, b"a")])[1].num_pages == 1
    assert tree.match([1, 2, 5], extra_keys=[(2, 2, b"a")])[1].num_pages == 1
    tree.check_integrity()
    np.testing.assert_array_equal(np.sort(tree.evict(9)), [7, 8, 10, 12])
