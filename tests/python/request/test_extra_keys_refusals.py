# SPDX-License-Identifier: Apache-2.0
"""Extra keys: refused values, refusals that change nothing, and token ids that cannot collide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, error_of, make_context, make_manager, prefilled, put_in_cache
from foreign_context import Context
from kvcore.native.contexts import num_stand_ins

PROMPT = [1, 2, 3, 4, 9, 9, 9, 9]
CAT = [(4, 4, b"cat")]
LOWEST = -(2**30)  # the lowest token id where extra keys are used
RESERVED = -(2**31)

WRONG: list[tuple[Any, type[Exception], tuple[str, ...]]] = [
    ([(-1, 2, b"a")], ValueError, ("extra_keys[0]", "starts at -1", "0 .. 7")),
    ([(0, 1, b"a"), (8, 1, b"a")], ValueError, ("extra_keys[1]", "starts at 8", "8 tokens")),
    ([(0, 0, b"a")], ValueError, ("length 0", "at least 1")),
    ([(0, -3, b"a")], ValueError, ("length -3",)),
    ([(2**70, 1, b"a")], ValueError, ("64 bits",)),
    ([(0, 1)], ValueError, ("extra_keys[0]", "2 items")),
    ([(0, 1, b"a", 2)], ValueError, ("4 items",)),
    ([(0, 1, "a")], TypeError, ("extra_keys[0]", "str", "must be bytes")),
    ([(0, 1, bytearray(b"a"))], TypeError, ("bytearray",)),
    ([(0, 1, None)], TypeError, ("NoneType",)),
    ([(0.0, 1, b"a")], TypeError, ("start of extra_keys[0]", "float")),
    ([(0, "1", b"a")], TypeError, ("length of extra_keys[0]", "str")),
    ([b"abc"], TypeError, ("extra_keys[0] is a bytes",)),
    ([5], TypeError, ("extra_keys[0] is a int",)),
    (5, TypeError, ("int", "(start, length, bytes)")),
    (b"abc", TypeError, ("bytes",)),
    ("abc", TypeError, ("str",)),
    ({0: b"a"}, TypeError, ("extra_keys[0] is a int",)),
]


class Keyed(Context):
    extra_keys: Any = None


def foreign(keys: Any) -> Keyed:
    made = Keyed("foreign", PROMPT)
    made.extra_keys = keys
    return made


def reserved(manager: Any, keys: Any) -> None:
    context = foreign(keys)
    manager.claim("foreign")
    try:
        manager.maybe_reserve(context)
    finally:
        manager.release("foreign")


TAKERS: dict[str, Callable[[Any, Any], object]] = {
    "context": lambda m, keys: make_context(PROMPT, extra_keys=keys),
    "foreign": reserved,
    "match_prefix": lambda m, keys: m.match_prefix(PROMPT, extra_keys=keys),
    "pin": lambda m, keys: m.pin(PROMPT, extra_keys=keys),
    "recommend": lambda m, keys: m.get_or_recommend_replica(foreign(keys)),
    "tree.match": lambda m, keys: kvcore.PrefixTree(4).match(PROMPT, extra_keys=keys),
    "tree.insert": lambda m, keys: kvcore.PrefixTree(4).insert(PROMPT, [0, 1], extra_keys=keys),
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize(("keys", "kind", "texts"), WRONG)
def test_wrong_keys_are_refused(
    taker: str, keys: Any, kind: type[Exception], texts: tuple[str, ...]
) -> None:
    manager = make_manager(4, 8)
    put_in_cache(manager, PROMPT, extra_keys=CAT)
    before = num_stand_ins()
    error = error_of(lambda: TAKERS[taker](manager, keys))
    assert type(error) is kind, error
    for text in texts:
        assert text in str(error)
    assert num_stand_ins() == before
    assert manager.match_prefix(PROMPT, extra_keys=CAT) == 8


def test_a_key_of_a_request_lies_within_its_tokens() -> None:
    error = error_of(lambda: make_context(PROMPT, extra_keys=[(4, 5, b"a")]))
    assert isinstance(error, ValueError)
    assert "at most 4" in str(error)
    assert make_manager(4, 8).match_prefix(PROMPT, extra_keys=[(4, 2**62, b"a")]) == 0
    reserved(make_manager(4, 8), [(4, 5, b"a")])


def test_integers_of_any_kind_and_other_sequences() -> None:
    class Key(bytes):
        def __eq__(self, other: object) -> bool:
            raise AssertionError

        __hash__ = bytes.__hash__

    keys = ([np.int64(4), np.uint8(4), Key(b"cat")] for _ in range(2))
    context = make_context(PROMPT, extra_keys=keys)
    assert context.extra_keys == tuple(CAT)
    assert [type(part) for part in (context.extra_keys or [()])[0]] == [int, int, bytes]


def test_keys_whose_code_meddles() -> None:
    tokens = list(PROMPT)

    class Start:
        def __index__(self) -> int:
            tokens.clear()
            return 4

    keys: Any = [(Start(), 4, b"cat")]
    context = kvcore.TextGenerationContext("a", tokens, extra_keys=keys)
    assert context.extra_keys == tuple(CAT)
    assert context.tokens.tolist() == PROMPT


# -- token ids that could be mistaken for stand-ins ----------------------------------------------
def test_negative_ids_are_tokens_like_any_other() -> None:
    manager = make_manager(2, 64)
    ids = [-1, LOWEST, LOWEST + 1, 7, -5, 6, 7, 8]
    put_in_cache(manager, ids, extra_keys=CAT)
    assert manager.match_prefix(ids, extra_keys=CAT) == 8
    assert manager.match_prefix(ids) == 4
    for token in range(LOWEST, LOWEST + 50):
        assert manager.match_prefix([*ids[:4], token, 6, 7, 8]) == 4


def test_without_keys_every_id_is_taken() -> None:
    manager = make_manager(2, 64)
    put_in_cache(manager, [RESERVED, RESERVED + 1])
    assert manager.match_prefix(np.array([RESERVED, RESERVED + 1], np.int32)) == 2
    tree = kvcore.PrefixTree(1)
    tree.insert([RESERVED], [0])
    assert tree.match([RESERVED])[1].num_pages == 1


def refused(call: Callable[[], object]) -> None:
    error = error_of(call)
    assert isinstance(error, ValueError), error
    assert str(LOWEST) in str(error)


def test_ids_that_stand_ins_use_are_refused_where_keys_are_used() -> None:
    manager = make_manager(4, 64)
    early = claimed(manager, [RESERVED, 1, 2])
    late = claimed(manager, [3, RESERVED, 2])
    assert manager.maybe_reserve(early)
    put_in_cache(manager, PROMPT, extra_keys=CAT)
    for context in (early, late):
        refused(lambda: manager.maybe_reserve(context))  # noqa: B023
        refused(lambda: manager.maybe_reserve_batch([context]))  # noqa: B023
        refused(lambda: manager.plan(context))  # noqa: B023
        refused(lambda: manager.fetch([context]))  # noqa: B023
        refused(lambda: manager.step([context]))  # noqa: B023
        manager.release(context.request_id)
    stranger = Context("stranger", [1, RESERVED])
    manager.claim("stranger")
    refused(lambda: manager.maybe_reserve(stranger))
    refused(lambda: manager.fetch([stranger]))
    refused(lambda: manager.match_prefix([1, RESERVED]))
    refused(lambda: manager.match_prefix([1, RESERVED], extra_keys=[(0, 1, b"a")]))
    refused(lambda: manager.pin(np.array([RESERVED], np.int32)))
    refused(lambda: make_context([1, RESERVED], extra_keys=[(0, 1, b"a")]))
    parent = prefilled(manager, PROMPT)
    for child in (make_context([*PROMPT, RESERVED]), Context("child", [*PROMPT, RESERVED])):
        refused(lambda: manager.fork(parent.request_id, child))  # noqa: B023
        assert not manager.contains(child.request_id)
    manager.check_integrity()


def test_no_such_id_is_appended_to_a_request_with_keys() -> None:
    context = make_context(PROMPT, extra_keys=CAT)
    refused(lambda: context.update(RESERVED))
    refused(lambda: context.extend(np.array([5, RESERVED], np.int32)))
    refused(lambda: kvcore.update_batch([make_context(PROMPT), context], [1, RESERVED]))
    refused(lambda: kvcore.update_batch([context], np.array([RESERVED], np.int32)))
    context.update(LOWEST)
    assert context.tokens.tolist() == [*PROMPT, LOWEST]


@pytest.mark.parametrize("append", ["update", "extend", "update_batch"])
def test_an_appended_id_is_refused_by_the_manager_that_knows_keys_alone(append: str) -> None:
    appends: dict[str, Callable[[Any], object]] = {
        "update": lambda context: context.update(RESERVED),
        "extend": lambda context: context.extend([RESERVED]),
        "update_batch": lambda context: kvcore.update_batch([context], [RESERVED]),
    }
    knows, other = make_manager(4, 64), make_manager(4, 64)
    knows.fetch([claimed(knows, PROMPT, extra_keys=CAT)])
    for manager in (knows, other):
        context = claimed(manager, [21, 22, 23])
        manager.fetch([context])
        manager.fetch([context])  # the manager recognises this batch
        appends[append](context)
        if manager is other:
            manager.fetch([context])
            assert context.tokens.tolist() == [21, 22, 23, RESERVED]
        else:
            refused(lambda: manager.fetch([context]))  # noqa: B023
            refused(lambda: manager.step([context]))  # noqa: B023


def test_a_batch_is_looked_at_when_its_last_request_brings_the_first_keys() -> None:
    for make in (make_context, lambda t: Context("foreign", t)):
        manager = make_manager(4, 64)
        plain, fine = make([RESERVED, 1, 2]), make_context([5, 6, 7])
        keyed = make_context(PROMPT, extra_keys=CAT)
        for context in (plain, fine, keyed):
            manager.claim(context.request_id)
        refused(lambda: manager.fetch([fine, plain, keyed]))  # noqa: B023
        manager.fetch([fine, keyed])
        refused(lambda: manager.fetch([fine, plain]))  # noqa: B023


def test_keys_are_refused_where_the_cache_holds_such_an_id() -> None:
    manager = make_manager(4, 64)
    put_in_cache(manager, [1, RESERVED, 3, 4])
    keyed = claimed(manager, PROMPT, extra_keys=CAT)
    error = error_of(lambda: manager.maybe_reserve(keyed))
    assert isinstance(error, ValueError)
    assert "reset the prefix cache" in str(error)
    assert manager.match_prefix([1, RESERVED, 3, 4]) == 4
    manager.reset_prefix_cache()
    assert manager.maybe_reserve(keyed)


def test_a_foreign_context_is_looked_at_from_what_is_cached_on() -> None:
    manager = make_manager(2, 64)
    put_in_cache(manager, PROMPT, extra_keys=CAT)
    context = Context("foreign", [5, 6, 7, 8, 9])
    manager.claim("foreign")
    for token in (1, 2, 3, LOWEST):
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(token)
        manager.step([context])
    context.ids[-2] = RESERVED  # in the tree since the last step, so it is not read again
    manager.fetch([context])
    context.ids[-1] = RESERVED
    refused(lambda: manager.fetch([context]))
    context.ids[-1] = LOWEST
    context.update(RESERVED)
    refused(lambda: manager.step([context]))


def test_a_tree_refuses_them_too() -> None:
    tree = kvcore.PrefixTree(1)
    tree.insert([1], [0], extra_keys=[(0, 1, b"a")])
    refused(lambda: tree.insert([RESERVED], [1]))
    refused(lambda: tree.match([RESERVED]))
    tree = kvcore.PrefixTree(1)
    tree.insert([RESERVED], [0])
    refused(lambda: tree.insert([1], [1], extra_keys=[(0, 1, b"a")]))
    assert tree.num_cached == 1
