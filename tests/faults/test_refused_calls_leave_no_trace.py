# SPDX-License-Identifier: Apache-2.0
"""A call that raises or answers "no" leaves pages, metrics, contexts and tables unchanged."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import pytest

import kvcore
from builders import claimed, error_of, make_context, make_manager, prefilled, put_in_cache
from foreign_context import Context
from kvcore import errors
from tables import table

NUM_PAGES = 12
PAGE_SIZE = 4

ANY_ORDER_OF_CALLS = True  # the batches are in the state before an update


class Scene:
    """A manager in the middle of its work.

    Of 12 pages, `running` holds 3 (2 committed), `reserved` shares those 2 and owns 1, 2 are cached
    and pinned, 1 is cached and can be evicted, 5 were never used: `waiting` would fit, `foreign`
    would not. The replica has no free request slot.
    """

    def __init__(self, **rest: Any) -> None:
        self.manager: Any = make_manager(
            PAGE_SIZE, NUM_PAGES, max_batch_size=4, max_seq_len=64, **rest
        )
        self.prompts = [list(range(n)) for n in (4, 8, 10)]
        self.prompts += [list(range(100, 108)), list(range(300, 304)), list(range(200, 220))]
        for prompt in self.prompts[3:5]:
            put_in_cache(self.manager, prompt)
        self.pinned = self.manager.pin(self.prompts[3])
        self.running = prefilled(self.manager, range(10))
        self.reserved = claimed(self.manager, [*range(8), 50, 51])
        assert self.manager.maybe_reserve(self.reserved)
        self.held = self.manager.fetch([self.running])
        self.waiting = claimed(self.manager, range(200, 220))
        self.foreign = Context("foreign", range(200, 240))
        self.manager.external_claim("foreign")
        self.stranger = make_context(range(10), "stranger")
        self.manager.take_copies()

    @property
    def contexts(self) -> list[Any]:
        return [self.running, self.reserved, self.waiting, self.foreign, self.stranger]

    def snapshot(self) -> dict[str, object]:
        """Return all state that a caller can see."""
        manager = self.manager
        names = [context.request_id for context in self.contexts]
        matches = [manager.match_prefix(p, return_pages=True) for p in self.prompts]
        return {
            "free": (manager.num_free_blocks, manager.free_blocks_pct, manager.used_blocks_pct),
            "metrics": manager.metrics,
            "contexts": [
                (c.start_idx, c.active_idx, c.end_idx, c.tokens.tolist()) for c in self.contexts
            ],
            "claimed": [manager.contains(name) for name in names],
            "pages": [
                list(manager.get_req_blocks(name)) for name in names if manager.contains(name)
            ],
            "cached": [(n, pages.tolist()) for n, pages in matches],
            "tables": [(e.lookup_table.tolist(), e.cache_lengths.tolist()) for e in self.held],
            "copies": manager.take_copies().tolist(),
        }

    def too_long(self, request_id: str, length: int) -> kvcore.TextGenerationContext:
        """Replace the waiting request with a longer one."""
        self.manager.release(self.waiting.request_id)
        self.waiting = claimed(self.manager, range(length), request_id=request_id)
        return self.waiting


@dataclasses.dataclass
class Case:
    name: str
    error: type[Exception]
    make: Callable[[Scene], Callable[[], object]]
    words: tuple[object, ...] = ()


def broken(request_id: str, **values: Any) -> Context:
    context = Context(request_id, range(10))
    for name, value in values.items():
        setattr(context, name, value)
    return context


class WithTokens(Context):
    """A context with a token array that the test sets."""

    def __init__(self, request_id: str, tokens: Any) -> None:
        super().__init__(request_id, range(10))
        self.array = tokens

    @property
    def tokens(self) -> Any:
        return self.array


def on_foreign(verb: str, **values: Any) -> Callable[[Scene], Callable[[], object]]:
    """Return a call of a verb with a foreign context in an invalid state."""

    def make(scene: Scene) -> Callable[[], object]:
        context = broken("foreign", **values)
        call = getattr(scene.manager, verb)
        return lambda: call(context if verb in ("maybe_reserve", "plan") else [context])

    return make


def over_written(scene: Scene) -> Callable[[], object]:
    context = broken("foreign", start_idx=9)
    return lambda: scene.manager.step([scene.running, context])


def in_batch(verb: str, *members: str) -> Callable[[Scene], Callable[[], object]]:
    def make(scene: Scene) -> Callable[[], object]:
        batch = [getattr(scene, member) for member in members]
        return lambda: getattr(scene.manager, verb)(batch)

    return make


def simple(call: Callable[[Scene], object]) -> Callable[[Scene], Callable[[], object]]:
    return lambda scene: lambda: call(scene)


def longer(length: int, num_steps: int = 1) -> Callable[[Scene], Callable[[], object]]:
    def make(scene: Scene) -> Callable[[], object]:
        context = scene.too_long("long one", length)
        return lambda: scene.manager.maybe_reserve(context, num_steps)

    return make


def fetch_longer(scene: Scene) -> Callable[[], object]:
    context = scene.too_long("long one", 49)
    return lambda: scene.manager.fetch([scene.running, context])


def batch_longer(scene: Scene) -> Callable[[], object]:
    context = scene.too_long("long one", 49)
    return lambda: scene.manager.maybe_reserve_batch([scene.running, scene.reserved, context])


def unpinned_twice(scene: Scene) -> Callable[[], object]:
    scene.pinned.release()
    return scene.pinned.release


def released_twice(scene: Scene) -> Callable[[], object]:
    scene.manager.release(scene.waiting.request_id)
    return lambda: scene.manager.release(scene.waiting.request_id)


NOT_FOUND, CAPACITY = errors.RequestNotFoundError, errors.CapacityError
SHORT = errors.InsufficientBlocksError
FLOATS: Any = np.zeros(4, np.float32)
SQUARE = np.zeros((2, 2), np.int32)
WIDE = np.array([1, 2**31], np.int64)

CASES = [
    Case("claim twice", errors.AlreadyClaimedError,
         simple(lambda s: s.manager.external_claim("foreign", 0)), ("foreign", 0)),
    Case("claim on a full replica", CAPACITY,
         simple(lambda s: s.manager.external_claim("stranger")), ("stranger", 4)),
    Case("claim an unhashable id", TypeError,
         simple(lambda s: s.manager.external_claim(["stranger"]))),
    Case("claim on replica 1 of 1", IndexError,
         simple(lambda s: s.manager.external_claim("stranger", 1)), (1,)),
    Case("claim on replica -1", IndexError,
         simple(lambda s: s.manager.external_claim("stranger", -1)), (-1,)),
    Case("claim on replica 0.5", TypeError,
         simple(lambda s: s.manager.external_claim("stranger", 0.5))),
    Case("claim on replica 'best'", ValueError,
         simple(lambda s: s.manager.external_claim("stranger", "best")), ("best", "auto")),
    Case("reserve unclaimed", NOT_FOUND,
         simple(lambda s: s.manager.maybe_reserve(s.stranger)), ("stranger",)),
    Case("reserve past max_seq_len", CAPACITY, longer(40, 30), ("long one", 69, 64)),
    Case("reserve more than the pool", CAPACITY, longer(49), ("long one", 13, 12)),
    Case("reserve 0 steps", ValueError,
         simple(lambda s: s.manager.maybe_reserve(s.running, 0)), (0,)),
    Case("reserve -1 steps", ValueError,
         simple(lambda s: s.manager.maybe_reserve(s.running, -1)), (-1,)),
    Case("reserve half a step", TypeError,
         simple(lambda s: s.manager.maybe_reserve(s.running, 0.5))),
    Case("reserve no context", TypeError,
         simple(lambda s: s.manager.maybe_reserve("foreign"))),
    Case("reserve start == active", ValueError,
         on_foreign("maybe_reserve", start_idx=10), (10,)),
    Case("reserve active > end", ValueError,
         on_foreign("maybe_reserve", active_idx=11), (11, 10)),
    Case("reserve start < 0", ValueError, on_foreign("maybe_reserve", start_idx=-1), (-1,)),
    Case("reserve a table of tokens", ValueError,
         simple(lambda s: s.manager.maybe_reserve(WithTokens("foreign", SQUARE)))),
    Case("reserve float tokens", TypeError,
         simple(lambda s: s.manager.maybe_reserve(WithTokens("foreign", FLOATS))), ("float32",)),
    Case("reserve a batch with one unclaimed", NOT_FOUND,
         in_batch("maybe_reserve_batch", "running", "waiting", "stranger"), ("stranger",)),
    Case("reserve a batch with one too long", CAPACITY, batch_longer, ("long one", 13, 12)),
    Case("reserve a negative hit", ValueError,
         simple(lambda s: s.manager.maybe_reserve(s.waiting, max_hit=-1)), (-1,)),
    Case("reserve by what can never fit", CAPACITY,
         simple(lambda s: s.manager.maybe_reserve(s.waiting, must_fit=10**9)), (10**9,)),
    Case("plan on no replica", IndexError,
         simple(lambda s: s.manager.plan(s.stranger, replica_idx=9)), (9,)),
    Case("plan 0 steps", ValueError, simple(lambda s: s.manager.plan(s.running, 0)), (0,)),
    Case("plan start == active", ValueError, on_foreign("plan", start_idx=10), (10,)),
    Case("fetch more than is free", SHORT,
         in_batch("fetch", "running", "foreign"), ("foreign", 10, 6, 12)),
    Case("fetch two that fit only alone", SHORT,
         simple(lambda s: s.manager.fetch([s.reserved, s.waiting, Context("foreign", range(20))]))),
    Case("fetch a duplicate", ValueError,
         in_batch("fetch", "running", "reserved", "running")),
    Case("fetch one unclaimed", NOT_FOUND,
         in_batch("fetch", "reserved", "running", "stranger"), ("stranger",)),
    Case("fetch more than the pool", CAPACITY, fetch_longer, ("long one", 13, 12)),
    Case("fetch 0 steps", ValueError, simple(lambda s: s.manager.fetch([s.running], 0)), (0,)),
    Case("fetch no context", TypeError, simple(lambda s: s.manager.fetch([s.running, 7]))),
    Case("fetch start == active", ValueError, on_foreign("fetch", start_idx=10), (10,)),
    Case("step unclaimed", NOT_FOUND, in_batch("step", "running", "stranger"), ("stranger",)),
    Case("step what was never reserved", ValueError, over_written, ("foreign", 9)),
    Case("step no context", TypeError, simple(lambda s: s.manager.step([s.running, None]))),
    Case("release unclaimed", NOT_FOUND,
         simple(lambda s: s.manager.release("stranger")), ("stranger",)),
    Case("release twice", NOT_FOUND, released_twice),
    Case("pages of an unclaimed request", NOT_FOUND,
         simple(lambda s: s.manager.get_req_blocks("stranger")), ("stranger",)),
    Case("replica of an unclaimed request", NOT_FOUND,
         simple(lambda s: s.manager.get_replica(s.stranger)), ("stranger",)),
    Case("unpin twice", errors.InvalidHandleError, unpinned_twice),
    Case("pin on replica 1 of 1", IndexError,
         simple(lambda s: s.manager.pin([1, 2], replica_idx=1)), (1,)),
    Case("pin float tokens", TypeError, simple(lambda s: s.manager.pin(FLOATS)), ("float32",)),
    Case("match a table of tokens", ValueError, simple(lambda s: s.manager.match_prefix(SQUARE))),
    Case("match tokens beyond int32", ValueError,
         simple(lambda s: s.manager.match_prefix(WIDE)), (2**31,)),
    Case("match on replica 1 of 1", IndexError,
         simple(lambda s: s.manager.match_prefix([1], replica_idx=1)), (1,)),
    Case("match with a number as salt", TypeError,
         simple(lambda s: s.manager.match_prefix([1], cache_salt=5))),
    Case("splits of an unclaimed request", NOT_FOUND,
         in_batch("get_data_parallel_splits", "running", "stranger"), ("stranger",)),
    Case("update too few", ValueError,
         simple(lambda s: kvcore.update_batch([s.running, s.reserved], np.zeros(1, np.int32))),
         (1, 2)),
    Case("update with floats", TypeError,
         simple(lambda s: kvcore.update_batch([s.running], FLOATS[:1]))),
    Case("update with a table", ValueError,
         simple(lambda s: kvcore.update_batch([s.running], np.zeros((1, 1), np.int32)))),
    Case("update no context", TypeError,
         simple(lambda s: kvcore.update_batch([s.running, cast("Any", 5)], np.zeros(2, np.int32)))),
    Case("update a context beyond int32", ValueError,
         simple(lambda s: s.running.update(2**31)), (2**31,)),
    Case("extend with one beyond int32", ValueError,
         simple(lambda s: s.running.extend([1, 2**31])), (2**31,)),
    Case("rewind to 0", ValueError, simple(lambda s: s.running.rewind(0)), (0, 11)),
    Case("rewind past the end", ValueError, simple(lambda s: s.running.rewind(12)), (12, 11)),
    Case("active_idx at start", ValueError,
         simple(lambda s: setattr(s.running, "active_idx", 10)), (10,)),
]  # fmt: skip


@table("case", CASES)
def test_error_leaves_no_trace(case: Case) -> None:
    scene = Scene()
    call = case.make(scene)
    before = scene.snapshot()
    error = error_of(call)
    assert isinstance(error, case.error), repr(error)
    own = isinstance(error, errors.KVCacheError)
    assert own == issubclass(case.error, errors.KVCacheError), repr(error)
    for word in case.words:
        exact = rf"(?<![\d-]){word}(?!\d)" if isinstance(word, int) else re.escape(str(word))
        assert re.search(exact, str(error)), f"{word!r} is not in {str(error)!r}"
    assert not str(error).startswith(("'", '"'))
    assert scene.snapshot() == before
    scene.manager.check_integrity()
    assert_still_works(scene)


def assert_still_works(scene: Scene) -> None:
    assert scene.manager.maybe_reserve(scene.running)
    scene.manager.fetch([scene.running, scene.reserved])
    for context in (scene.running, scene.reserved):
        context.update(7)
    scene.manager.step([scene.reserved, scene.running])


def no_answers() -> Iterable[tuple[str, Callable[[Scene], object], object]]:
    yield "reserve", lambda s: s.manager.maybe_reserve(s.foreign), False
    yield "reserve steps", lambda s: s.manager.maybe_reserve(s.running, num_steps=50), False
    yield "reserve a batch", lambda s: s.manager.maybe_reserve_batch([s.foreign, s.running]), 0
    yield "plan", lambda s: s.manager.plan(s.foreign).fits, False
    yield "plan never", lambda s: s.manager.plan(Context("foreign", range(49))).fits, False
    yield "contains", lambda s: s.manager.contains("nobody"), False
    yield "recommend", lambda s: s.manager.get_or_recommend_replica(s.stranger), 0


@pytest.mark.parametrize(
    ("call", "answer"), [pytest.param(*rest, id=name) for name, *rest in no_answers()]
)
def test_no_leaves_no_trace(call: Callable[[Scene], object], answer: object) -> None:
    scene = Scene()
    before = scene.snapshot()
    assert call(scene) == answer
    assert scene.snapshot() == before


def test_ungrouped_batch_has_no_splits() -> None:
    manager = make_manager(replicas=2)
    rows = [claimed(manager, [1, 2], replica_idx=r) for r in (0, 1, 0)]
    with pytest.raises(
        ValueError, match=r"row 2 of the batch is on replica 0, .* sort the batch by get_replica"
    ):
        manager.get_data_parallel_splits(rows)
    assert manager.get_data_parallel_splits([rows[0], rows[2], rows[1]]).tolist() == [0, 2, 3]


def test_several_replicas_need_an_index() -> None:
    manager = make_manager(replicas=2)
    with pytest.raises(ValueError, match="replica_idx"):
        manager.external_claim("request")
    assert not manager.contains("request")


def test_fetch_is_atomic_over_replicas() -> None:
    manager = make_manager(4, 4, replicas=2)
    fits = claimed(manager, range(8), replica_idx=0)
    short = [claimed(manager, range(n, n + 12), replica_idx=1) for n in (0, 50)]
    before = manager.num_free_blocks, manager.metrics
    with pytest.raises(SHORT):
        manager.fetch([fits, *short])
    assert (manager.num_free_blocks, manager.metrics) == before
    assert [list(manager.get_req_blocks(c.request_id)) for c in (fits, *short)] == [[], [], []]


def test_refused_fetch_counts_no_input() -> None:
    manager = make_manager(4, 8)
    running, other = claimed(manager, range(5)), claimed(manager, range(20, 48))
    running.active_idx = 3
    manager.fetch([running])
    running.update(0)
    manager.step([running])
    counted = manager.metrics.input_tokens
    for refused in ([running, running], [running, make_context([1])], [running, other]):
        with pytest.raises((ValueError, SHORT)):
            manager.fetch(refused)
    assert manager.metrics.input_tokens == counted
    manager.fetch([running])
    assert manager.metrics.input_tokens == counted + 2


def test_bases_of_the_error_classes() -> None:
    assert errors.KVCacheError.__bases__ == (RuntimeError,)
    assert errors.InsufficientBlocksError.__bases__ == (errors.KVCacheError, MemoryError)
    assert errors.RequestNotFoundError.__bases__ == (errors.KVCacheError, KeyError, ValueError)
    for name in ("AlreadyClaimedError", "CapacityError", "InvalidHandleError"):
        assert getattr(errors, name).__bases__ == (errors.KVCacheError, ValueError)
        assert getattr(kvcore, name) is getattr(errors, name)
