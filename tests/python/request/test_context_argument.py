# SPDX-License-Identifier: Apache-2.0
"""The argument that is a context is `ctx` in every public call; earlier names are still taken."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from builders import claimed, error_of, make_context, make_manager
from kvcore.keys import context_keys

MODULES = (
    *("kvcore", "kvcore.ops", "kvcore.scheduler", "kvcore.moving", "kvcore.keys", "kvcore.events"),
    *("kvcore.extra_keys", "kvcore.functional", "kvcore.routing", "kvcore.stores", "kvcore.groups"),
    *("kvcore.policies", "kvcore.replay"),
)
#: Names that an argument with a context had, or might get.
OTHER = {"context", "request", "data"}
#: Calls in which the name means something else, or is that of an attribute of the result.
NO_CONTEXT = {
    ("kvcore.scheduler.Request", "context"),  # an attribute of the request
    ("kvcore.scheduler.Scheduler.add", "request"),  # a Request
    ("kvcore.scheduler.Scheduler.cancel", "request"),
    ("kvcore.scheduler.is_soon_cached", "request"),
    ("kvcore.moving.read_sequence", "data"),  # bytes
    ("kvcore.PagedKVCacheManager.import_sequence", "data"),  # bytes
}


def public_calls() -> Iterator[tuple[str, inspect.Signature]]:
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            item = getattr(module, name)
            calls: dict[str, Any] = {"": item} if callable(item) else {}
            if inspect.isclass(item):
                public = [each for each in dir(item) if not each.startswith("_")]
                calls |= {f".{each}": getattr(item, each) for each in public}
            for end, call in calls.items():
                try:
                    yield f"{module.__name__}.{name}{end}", inspect.signature(call)
                except (TypeError, ValueError):  # not a function, or without a signature
                    continue


def test_contexts_have_one_name() -> None:
    calls = dict(public_calls())
    assert len(calls) > 200
    strange = {
        (call, name)
        for call, signature in calls.items()
        for name, parameter in signature.parameters.items()
        if name in OTHER and parameter.kind is not parameter.KEYWORD_ONLY
    }
    assert strange <= NO_CONTEXT, strange - NO_CONTEXT
    with_ctx = {call for call, signature in calls.items() if "ctx" in signature.parameters}
    manager = "kvcore.PagedKVCacheManager"
    named = ("reserve", "maybe_reserve", "plan", "accept", "wait", "get_replica", "import_sequence")
    assert {f"{manager}.{each}" for each in (*named, "get_or_recommend_replica")} <= with_ctx


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("reserve", "data"),
        ("maybe_reserve", "data"),
        ("get_replica", "context"),
        ("get_or_recommend_replica", "context"),
    ],
)
def test_earlier_names_are_taken(call: str, name: str) -> None:
    manager = make_manager()
    context = claimed(manager, range(4))
    method = getattr(manager, call)
    expected = method(context)
    assert method(ctx=context) == method(**{name: context}) == expected
    for refused in (
        error_of(lambda: method(context, **{name: context})),
        error_of(lambda: method(ctx=context, **{name: context})),
    ):
        assert isinstance(refused, TypeError)
        assert str(refused) == f"ctx and {name} are both given, must be one of them; pass ctx"
    with pytest.raises(TypeError, match=r"NoneType .* is no context"):
        method()


def test_earlier_name_of_a_function() -> None:
    context: Any = make_context(range(4))
    keys = context_keys(context, 2)
    assert context_keys(ctx=context, page_size=2) == keys
    earlier: Any = context_keys
    assert earlier(context=context, page_size=2) == keys
    with pytest.raises(TypeError, match="ctx and context are both given"):
        earlier(ctx=context, context=context, page_size=2)
