# SPDX-License-Identifier: Apache-2.0
"""A fork reads the context of its parent's last reservation, fetch or commit."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import kvcore
from builders import make_context, make_manager, prefilled
from foreign_context import Context

WRITTEN = list(range(6))
OTHER = list(range(70, 90))

Use = Callable[[Any, Any], object]

PURE: dict[str, Use] = {
    "plan": lambda m, c: m.plan(c),
    "plan that raises": lambda m, c: m.plan(c, 1 << 62),
    "shared_prefixes": lambda m, c: m.shared_prefixes([c]),
    "get_replica": lambda m, c: m.get_replica(c),
    "reserve that raises": lambda m, c: m.maybe_reserve(c, 1 << 40),
    "reserve that answers no": lambda m, c: m.maybe_reserve(c, 100),
    "reserve of none": lambda m, c: m.maybe_reserve_batch([c], 100),
    "fetch that raises": lambda m, c: m.fetch([c, c]),
    "fetch without space": lambda m, c: m.fetch([c], 100),
    "fetch with another error": lambda m, c: m.fetch([c, make_context([1])]),
    "step that raises": lambda m, c: m.step([c, make_context([1])]),
}


def quietly(use: Use, manager: Any, context: Any) -> None:
    with contextlib.suppress(kvcore.KVCacheError, ValueError):
        use(manager, context)


@pytest.mark.parametrize("kind", [make_context, lambda ids, name: Context(name, ids)])
@pytest.mark.parametrize("use", PURE.values(), ids=list(PURE))
def test_refused_and_pure_calls_do_not_replace_the_context(use: Use, kind: Any) -> None:
    manager = make_manager(4, 16, enable_runtime_checks=True)
    parent = prefilled(manager, WRITTEN)
    imposter = kind(OTHER, parent.request_id)
    quietly(use, manager, imposter)
    quietly(use, manager, imposter)
    with pytest.raises(ValueError, match="token 0"):
        manager.fork(parent.request_id, make_context(OTHER, "wrong"))
    manager.fork(parent.request_id, make_context([*WRITTEN, 9], "right"))
    assert manager.get_req_blocks("right") == manager.get_req_blocks(parent.request_id)[:2]


DONE: dict[str, Use] = {
    "reserve": lambda m, c: m.maybe_reserve(c),
    "reserve_batch": lambda m, c: m.maybe_reserve_batch([c]),
    "fetch": lambda m, c: m.fetch([c]),
    "step": lambda m, c: m.step([c]),
}


@pytest.mark.parametrize("kind", [make_context, lambda ids, name: Context(name, ids)])
@pytest.mark.parametrize("use", DONE.values(), ids=list(DONE))
def test_calls_that_were_done_replace_the_context(use: Use, kind: Any) -> None:
    manager = make_manager(4, 16)
    parent = prefilled(manager, WRITTEN)
    name = parent.request_id
    again = kind([*WRITTEN, 0], name)
    if isinstance(again, Context):
        again.start_idx = 6
    else:
        again.rewind(6)
        again.update(0)
    first = weakref.ref(again) if kind is not make_context else None
    use(manager, again)
    del parent, again
    gc.collect()
    manager.fork(name, make_context([*WRITTEN, 9], "child"))
    assert first is None or first() is not None
    manager.release(name)
    assert first is None or first() is None


def test_batch_fetched_again_is_recorded_again() -> None:
    """The last fetched batch is recognised without a look at it, until another batch comes."""
    manager = make_manager(4, 16)
    context = prefilled(manager, WRITTEN)
    batch = [context]
    manager.fetch(batch)
    manager.fetch(batch)
    stranger = Context(context.request_id, [*range(50, 56), 0])
    stranger.start_idx = 6
    manager.maybe_reserve(stranger)
    with pytest.raises(ValueError, match="token 0"):
        manager.fork(context.request_id, make_context([*WRITTEN, 9], "child"))
    manager.fetch(batch)
    manager.fork(context.request_id, make_context([*WRITTEN, 9], "child"))


def test_replaced_context_may_change_the_batch_as_it_goes() -> None:
    manager = make_manager(4, 64)
    batch: list[Any] = []

    class Last(Context):
        def __del__(self) -> None:
            batch.clear()

    for n in range(20):
        manager.claim(n)
        dying = Last(n, [n])
        manager.maybe_reserve(dying)
        del dying
    batch += [make_context([n], n) for n in range(20)]
    manager.fetch(batch)
    assert batch == []
    manager.check_integrity()


@pytest.mark.parametrize("kind", [kvcore.TextGenerationContext, Context])
def test_a_released_request_holds_no_context(kind: Any) -> None:
    class Own(kind):  # type: ignore[misc]
        pass

    manager = make_manager(4, 8)
    context = Own("a", WRITTEN)
    manager.claim("a")
    manager.fetch([context])
    gone = weakref.ref(context)
    gc.disable()
    try:
        manager.release("a")
        del context
        assert gone() is None
    finally:
        gc.enable()
