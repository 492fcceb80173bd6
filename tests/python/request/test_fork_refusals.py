# SPDX-License-Identifier: Apache-2.0
"""A refused fork, truncate or shared_prefixes leaves everything as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, error_of, make_context, make_manager, prefilled
from foreign_context import Calling, Context, FrozenContext
from kvcore import errors
from tables import table

WRITTEN = list(range(6))


class Scene:
    """`parent` has written 6 tokens, `twin` shares its first page; one more request fits."""

    def __init__(self) -> None:
        self.manager: Any = make_manager(4, 8, max_batch_size=4)
        self.parent = prefilled(self.manager, WRITTEN)
        self.twin = claimed(self.manager, [*WRITTEN[:5], 50])
        assert self.manager.maybe_reserve(self.twin)
        self.salted = claimed(self.manager, WRITTEN, cache_salt="a")
        (self.held,) = self.manager.fetch([self.parent])
        self.good = make_context([*WRITTEN, 7], "good", active_idx=2)
        self.other = Context("other", [*WRITTEN, 8], active_idx=3)

    def child(self, *ids: int, **rest: Any) -> Any:
        return make_context(ids, "child", **rest)

    def fork(self, *children: Any) -> None:
        self.manager.fork(self.parent.request_id, *children)

    def snapshot(self) -> dict[str, object]:
        """Return everything that a caller can see."""
        manager = self.manager
        mine: list[Any] = [self.parent, self.twin, self.salted]
        given: list[Any] = [*mine, self.good, self.other]
        return {
            "free": manager.num_free_blocks,
            "metrics": manager.metrics,
            "indices": [(c.start_idx, c.active_idx, c.end_idx) for c in given],
            "pages": [list(manager.get_req_blocks(c.request_id)) for c in mine],
            "claimed": [manager.contains(n) for n in ("good", "other", "child")],
            "table": (self.held.lookup_table.tolist(), self.held.cache_lengths.tolist()),
            "cached": manager.match_prefix(WRITTEN),
            "plans": [manager.plan(c) for c in mine],
            "shared": manager.shared_prefixes(mine),
            "copies": manager.take_copies().tolist(),
            "repr": repr(manager),
        }


@dataclasses.dataclass
class Case:
    name: str
    error: type[Exception]
    call: Callable[[Scene], object]
    words: tuple[str, ...] = ()


def differing(position: int) -> Case:
    ids = [*WRITTEN, 7]
    ids[position] = 99
    return Case(
        f"child differs at {position}",
        ValueError,
        lambda s: s.fork(s.good, s.child(*ids)),
        ("'child'", f"token {position}", "6"),
    )


NOT_FOUND, TAKEN = errors.RequestNotFoundError, errors.AlreadyClaimedError
CASES = [
    *map(differing, range(6)),
    Case("child with no token to run", ValueError,
         lambda s: s.fork(s.good, s.child(*WRITTEN)), ("'child'", "6 tokens", "more than")),
    Case("child that is too short", ValueError,
         lambda s: s.fork(s.other, s.child(*WRITTEN[:3])), ("'child'", "3 tokens")),
    Case("child of another tenant", ValueError,
         lambda s: s.fork(s.good, s.child(*WRITTEN, 7, cache_salt="a")), ("'child'", "namespace")),
    Case("child of another adapter", ValueError,
         lambda s: s.fork(s.good, s.child(*WRITTEN, 7, extra_key="")), ("'child'", "namespace")),
    Case("child of no namespace", ValueError,
         lambda s: s.manager.fork(s.salted.request_id, s.child(*WRITTEN, 7),
                                  s.child(*WRITTEN, 7)), ("repeat",)),
    Case("child that is claimed", TAKEN,
         lambda s: s.fork(s.good, s.twin), ("replica 0",)),
    Case("child that is its parent", TAKEN, lambda s: s.fork(s.good, s.parent)),
    Case("children of one name", ValueError,
         lambda s: s.fork(s.good, make_context([*WRITTEN, 9], "good")), ("'good'", "once")),
    Case("one context twice", ValueError, lambda s: s.fork(s.other, s.other), ("'other'",)),
    Case("unknown parent", NOT_FOUND,
         lambda s: s.manager.fork("nobody", s.good), ("'nobody'", "call claim first")),
    Case("parent given as a context", NOT_FOUND, lambda s: s.manager.fork(s.parent, s.good)),
    Case("unhashable parent", TypeError, lambda s: s.manager.fork(["parent"], s.good)),
    Case("too many children", errors.CapacityError,
         lambda s: s.fork(s.good, s.other), ("replica 0", "3 of 4", "2 forks")),
    Case("no context", TypeError, lambda s: s.fork(s.good, "child")),
    Case("child without tokens", TypeError, lambda s: s.fork(s.good, object())),
    Case("indices that cannot be set", AttributeError,
         lambda s: s.fork(s.good, FrozenContext("child", [*WRITTEN, 7])), ("cannot be set",)),
    Case("child with float tokens", TypeError,
         lambda s: s.fork(s.good, WithTokens("child", np.zeros(9, np.float32))), ("float32",)),
    Case("child with end_idx beyond its tokens", ValueError,
         lambda s: s.fork(s.good, WithTokens("child", np.arange(6, dtype=np.int32))), ("end_idx",)),
    Case("child with a number as salt", TypeError,
         lambda s: s.fork(s.good, Context("child", [*WRITTEN, 7], cache_salt=3))),  # type: ignore[arg-type]
    Case("truncate to -1", ValueError,
         lambda s: s.manager.truncate(s.parent.request_id, -1), ("-1", "0 .. 7")),
    Case("truncate beyond what was fetched", ValueError,
         lambda s: s.manager.truncate(s.parent.request_id, 8), ("8", "0 .. 7")),
    Case("truncate what was not fetched", ValueError,
         lambda s: s.manager.truncate(s.twin.request_id, 1), ("1", "0 .. 0")),
    Case("truncate to half a token", TypeError,
         lambda s: s.manager.truncate(s.parent.request_id, 0.5)),
    Case("truncate to nothing", TypeError,
         lambda s: s.manager.truncate(s.parent.request_id, None)),
    Case("truncate beyond int64", (ValueError, OverflowError),  # type: ignore[arg-type]
         lambda s: s.manager.truncate(s.parent.request_id, 2**64)),
    Case("truncate an unknown request", NOT_FOUND,
         lambda s: s.manager.truncate("nobody", 0), ("'nobody'",)),
    Case("share with an unknown request", NOT_FOUND,
         lambda s: s.manager.shared_prefixes([s.parent, s.good]), ("'good'",)),
    Case("share with no context", TypeError,
         lambda s: s.manager.shared_prefixes([s.parent, 7])),
]  # fmt: skip


class WithTokens(Context):
    """A context that returns the test's token array."""

    def __init__(self, request_id: str, tokens: Any) -> None:
        super().__init__(request_id, [*WRITTEN, 7])
        self.array = tokens

    @property
    def tokens(self) -> Any:
        return self.array


