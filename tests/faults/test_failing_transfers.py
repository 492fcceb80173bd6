# SPDX-License-Identifier: Apache-2.0
"""Copies and buffers that fail: no trace is left, and the next call succeeds."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
import kvcore.paged
from builders import error_of, make_context, make_manager
from kvcore.pools import make_copier
from meddling_copies import PHASES, SCENES, SETUPS, Aside, Scene, Setup, Stage, aside
from tier_steps import moved

ERRORS = [OSError, MemoryError, KeyboardInterrupt]


@pytest.fixture(params=SCENES)
def make_scene(request: pytest.FixtureRequest) -> Any:
    return SCENES[request.param]


def failing(error: type[BaseException]) -> Callable[[], object]:
    def fail() -> None:
        raise error("this copy fails")

    return fail


def try_to_act(scene: Scene, phase: str, error: type[BaseException]) -> None:
    """Make the copies of a call fail; a failed store raises no error."""
    scene.meddler.hooks[phase] = failing(error)
    if scene.blocks or error is KeyboardInterrupt:
        with pytest.raises(error, match="this copy fails"):
            scene.act()
    else:
        scene.act()


def undisturbed(make_scene: Any, setup: Setup) -> tuple[Any, kvcore.KVCacheMetrics]:
    """Return the state and the metrics of a scene without a failure."""
    scene = make_scene(setup)
    scene.act()
    return scene.stage.state(), scene.stage.manager.metrics


# -- copies that fail ----------------------------------------------------------------------------
@pytest.mark.parametrize("error", ERRORS)
def test_failed_copy_is_done_again(make_scene: Any, error: type[BaseException]) -> None:
    """After the failure each request is as before, as after, or as just claimed.

    The next call gives the same results as a first call.
    """
    for setup in SETUPS:
        after, metrics = undisturbed(make_scene, setup)
        for phase in PHASES:
            scene = make_scene(setup)
            before = scene.stage.state()
            try_to_act(scene, phase, error)
            scene.stage.manager.check_integrity()
            for name, state in scene.stage.state().items():
                assert state in (before[name], after[name], (0, *before[name][1:])), (name, phase)
            scene.act()
            assert scene.stage.state() == after
            if scene.blocks:
                assert scene.stage.manager.metrics == metrics
            scene.stage.close()


def test_copy_that_fails_every_time_but_the_last(make_scene: Any) -> None:
    for setup in SETUPS:
        after, _ = undisturbed(make_scene, setup)
        scene = make_scene(setup)
        if not scene.blocks:
            continue
        for phase in PHASES * 2:
            try_to_act(scene, phase, OSError)
        scene.act()
        assert scene.stage.state() == after
        scene.stage.close()


def test_metrics_are_reset_before_a_copy_fails(make_scene: Any) -> None:
    """The counts of the failed call are not subtracted from the new counters."""
    for setup in SETUPS:
        scene, control = make_scene(setup), make_scene(setup)
        if not scene.blocks:
            continue
        control.stage.manager.reset_metrics()
        control.act()
        for phase in PHASES:
            scene = make_scene(setup)

            def meddle(scene: Scene = scene) -> None:
                scene.stage.manager.reset_metrics()
                raise OSError("this copy fails")

            scene.meddler.hooks[phase] = meddle
            with pytest.raises(OSError, match="this copy fails"):
                scene.act()
            assert min(counters(scene)) >= 0
            scene.stage.manager.check_integrity()
            scene.act()
            assert scene.target.start_idx == control.target.start_idx
            assert all(np.less_equal(counters(scene), counters(control)))
            scene.stage.close()


def counters(scene: Scene) -> tuple[int, int, int]:
    metrics = scene.stage.manager.metrics
    return metrics.cache_tokens, metrics.input_tokens, metrics.copied_tokens


def test_released_after_its_copy_failed(make_scene: Any) -> None:
    """A copy that was due to the request is dropped, and holds no page."""
    for setup in SETUPS:
        for phase in PHASES:
            scene = make_scene(setup)
            try_to_act(scene, phase, OSError)
            scene.stage.manager.release(scene.target.request_id)
            scene.stage.manager.check_integrity()
            scene.stage.close()


NEXT: dict[str, Callable[[Scene], object]] = {
    "fetch": lambda s: s.stage.manager.fetch([s.target]),
    "reserve": lambda s: s.stage.manager.maybe_reserve(s.target),
    "reserve a batch": lambda s: s.stage.manager.maybe_reserve_batch([s.target]),
    "step": lambda s: s.stage.manager.step([s.target]),
    "fork": lambda s: s.stage.fork(s.target),
    "truncate": lambda s: s.stage.manager.truncate(s.target.request_id, s.target.start_idx),
}


@pytest.mark.parametrize("follows", NEXT.values(), ids=list(NEXT))
@pytest.mark.parametrize("kind", ["write after a fork", "write into a committed page"])
def test_next_call_does_the_copy_that_failed(kind: str, follows: Callable[[Scene], object]) -> None:
    for setup in SETUPS:
        scene = SCENES[kind](setup)
        try_to_act(scene, "middle", OSError)
        runs = len(scene.meddler.runs)
        scene.meddler.hooks["before"] = failing(OSError)
        with pytest.raises(OSError, match="this copy fails"):
            follows(scene)
        follows(scene)
        assert len(scene.meddler.runs) == runs + 2
        scene.stage.pages.check(scene.target)
        scene.stage.close()


@pytest.mark.parametrize("error", ERRORS)
def test_one_of_two_batches_fails(error: type[BaseException]) -> None:
    """The other batch, whose copies run in another thread at that time, succeeds."""
    for setup in SETUPS:
        stage = Stage(setup)
        stage.cached(range(12))
        first, second = stage.claimed([*range(7), 50]), stage.claimed([*range(6), 51])

        def meddle(stage: Stage = stage, second: Any = second) -> None:
            aside(lambda: stage.pages.run([second]))
            raise error("this copy fails")

        stage.copier.hooks["middle"] = meddle
        with pytest.raises(error, match="this copy fails"):
            stage.manager.fetch([first])
        assert stage.state_of(first) == (0, 0, 8)
        stage.close()


# -- the host tier -------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [OSError, MemoryError])
@pytest.mark.parametrize("phase", PHASES)
def test_step_returns_its_swaps_whatever_happens_to_the_store(
    phase: str, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    for setup in SETUPS:
        stage = Stage(setup, host_pages=32)
        twins = [stage.claimed(range(9)) for _ in range(2)]
        stage.manager.fetch(twins)
        for context in twins:
            stage.pages.write(context)
            context.update(0)
        stage.mover.hooks[phase] = failing(error)
        with caplog.at_level(logging.WARNING, "kvcore"):
            swaps = stage.manager.step(twins)
        pages = stage.manager.get_req_blocks(twins[0].request_id)
        assert swaps.tolist() == [[1, 0, pages[0]], [1, 1, pages[1]]]
        assert "2 pages were not stored" in caplog.text
        caplog.clear()
        assert moved(stage.manager) == (0, 0)
        assert stage.manager.host_committed_block_pct == 0
        stage.close()


def test_interrupted_store_is_a_commit_that_stored_nothing() -> None:
    """The interrupt is raised; the next call finds the pages committed."""
    stage = Stage(Setup(), host_pages=32)
    context = stage.claimed(range(9))
    stage.manager.fetch([context])
    stage.pages.write(context)
    context.update(0)
    stage.mover.hooks["middle"] = failing(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        stage.manager.step([context])
    assert stage.manager.match_prefix(list(range(9))) == 8
    assert stage.manager.step([context]).shape == (0, 3)
    assert moved(stage.manager) == (0, 0)
    stage.pages.run([context])
    stage.close()


# -- lists and buffers ---------------------------------------------------------------------------
@pytest.mark.parametrize("releases", [False, True])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("kind", ["batch that is reserved", "batch that is fetched"])
def test_batch_that_is_cleared_while_it_is_copied(kind: str, fails: bool, releases: bool) -> None:
    verb = "maybe_reserve_batch" if "reserved" in kind else "fetch"
    for setup in SETUPS:
        stage = Stage(setup)
        stage.cached(range(12))
        rows = [stage.claimed([*range(7), 50]), stage.claimed([*range(6), 51])]
        names = [context.request_id for context in rows]
        if releases:
            stage.contexts.clear()

        def clear(stage: Stage = stage, rows: list[Any] = rows, names: list[str] = names) -> None:
            rows.clear()
            for name in names if releases else []:
                stage.manager.release(name)
            gc.collect()
            assert len([make_context(range(500)) for _ in range(20)]) == 20

        def meddle(clear: Callable[[], None] = clear) -> None:
            aside(clear)
            if fails:
                raise OSError("this copy fails")

        stage.copier.hooks["middle"] = meddle
        if fails or (releases and verb == "fetch"):
            call = functools.partial(getattr(stage.manager, verb), rows)
            expected = OSError if fails else kvcore.RequestNotFoundError
            assert isinstance(error_of(call), expected)
        else:
            getattr(stage.manager, verb)(rows)
        assert [stage.manager.contains(name) for name in names] == [not releases] * 2
        stage.close()


class Name:
    """An id whose weak reference shows whether its context is alive."""


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("verb", ["maybe_reserve_batch", "fetch"])
def test_contexts_live_as_long_as_the_call(verb: str, fails: bool) -> None:
    """The call sets their indices after the page copies, or after the copies failed."""
    stage = Stage(Setup())
    stage.cached(range(12))
    rows = [kvcore.TextGenerationContext(Name(), [*range(7), 50 + n]) for n in range(2)]
    names = [weakref.ref(context.request_id) for context in rows]
    for name in names:
        stage.manager.external_claim(name())

    def clear() -> None:
        rows.clear()
        for name in names:
            stage.manager.release(name())
        gc.collect()
        assert all(name() is not None for name in names)

    def meddle() -> None:
        aside(clear)
        if fails:
            raise OSError("this copy fails")

    stage.copier.hooks["middle"] = meddle
    expected = OSError if fails else kvcore.RequestNotFoundError
    with pytest.raises(expected) if fails or verb == "fetch" else contextlib.nullcontext():
        getattr(stage.manager, verb)(rows)
    stage.close()


@pytest.mark.parametrize("verb", ["maybe_reserve_batch", "fetch", "step"])
def test_batch_that_is_cleared_while_another_thread_copies(verb: str) -> None:
    """The call waits for the copies of its second row."""
    for setup in SETUPS:
        stage = Stage(setup)
        stage.cached(range(12))
        other, target = stage.served(range(20, 27)), stage.claimed([*range(7), 50])
        rows = [other, target]
        threads: list[Any] = []

        def meddle(stage: Stage = stage, rows: list[Any] = rows, threads: Any = threads) -> None:
            threads.append(Aside(lambda: getattr(stage.manager, verb)(rows)))
            assert threads[0].still_waits()
            rows.clear()
            gc.collect()

        stage.copier.hooks["middle"] = meddle
        assert stage.manager.maybe_reserve(target)
        threads[0].result()
        if setup.foreign:  # two threads have changed its indices
            stage.manager.release(target.request_id)
        stage.close()


class ScarceMemory:
    """Pools on GPUs as a manager sees them, in host memory; allocations may fail."""

    left = 1 << 30

    def pinned(self, entries: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise MemoryError("no pinned memory")
        return np.frombuffer(bytearray(4 * entries), np.uint32)

    def enter(self, replica: int) -> None:
        pass

    def arriving(self, shard: int) -> None:
        return None

    def stage(self, shard: int, lengths: Any, table: Any) -> tuple[Any, Any, Any]:
        return np.array(lengths), np.array(table), None

    def mark(self, shard: int) -> None:
        return None


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ScarceMemory:
    scarce = ScarceMemory()
    monkeypatch.setattr(kvcore.paged, "pools_on_gpus", lambda *_: scarce)
    monkeypatch.setattr(kvcore.paged, "make_copier", lambda shards, _: make_copier(shards, None))
    return scarce


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_fetch_that_gets_no_larger_buffer_keeps_its_copies(
    setup: Setup, memory: ScarceMemory
) -> None:
    stage = Stage(setup, num_pages=64)
    stage.cached(range(12))
    rows = [stage.claimed([*range(7), 50]), stage.claimed([*range(6), 51])]
    rows += [stage.claimed([100 + n]) for n in range(18)]
    runs, memory.left = len(stage.copier.runs), 0
    for _ in range(3):
        with pytest.raises(MemoryError, match="no pinned memory"):
            stage.manager.fetch(rows)
        stage.manager.check_integrity()
        assert [c.start_idx for c in rows[:3]] == [7, 6, 0]
    memory.left = 1 << 30
    before = stage.manager.num_free_blocks
    stage.pages.run(rows)
    assert stage.manager.num_free_blocks == before
    assert len(stage.copier.runs) == runs + 1
    stage.close()


def test_first_buffer_is_refused(memory: ScarceMemory) -> None:
    memory.left = 0
    manager = make_manager(blocks="allocate")
    context = make_context(range(7))
    manager.external_claim(context.request_id)
    with pytest.raises(MemoryError, match="no pinned memory"):
        manager.fetch([context])
    assert manager.num_free_blocks == 16
    memory.left = 1
    manager.fetch([context])
    manager.release(context.request_id)
    assert manager.num_free_blocks == 16
