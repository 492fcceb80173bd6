# SPDX-License-Identifier: Apache-2.0
"""Request ids whose hash and comparison are Python code: they switch threads, raise, call back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

import kvcore
from builders import make_manager, prefilled, put_in_cache
from foreign_context import Context
from together import run_together, switch_often

__all__ = ["switch_often"]

SLOTS = 6
PROMPT = list(range(10))


@dataclasses.dataclass(frozen=True)
class Name:
    """An id as engines write ids."""

    user: str
    turn: int


class Touchy:
    """An id that calls a function the n-th time it is hashed or compared from now."""

    def __init__(self, name: str) -> None:
        self.name, self.left = name, 0
        self.call: Callable[[], object] = list

    def arm(self, uses: int, call: Callable[[], object]) -> None:
        self.left, self.call = uses, call

    def use(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.call()

    def __hash__(self) -> int:
        self.use()
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        self.use()
        return isinstance(other, Touchy) and self.name == other.name


class BrokenId(Exception):  # noqa: N818
    """The error that an id raises."""


def fail() -> None:
    raise BrokenId


def check_all_slots_are_there(manager: kvcore.PagedKVCacheManager, free: int) -> None:
    """Claims fill every free slot, and one more claim is refused."""
    names = [f"late-{n}" for n in range(free)]
    for name in names:
        manager.claim(name)
    with pytest.raises(kvcore.CapacityError):
        manager.claim("one too many")
    for name in names:
        manager.release(name)


# -- threads -------------------------------------------------------------------------------------
@pytest.mark.usefixtures("switch_often")
def test_one_thread_of_many_claims_an_id() -> None:
    manager = make_manager(max_batch_size=500, enable_runtime_checks=False)
    won: list[Name] = []

    def work(_number: int) -> None:
        for turn in range(300):
            try:
                manager.claim(Name("a", turn))
            except kvcore.AlreadyClaimedError:
                continue
            won.append(Name("a", turn))

    run_together(work)
    assert sorted(name.turn for name in won) == list(range(300))
    for name in won:
        manager.release(name)
    check_all_slots_are_there(manager, 500)


@pytest.mark.usefixtures("switch_often")
def test_threads_serve_requests_with_ids_of_python() -> None:
    """Requests come and go while other threads' ids are hashed."""
    manager = make_manager(4, 400, max_batch_size=400, enable_runtime_checks=False)

    def work(number: int) -> None:
        for turn in range(40):
            batch = [
                kvcore.TextGenerationContext(Name(f"{number}", 10 * turn + k), [number, turn, k])
                for k in range(5)
            ]
            for context in batch:
                manager.claim(context.request_id)
            (inputs,) = manager.fetch(batch)
            for row, context in enumerate(batch):
                pages = manager.get_req_blocks(context.request_id)
                assert inputs.lookup_table[row].tolist() == pages
            kvcore.update_batch(batch, [1] * 5)
            manager.step(batch)
            for context in batch:
                manager.release(context.request_id)

    run_together(work)
    manager.check_integrity()
    check_all_slots_are_there(manager, 400)


# -- ids that call back --------------------------------------------------------------------------
@pytest.mark.parametrize("uses", range(1, 6))
def test_id_that_claims_itself_while_it_is_claimed(uses: int) -> None:
    manager = make_manager(max_batch_size=SLOTS)
    name = Touchy("name")
    name.arm(uses, lambda: manager.claim(name))
    try:
        manager.claim(name)
    except kvcore.AlreadyClaimedError:
        assert manager.contains(name)
    name.arm(0, list)
    manager.release(name)
    check_all_slots_are_there(manager, SLOTS)


@pytest.mark.parametrize("uses", range(1, 6))
def test_id_that_releases_itself_while_it_is_released(uses: int) -> None:
    manager = make_manager(max_batch_size=SLOTS)
    name = Touchy("name")
    manager.claim(name)
    name.arm(uses, lambda: manager.release(name))
    try:
        manager.release(name)
    except kvcore.RequestNotFoundError:
        assert not manager.contains(name)
    name.arm(0, list)
    check_all_slots_are_there(manager, SLOTS)


@pytest.mark.parametrize("verb", ["fetch", "maybe_reserve_batch", "step", "shared_prefixes"])
def test_id_that_moves_a_context_read_before_it(verb: str) -> None:
    """The other manager's handle must not count as a handle of this manager."""
    manager, other = make_manager(max_batch_size=SLOTS), make_manager(max_batch_size=SLOTS)
    first = kvcore.TextGenerationContext("first", PROMPT)
    name = Touchy("late")
    late = kvcore.TextGenerationContext(name, PROMPT)
    for each in ("blocker", "another", "first"):
        other.claim(each)
    manager.claim("first")
    manager.claim(name)
    bystander = prefilled(manager, range(50, 60))
    before = manager.get_req_blocks(bystander.request_id)
    name.arm(1, lambda: other.plan(first))
    getattr(manager, verb)([first, late])
    name.arm(0, list)
    assert manager.get_req_blocks(bystander.request_id) == before
    assert [other.get_req_blocks(each) for each in ("blocker", "another", "first")] == [[], [], []]
    reserves = verb in ("fetch", "maybe_reserve_batch")
    assert bool(manager.get_req_blocks("first")) == bool(manager.get_req_blocks(name)) == reserves
    manager.check_integrity()
    other.check_integrity()


