# SPDX-License-Identifier: Apache-2.0
"""Lists whose own elements change them during a read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import make_context, make_manager


class Token:
    """A token that calls a function when it is read."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def __index__(self) -> int:
        self.call()
        return 5


class OwnList(list[Any]):
    """A list that overrides the methods of its contents."""

    def __iter__(self) -> Any:
        return iter([1, 2, 3])


def meddled(change: Callable[[list[Any]], object]) -> list[Any]:
    tokens: list[Any] = list(range(300, 400))
    tokens[1] = Token(lambda: change(tokens))
    return tokens


CHANGES: dict[str, Callable[[list[Any]], object]] = {
    "clear": lambda tokens: tokens.clear(),
    "cut": lambda tokens: tokens.__delitem__(slice(2, None)),
    "grow": lambda tokens: tokens.extend([7] * 10_000),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_token_that_changes_its_list(change: Callable[[list[Any]], object]) -> None:
    expected = [300, 5, *range(302, 400)]
    context = kvcore.TextGenerationContext("a", meddled(change))
    assert context.tokens.tolist() == expected
    context.extend(meddled(change))
    assert context.tokens.tolist() == expected * 2
    manager = make_manager()
    assert manager.match_prefix(meddled(change)) == 0
    assert manager.pin(meddled(change)).num_tokens == 0
    tree = kvcore.PrefixTree(1)
    tree.insert(meddled(change), meddled(change))
    assert tree.num_cached == 100


def test_tokens_of_every_kind_of_integer() -> None:
    given: list[Any] = [np.int64(7), True, 3, np.uint8(9), 2**31 - 1, -(2**31)]
    for tokens in (given, tuple(given)):
        context = kvcore.TextGenerationContext("a", tokens)
        assert context.tokens.tolist() == [7, 1, 3, 9, 2**31 - 1, -(2**31)]
    assert make_context(OwnList([9])).tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("bad", [2**31, -(2**31) - 1, 2**63, -(2**200)])
def test_token_beyond_int32_is_named_by_its_place(bad: int) -> None:
    given: list[Any] = [[1, 2, bad], (1, 2, bad), [np.int8(1), 2, bad]]
    for tokens in given:
        with pytest.raises(ValueError, match=r"token 2 is -?[0-9]+, must be"):
            kvcore.TextGenerationContext("a", tokens)
    with pytest.raises(TypeError, match="token 1 is a float"):
        kvcore.TextGenerationContext("a", [1, 2.0])  # type: ignore[list-item]


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_token_that_changes_the_batch_it_is_for(change: Callable[[list[Any]], object]) -> None:
    batch: list[Any] = [make_context([n]) for n in range(40)]
    before = list(batch)
    tokens: list[Any] = [1] * 40
    tokens[3] = Token(lambda: change(batch))
    try:
        kvcore.update_batch(batch, tokens)
    except (ValueError, TypeError):
        assert [context.end_idx for context in before] == [1] * 40


def test_number_that_releases_what_it_is_for() -> None:
    """The ``__index__`` of an argument runs before any lookup."""
    manager = make_manager()
    context = make_context(range(10))
    name = context.request_id
    verbs: list[Callable[[Any], object]] = [
        lambda n: manager.maybe_reserve(context, n),
        lambda n: manager.fetch([context], n),
        lambda n: manager.maybe_reserve_batch([context], n),
        lambda n: manager.truncate(name, n),
    ]
    for verb in verbs:
        manager.claim(name)
        manager.plan(context)
        with pytest.raises(kvcore.RequestNotFoundError):
            verb(Token(lambda: manager.release(name)))
        manager.check_integrity()
    manager.claim(name)
    steps: Any = Token(lambda: manager.release(name))
    manager.plan(context, steps)  # like a plan for an unclaimed request
    assert not manager.contains(name)
    manager.check_integrity()
