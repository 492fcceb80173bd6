# SPDX-License-Identifier: Apache-2.0
"""The engine's calls that a replacement class of kvcore's must accept."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.integrations.gate import is_served, refused_call, refused_calls


class Theirs:
    """A class of an engine, with positional, keyword and optional parameters."""

    limit = 3

    def plain(self, request: Any, count: int = 0) -> None: ...

    def named(self, request: Any, *, up_to: int, **more: Any) -> None: ...

    def many(self, *ids: int) -> None: ...

    def gone(self) -> None: ...


def test_what_takes_every_call_is_not_named() -> None:
    class Ours(Theirs):
        limit = 4

        def plain(self, request: Any, count: int = 5, extra: bool = False) -> None: ...

        def named(self, request: Any, *, up_to: int, **_: Any) -> None: ...

        def many(self, *ids: int) -> None: ...

        def added(self, whatever: int) -> None: ...

    class Open(Theirs):
        def plain(self, *args: Any, **kwargs: Any) -> None: ...

    assert refused_calls(Ours, Theirs) == []
    assert refused_calls(Open, Theirs) == []


def renamed(self: Any, req: Any, count: int = 0) -> None: ...


def swapped(self: Any, count: int = 0, request: Any = None) -> None: ...


def shorter(self: Any, request: Any) -> None: ...


def without_default(self: Any, request: Any, count: int) -> None: ...


def with_another(self: Any, request: Any, count: int = 0, *, reason: str) -> None: ...


@pytest.mark.parametrize("own", [renamed, swapped, shorter, without_default, with_another])
def test_a_call_that_is_refused_is_named_with_its_reason(own: Any) -> None:
    reason = refused_call(own, Theirs.plain)
    assert reason
    ours = type("Ours", (Theirs,), {"plain": own})
    assert refused_calls(ours, Theirs) == [f"Ours.plain: {reason}"]


def test_open_signatures_need_open_ones() -> None:
    def named(self: Any, request: Any, *, up_to: int) -> None: ...

    def many(self: Any, first: int) -> None: ...

    assert refused_call(named, Theirs.named)
    assert refused_call(many, Theirs.many)


@pytest.mark.parametrize(
    ("version", "served"),
    [
        ("0.33.0", True),
        ("0.33.0+cpu", True),
        ("0.33.1", False),
        ("0.33.0rc1", False),
        ("0.33.0.post1", False),
        ("0.3", False),
        ("", False),
    ],
)
def test_versions_are_named_exactly(version: str, *, served: bool) -> None:
    assert is_served(version, ("0.32.0", "0.33.0")) is served