@table("case", CASES)
def test_error_leaves_no_trace(case: Case) -> None:
    scene = Scene()
    before = scene.snapshot()
    error = error_of(lambda: case.call(scene))
    assert isinstance(error, case.error), repr(error)
    for word in case.words:
        assert word in str(error), f"{word!r} is not in {str(error)!r}"
    assert scene.snapshot() == before
    scene.manager.check_integrity()
    scene.fork(scene.other)
    assert (scene.other.start_idx, scene.other.active_idx) == (6, 7)
    scene.manager.fetch([scene.parent, scene.twin, scene.other])


def test_parent_with_impossible_indices_is_named() -> None:
    manager = make_manager(4, 8)
    parent = Context("parent", WRITTEN)
    manager.external_claim("parent")
    manager.fetch([parent])
    parent.start_idx = 9
    error = error_of(lambda: manager.fork("parent", make_context([*WRITTEN, 7], "child")))
    assert isinstance(error, ValueError)
    assert "'parent'" in str(error)
    assert not manager.contains("child")


@pytest.mark.parametrize("claims", ["good", "child", "parent leaves"])
@pytest.mark.parametrize("reader", ["child", "parent"])
def test_names_claimed_while_a_fork_is_read(claims: str, reader: str) -> None:
    manager = make_manager(4, 8)
    parent = Calling("parent", WRITTEN)
    manager.external_claim("parent")
    manager.fetch([parent])
    parent.update(7)
    manager.step([parent])
    good, child = make_context([*WRITTEN, 7], "good"), Calling("child", [*WRITTEN, 8])
    meddler = child if reader == "child" else parent
    if claims == "parent leaves":
        meddler.call = lambda: manager.release("parent")
    else:
        meddler.call = lambda: manager.external_claim(claims)
    with pytest.raises((kvcore.AlreadyClaimedError, kvcore.RequestNotFoundError)):
        manager.fork("parent", good, child)
    for name in ("parent", "good", "child"):
        if manager.contains(name):
            manager.release(name)
    assert manager.num_free_blocks == 8
    assert "0 requests" in repr(manager)


@pytest.mark.parametrize("name", ["child", ("child", 1)])
def test_a_child_claimed_anew_while_the_fork_fails_stays_claimed(name: Any) -> None:
    """The fork takes back only its own claim of the id."""

    class Leaving(Context):
        def __setattr__(self, attribute: str, value: object) -> None:
            if attribute == "start_idx" and hasattr(self, "start_idx") and value != self.start_idx:
                manager.release(name)
                manager.claim(name)
                raise KeyError(attribute)
            super().__setattr__(attribute, value)

    manager = make_manager(4, 8)
    parent = Context("parent", WRITTEN)
    manager.claim("parent")
    manager.fetch([parent])
    parent.update(7)
    manager.step([parent])
    with pytest.raises(KeyError):
        manager.fork("parent", Leaving(name, [*WRITTEN, 7]))
    assert manager.contains(name)
    with pytest.raises(kvcore.AlreadyClaimedError):
        manager.claim(name)
    manager.release(name)
    manager.release("parent")
    assert "0 requests" in repr(manager)


class Fixed(Context):
    """A context whose start index cannot move."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "start_idx" and value > 0:
            raise RuntimeError("start_idx stays")
        super().__setattr__(name, value)


def test_children_that_fail_when_they_are_moved_are_not_claimed() -> None:
    manager = make_manager(4, 8)
    parent = prefilled(manager, WRITTEN)
    children = [Fixed(name, [*WRITTEN, 7]) for name in ("one", "two")]
    with pytest.raises(RuntimeError, match="stays"):
        manager.fork(parent.request_id, *children)
    assert not any(manager.contains(name) for name in ("one", "two"))
    assert "1 requests" in repr(manager)
    manager.release(parent.request_id)
    assert manager.num_free_blocks == 8


def test_a_fork_that_fails_moves_its_other_children_back() -> None:
    manager = make_manager(4, 8)
    parent = prefilled(manager, WRITTEN)
    own = make_context([*WRITTEN, 7, 8], "own", active_idx=2)
    with pytest.raises(RuntimeError, match="stays"):
        manager.fork(parent.request_id, own, Fixed("child", [*WRITTEN, 7]))
    assert (own.start_idx, own.active_idx, own.end_idx) == (0, 2, len(WRITTEN) + 2)
    manager.fork(parent.request_id, own)
    assert own.start_idx == len(WRITTEN)
