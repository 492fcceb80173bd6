# SPDX-License-Identifier: Apache-2.0
"""Calls raise a clear TypeError for an object that is no context or no batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import kvcore
from builders import claimed, make_manager

NO_CONTEXTS: list[Any] = [None, 7, "request-1", b"", [1], {}, object(), TypeError]


@pytest.mark.parametrize("given", NO_CONTEXTS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "verb", ["maybe_reserve", "plan", "get_replica", "get_or_recommend_replica"]
)
def test_what_is_no_context(verb: str, given: Any) -> None:
    manager = make_manager()
    manager.claim("request-1")
    with pytest.raises(TypeError, match="is no context"):
        getattr(manager, verb)(given)


@pytest.mark.parametrize("given", NO_CONTEXTS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "verb",
    ["fetch", "step", "maybe_reserve_batch", "shared_prefixes", "get_data_parallel_splits"],
)
def test_batch_with_what_is_no_context(verb: str, given: Any) -> None:
    manager = make_manager()
    good = claimed(manager, [1, 2])
    with pytest.raises(TypeError, match="is no context"):
        getattr(manager, verb)([good, given])
    assert manager.metrics.input_tokens == 0


def test_collection_of_what_is_no_context() -> None:
    manager = make_manager(blocks="allocate")
    with pytest.raises(TypeError, match="is no context"):
        manager.fetch_collection([7])
    with pytest.raises(TypeError, match="is no context"):
        kvcore.update_batch([7], [1])  # type: ignore[list-item]


def test_unclaimed_context_is_recommended_by_what_it_has() -> None:
    class Half:
        request_id = "half"

    manager = make_manager()
    with pytest.raises(TypeError, match="is no context"):
        manager.get_or_recommend_replica(Half())  # type: ignore[arg-type]


Verb = Callable[[Any, Any], object]
NO_BATCHES: dict[str, Verb] = {
    "fetch": lambda m, batch: m.fetch(batch),
    "step": lambda m, batch: m.step(batch),
    "maybe_reserve_batch": lambda m, batch: m.maybe_reserve_batch(batch),
    "shared_prefixes": lambda m, batch: m.shared_prefixes(batch),
    "splits": lambda m, batch: m.get_data_parallel_splits(batch),
}


@pytest.mark.parametrize("verb", NO_BATCHES.values(), ids=list(NO_BATCHES))
def test_what_is_no_batch(verb: Verb) -> None:
    manager = make_manager()
    for given in (None, 7, claimed(manager, [1])):
        with pytest.raises(TypeError):
            verb(manager, given)
