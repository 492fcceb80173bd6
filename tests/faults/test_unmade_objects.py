# SPDX-License-Identifier: Apache-2.0
"""Objects whose constructor never ran, or ran twice: the call raises, and nothing changes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest

import kvcore
from builders import claimed, make_context, make_manager, make_params, prefilled
from kvcore.native.engine import RowClaims, StepEngine
from kvcore.native.tree import PrefixHandle

CALLS: dict[str, Callable[[Any], object]] = {
    "claim": lambda m: m.claim("a"),
    "contains": lambda m: m.contains("a"),
    "release": lambda m: m.release("a"),
    "release after": lambda m: m.release("a", after=3),
    "get_replica": lambda m: m.get_replica(make_context([1])),
    "get_or_recommend_replica": lambda m: m.get_or_recommend_replica(make_context([1])),
    "get_req_blocks": lambda m: m.get_req_blocks("a"),
    "fork": lambda m: m.fork("a"),
    "fork a child": lambda m: m.fork("a", make_context([1])),
    "truncate": lambda m: m.truncate("a", 0),
    "shared_prefixes": lambda m: m.shared_prefixes([]),
    "take_copies": lambda m: m.take_copies(),
    "reserve": lambda m: m.reserve(make_context([1])),
    "maybe_reserve_batch": lambda m: m.maybe_reserve_batch([make_context([1])]),
    "reserve nothing": lambda m: m.maybe_reserve_batch([]),
    "plan": lambda m: m.plan(make_context([1])),
    "fetch": lambda m: m.fetch([make_context([1])]),
    "fetch nothing": lambda m: m.fetch([]),
    "step": lambda m: m.step([]),
    "step after": lambda m: m.step([], after=3),
    "match_prefix": lambda m: m.match_prefix([1]),
    "pin": lambda m: m.pin([1]),
    "reset_prefix_cache": lambda m: m.reset_prefix_cache(),
    "counters": lambda m: m._counters(),
    "row claims": lambda m: m._row_claims(["a"]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_manager_that_was_never_made(call: Callable[[Any], object]) -> None:
    manager = kvcore.PagedKVCacheManager.__new__(kvcore.PagedKVCacheManager)
    with pytest.raises(RuntimeError, match="PagedKVCacheManager was not initialised"):
        call(manager)


def test_properties_of_a_manager_that_was_never_made() -> None:
    manager: Any = kvcore.PagedKVCacheManager.__new__(kvcore.PagedKVCacheManager)
    for name in dir(kvcore.PagedKVCacheManager):
        if isinstance(getattr(kvcore.PagedKVCacheManager, name), property):
            with pytest.raises((AttributeError, RuntimeError)):
                getattr(manager, name)
    verbs: list[Callable[[], object]] = [
        manager.check_integrity,
        manager.reset_metrics,
        lambda: manager.fetch_collection([]),
        lambda: repr(manager),
    ]
    for verb in verbs:
        with pytest.raises((AttributeError, RuntimeError, TypeError)):
            verb()


def test_subclass_that_forgets_the_constructor() -> None:
    class Careless(kvcore.PagedKVCacheManager):
        def __init__(self) -> None:
            pass

    with pytest.raises(RuntimeError, match="Careless was not initialised"):
        Careless().claim("a")


def test_part_of_the_constructor_is_not_enough() -> None:
    parts: dict[str, Any] = {"copier": None, "mover": None, "gpus": None, "listener": None}
    manager: Any = kvcore.PagedKVCacheManager.__new__(kvcore.PagedKVCacheManager)
    made: Any = make_manager()
    make: Any = StepEngine.__init__
    for core, shards, words in (
        (made._core, None, "Argument 'shards'"),
        (None, [], "Argument 'core'"),
        (object(), [], "Argument 'core'"),
    ):
        with pytest.raises(TypeError, match=words):
            make(manager, core, shards=shards, runtime_checks=False, **parts)
    with pytest.raises(RuntimeError, match="was not initialised"):
        manager.fetch([])


def test_manager_that_is_made_twice_stays_what_it_was() -> None:
    manager: Any = make_manager(4, 16)
    context = prefilled(manager, range(10))
    pinned = manager.pin(list(range(8)))
    pages = manager.get_req_blocks(context.request_id)
    with pytest.raises(RuntimeError, match="initialised already; make another one"):
        manager.__init__(make_params(), 4, 64, num_pages=3, blocks=None)
    assert manager.get_req_blocks(context.request_id) == pages
    assert (manager.total_num_pages, manager.max_batch_size) == (16, 64)
    pinned.release()
    manager.release(context.request_id)
    manager.check_integrity()


def test_pins_come_from_managers_alone() -> None:
    with pytest.raises(TypeError, match=r"pin\("):
        kvcore.PinnedPrefix()
    blank = kvcore.PinnedPrefix.__new__(kvcore.PinnedPrefix)
    with pytest.raises(kvcore.InvalidHandleError, match=r"pin\("):
        blank.release()
    with pytest.raises(kvcore.InvalidHandleError), blank:
        pass
    assert blank.num_tokens == 0


def test_contexts_are_made_whole() -> None:
    with pytest.raises(TypeError):
        kvcore.TextGenerationContext.__new__(kvcore.TextGenerationContext)  # type: ignore[call-arg]
    again = copy.copy(make_context([1, 2, 3]))
    again.update(4)
    assert (again.start_idx, again.tokens.tolist()) == (3, [1, 2, 3, 4])


def test_context_that_is_made_twice_stays_what_it_was() -> None:
    manager = make_manager()
    context: Any = claimed(manager, range(10), cache_salt="a")
    with contextlib.suppress(RuntimeError, TypeError):
        context.__init__("other", [1], cache_salt="b")
    assert (context.end_idx, context.cache_salt) == (10, "a")
    assert manager.contains(context.request_id)


def test_row_claims_are_made_whole() -> None:
    with pytest.raises(TypeError):
        RowClaims.__new__(RowClaims)(0, 0, 0)  # type: ignore[call-arg]


def test_blank_tree_handles_are_refused() -> None:
    tree = kvcore.PrefixTree(2)
    blank = PrefixHandle()
    assert blank.num_pages == 0
    for verb in (tree.pin, tree.unpin):
        with pytest.raises(kvcore.InvalidHandleError):
            verb(blank)
    with pytest.raises(TypeError):
        kvcore.PrefixTree.__new__(kvcore.PrefixTree)  # type: ignore[call-arg]


def test_blank_inputs_are_refused() -> None:
    blank = kvcore.RaggedKVCacheInputs.__new__(kvcore.RaggedKVCacheInputs)
    assert "None" in repr(blank)
    with pytest.raises((TypeError, ValueError)):
        kvcore.PagedKVCacheCollection(blank)
    with pytest.raises((TypeError, ValueError)):
        kvcore.ops.gather(blank, 0)
