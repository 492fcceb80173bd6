# SPDX-License-Identifier: Apache-2.0
"""Contexts of a subclass work as contexts: no attribute is lost, and no override is ignored."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from typing_extensions import Self

from kvcore import TextGenerationContext, update_batch
from toy_engine import make_manager


class Sequence(TextGenerationContext):
    """An engine's own request class."""

    stop: int
    seen: list[int]

    def __new__(cls, request_id: Any, tokens: Any, *, stop: int, **options: Any) -> Self:
        self = super().__new__(cls, request_id, tokens, **options)
        self.stop = stop
        self.seen = []
        return self

    def update(self, token: int) -> None:
        self.seen.append(token)
        super().update(token)


def test_attributes_are_added_and_update_is_called() -> None:
    batch = [Sequence("a", [1, 2, 3], stop=9), TextGenerationContext("b", [4])]
    update_batch(batch, [5, 6])
    first = batch[0]
    assert isinstance(first, Sequence)
    assert (first.stop, first.seen, first.tokens.tolist()) == (9, [5], [1, 2, 3, 5])
    assert batch[1].tokens.tolist() == [4, 6]


@pytest.mark.parametrize("num_plain", [0, 1])
def test_managers_take_batches_of_both(num_plain: int) -> None:
    manager = make_manager(32)
    batch: list[Any] = [Sequence("a", list(range(9)), stop=1), Sequence("b", [7] * 6, stop=1)]
    batch += [TextGenerationContext(f"c{n}", [3] * 5) for n in range(num_plain)]
    for context in batch:
        manager.claim(context.request_id)
    for step in range(6):
        assert manager.maybe_reserve_batch(batch) == len(batch)
        (inputs,) = manager.fetch(batch)
        assert inputs.cache_lengths.tolist() == [context.start_idx for context in batch]
        update_batch(batch, [step] * len(batch))
        manager.step(batch)
    again = Sequence("again", list(range(9)), stop=1)
    manager.claim("again")
    assert manager.reserve(again)
    assert again.start_idx == 8
    assert manager.metrics.cache_tokens == 8


def test_terms_and_keys_of_a_subclass_count() -> None:
    manager = make_manager(32)
    keys = [(1, 2, b"image")]
    given: dict[str, Any] = {"priority": 80, "extra_keys": keys, "cache_salt": "s"}
    context = Sequence("a", [1, 2, 3, 4, 5, 6], stop=1, **given)
    manager.claim("a")
    manager.fetch([context])
    context.update(7)
    manager.step([context])
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 7, 8], None, "s", extra_keys=keys) == 4
    assert manager.match_prefix([1, 2, 3, 4, 5, 6, 7, 8], cache_salt="s") == 0


def test_forks_of_subclasses_begin_with_their_parents_pages() -> None:
    manager = make_manager(32)
    parent = Sequence("p", list(range(8)), stop=1)
    manager.claim("p")
    manager.fetch([parent])
    parent.update(8)
    manager.step([parent])
    child = Sequence("c", parent.tokens, stop=2)
    manager.fork("p", child)
    assert child.start_idx == 8
    assert manager.fetch([parent, child])[0].lookup_table[0, 0] == manager.get_req_blocks("c")[0]


@pytest.mark.parametrize("name", ["tokens", "start_idx", "priority", "request_id", "pending"])
def test_attributes_that_managers_read_cannot_be_overridden(name: str) -> None:
    def overridden(_: Any) -> int:
        return 1

    made = type("Mine", (TextGenerationContext,), {name: property(overridden)})
    with pytest.raises(TypeError, match=f"Mine overrides {name}, which managers read"):
        made("a", [1, 2])
    mixed = type("Mixed", (type("Mixin", (), {name: 1}), TextGenerationContext), {})
    with pytest.raises(TypeError, match=f"Mixed overrides {name}"):
        mixed("a", [1, 2])


def test_a_context_that_is_replaced_while_it_dies_does_no_harm() -> None:
    manager = make_manager(32)
    batch: list[Any] = []

    class Dying(TextGenerationContext):
        def __del__(self) -> None:
            batch.clear()

    for name in "ab":
        manager.claim(name)
    batch[:] = [Dying("a", [1, 2]), Dying("b", [3, 4])]
    manager.fetch(batch)
    update_batch(batch, [5, 6])
    manager.step(batch)
    batch[0] = TextGenerationContext("a", [1, 2, 5])
    manager.fetch(batch)  # frees the first context, which the manager had recorded
    assert batch == []
    manager.check_integrity()


def test_copies_of_a_subclass_are_its_own_affair() -> None:
    context = Sequence("a", [1, 2], stop=1)
    for made in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot pickle 'Sequence' object"):
            made(context)


def test_a_subclass_says_how_it_is_pickled() -> None:
    context = Kept("a", [1, 2])
    context.note = "mine"
    again = pickle.loads(pickle.dumps(context))
    assert (again.note, again.tokens.tolist()) == ("mine", [1, 2])
    assert copy.deepcopy(context).note == "mine"


class Kept(TextGenerationContext):
    """A context that is pickled with its additional attribute."""

    note = ""

    def __reduce__(self) -> Any:
        return type(self), (self.request_id, self.tokens.tolist()), {"note": self.note}