@pytest.mark.parametrize("verb", ["fetch", "maybe_reserve_batch", "step", "shared_prefixes"])
def test_id_that_empties_the_batch(verb: str) -> None:
    manager = make_manager(4, 64)
    late = Touchy("late")
    batch = [kvcore.TextGenerationContext(n, [n]) for n in range(40)]
    batch.insert(1, kvcore.TextGenerationContext(late, [1]))
    for context in batch:
        manager.claim(context.request_id)
    late.arm(1, batch.clear)
    getattr(manager, verb)(batch)
    manager.check_integrity()


def test_id_that_claims_many_while_a_batch_is_read() -> None:
    """The claims' data may move in memory."""
    manager = make_manager(1, 2000, max_batch_size=2000, enable_runtime_checks=False)
    late = Touchy("late")
    batch = [prefilled(manager, [n]) for n in range(20)]
    batch.insert(1, kvcore.TextGenerationContext(late, [1]))
    manager.claim(late)

    def claim_many() -> None:
        for n in range(1500):
            manager.claim(n)

    late.arm(1, claim_many)
    (inputs,) = manager.fetch(batch)
    late.arm(0, list)
    for row, context in zip(inputs.lookup_table.tolist(), batch, strict=True):
        pages = manager.get_req_blocks(context.request_id)
        assert row[: len(pages)] == pages


# -- ids that raise ------------------------------------------------------------------------------
class Scene:
    """`name` has pages and is in the cache, `twin` equals it but is not the same object."""

    def __init__(self, *, is_claimed: bool) -> None:
        self.manager: Any = make_manager(max_batch_size=SLOTS)
        put_in_cache(self.manager, PROMPT)
        self.parent = prefilled(self.manager, PROMPT)
        self.name, self.twin = Touchy("name"), Touchy("name")
        self.is_claimed = is_claimed
        self.context: Any = kvcore.TextGenerationContext(self.twin, [*PROMPT, 0, 7])
        self.foreign = Context(self.twin, [*PROMPT, 0, 7])
        if is_claimed:
            self.manager.claim(self.name)
            held: Any = kvcore.TextGenerationContext(self.name, PROMPT)
            assert self.manager.maybe_reserve(held)

    def state(self) -> object:
        self.name.arm(0, list)
        self.twin.arm(0, list)
        manager = self.manager
        is_claimed = manager.contains(self.name)
        return (
            is_claimed,
            manager.get_req_blocks(self.name) if is_claimed else None,
            manager.num_free_blocks,
            manager.metrics,
            repr(manager),
            (self.context.start_idx, self.context.active_idx, self.foreign.start_idx),
        )


VERBS: dict[str, Callable[[Scene], object]] = {
    "claim": lambda s: s.manager.claim(s.twin),
    "release": lambda s: s.manager.release(s.twin),
    "contains": lambda s: s.manager.contains(s.twin),
    "get_req_blocks": lambda s: s.manager.get_req_blocks(s.twin),
    "get_replica": lambda s: s.manager.get_replica(s.context),
    "truncate": lambda s: s.manager.truncate(s.twin, 0),
    "fork": lambda s: s.manager.fork(s.parent.request_id, s.context),
    "fork of a foreign one": lambda s: s.manager.fork(s.parent.request_id, s.foreign),
    "fork from it": lambda s: s.manager.fork(s.twin, Context("child", [1])),
    "plan": lambda s: s.manager.plan(s.context),
    "reserve": lambda s: s.manager.reserve(s.context),
    "reserve a foreign one": lambda s: s.manager.reserve(s.foreign),
    "reserve two": lambda s: s.manager.maybe_reserve_batch([s.context, s.parent]),
    "fetch": lambda s: s.manager.fetch([s.parent, s.context]),
    "fetch a foreign one": lambda s: s.manager.fetch([s.foreign, s.parent]),
}


@pytest.mark.parametrize("is_claimed", [False, True])
@pytest.mark.parametrize("verb", VERBS.values(), ids=list(VERBS))
def test_id_that_raises_leaves_no_trace(
    verb: Callable[[Scene], object], *, is_claimed: bool
) -> None:
    """If any use of the id fails, the call changes nothing."""
    for uses in range(1, 12):
        scene = Scene(is_claimed=is_claimed)
        before = scene.state()
        scene.twin.arm(uses, fail)
        scene.name.arm(uses, fail)
        try:
            verb(scene)
        except BrokenId:
            assert scene.state() == before
            scene.manager.check_integrity()
            check_all_slots_are_there(scene.manager, SLOTS - 1 - is_claimed)
        except (kvcore.KVCacheError, ValueError):
            assert scene.state() == before


def test_id_without_a_hash() -> None:
    manager = make_manager()
    for verb in (manager.claim, manager.release, manager.contains, manager.get_req_blocks):
        with pytest.raises(TypeError, match="unhashable"):
            verb([1])  # type: ignore[arg-type]
