# SPDX-License-Identifier: Apache-2.0
"""Each request reads its own contents, whatever other threads do during page copies."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest

import kvcore
from meddling_copies import PHASES, SCENES, SETUPS, Aside, Scene, aside

GONE = kvcore.RequestNotFoundError


@pytest.fixture(params=SCENES)
def make_scene(request: pytest.FixtureRequest) -> Any:
    return SCENES[request.param]


def each_moment(make_scene: Any) -> Any:
    """Return every scene with each moment of interference."""
    return [(make_scene(setup), phase) for setup in SETUPS for phase in PHASES]


# -- without interference ------------------------------------------------------------------------
def test_scene_copies(make_scene: Any) -> None:
    for setup in SETUPS:
        scene = make_scene(setup)
        before = len(scene.meddler.runs)
        scene.act()
        assert len(scene.meddler.runs) == before + 1
        scene.stage.close()


# -- calls that do not wait ----------------------------------------------------------------------
def newcomer(scene: Scene) -> None:
    """Take all pages that are available, and write them."""
    stage = scene.stage
    context = stage.claimed(range(1000, 1000 + 4 * free_pages(stage)))
    assert stage.manager.maybe_reserve(context)
    stage.pages.run([context])
    stage.manager.release(context.request_id)


def free_pages(stage: Any) -> int:
    return int(stage.manager._core.stats(stage.replica).available_pages)


def fork_other(scene: Scene) -> None:
    scene.stage.pages.run([scene.stage.fork(scene.other)])


def truncate_other(scene: Scene) -> None:
    scene.stage.manager.truncate(scene.other.request_id, 5)
    scene.other.rewind(5)


def step_other(scene: Scene) -> None:
    scene.stage.pages.run([scene.other])


def fetch_other(scene: Scene) -> None:
    scene.stage.manager.fetch([scene.other])


def reserve_other(scene: Scene) -> None:
    assert scene.stage.manager.maybe_reserve_batch([scene.other], 5) == 1


FREE: dict[str, Callable[[Scene], object]] = {
    "release the target": lambda s: s.stage.manager.release(s.target.request_id),
    "release another": lambda s: s.stage.manager.release(s.other.request_id),
    "fork another": fork_other,
    "truncate another": truncate_other,
    "step another": step_other,
    "fetch another": fetch_other,
    "reserve another": reserve_other,
    "take all pages": newcomer,
    "reset": lambda s: s.stage.manager.reset_prefix_cache(),
    "reset the metrics": lambda s: s.stage.manager.reset_metrics(),
    "plan the target": lambda s: s.stage.manager.plan(s.target),
    "plan another": lambda s: s.stage.manager.plan(s.other),
    "look at the target": lambda s: s.stage.manager.get_req_blocks(s.target.request_id),
    "check": lambda s: s.stage.manager.check_integrity(),
}


@pytest.mark.parametrize("meddle", FREE.values(), ids=list(FREE))
def test_others_work_while_pages_are_copied(
    make_scene: Any, meddle: Callable[[Scene], object]
) -> None:
    for scene, phase in each_moment(make_scene):
        scene.meddler.hooks[phase] = lambda scene=scene: aside(lambda: meddle(scene))
        if meddle is FREE["release the target"]:
            leave_while_copied(scene)
        else:
            scene.act()
        assert not scene.meddler.hooks, "no interference ran"
        scene.stage.close()


def leave_while_copied(scene: Scene) -> None:
    with contextlib.suppress(GONE):
        scene.act()
    assert not scene.stage.manager.contains(scene.target.request_id)


def test_released_and_its_pages_taken(make_scene: Any) -> None:
    """The rest of the copy must not write pages that another request already owns."""
    for scene, phase in each_moment(make_scene):
        taken: list[Any] = []

        def meddle(scene: Scene = scene, taken: list[Any] = taken) -> None:
            stage = scene.stage
            stage.manager.release(scene.target.request_id)
            taken.append(stage.claimed(range(1000, 1000 + 4 * free_pages(stage) - 1)))
            stage.pages.run(taken)

        scene.meddler.hooks[phase] = lambda meddle=meddle: aside(meddle)
        leave_while_copied(scene)
        scene.stage.pages.check(taken[0])
        scene.stage.manager.release(taken[0].request_id)
        scene.stage.close()


def test_released_and_claimed_again_under_its_name(make_scene: Any) -> None:
    """The call's data of the old claim does not affect the new claim."""
    for scene, phase in each_moment(make_scene):
        stage, name = scene.stage, scene.target.request_id

        def meddle(stage: Any = stage, name: Any = name, scene: Scene = scene) -> None:
            stage.manager.release(name)
            stage.manager.external_claim(name, replica_idx=stage.replica)
            raise OSError("the copy fails too")

        scene.meddler.hooks[phase] = lambda meddle=meddle: aside(meddle)
        try:
            scene.act()
        except (OSError, GONE) as error:
            assert str(error)
        stage.manager.check_integrity()
        if stage.manager.contains(name):
            assert len(stage.manager.get_req_blocks(name)) == 0
        stage.close()


# -- calls that wait for the copies --------------------------------------------------------------
def fork_target(scene: Scene) -> None:
    child = scene.stage.new([*scene.target.tokens.tolist(), 71])
    scene.stage.manager.fork(scene.target.request_id, child)


WAITING: dict[str, Callable[[Scene], object]] = {
    "fork": fork_target,
    "truncate": lambda s: s.stage.manager.truncate(s.target.request_id, 0),
    "fetch": lambda s: s.stage.manager.fetch([s.target]),
    "reserve": lambda s: s.stage.manager.maybe_reserve(s.target),
    "reserve a batch": lambda s: s.stage.manager.maybe_reserve_batch([s.other, s.target]),
    "step": lambda s: s.stage.manager.step([s.other, s.target]),
}


@pytest.mark.parametrize("meddle", WAITING.values(), ids=list(WAITING))
@pytest.mark.parametrize("fails", [False, True])
def test_calls_on_the_target_wait_for_its_copies(
    make_scene: Any, meddle: Callable[[Scene], object], fails: bool
) -> None:
    """If the copies fail, the waiting call makes them, or finds a request without pages."""
    for scene, phase in each_moment(make_scene):
        waiting: list[Aside] = []

        def meddle_then_go_on(
            scene: Scene = scene, phase: str = phase, waiting: list[Aside] = waiting
        ) -> None:
            waiting.append(Aside(lambda: meddle(scene)))
            if scene.blocks:
                assert waiting[0].still_waits(), "it did not wait"
            else:
                waiting[0].result()
            if fails:
                raise OSError("the disk is gone")

        scene.meddler.hooks[phase] = meddle_then_go_on
        try:
            scene.act()
        except OSError:
            assert fails
        waiting[0].result()
        scene.stage.manager.check_integrity()
        if scene.stage.setup.foreign and meddle is not WAITING["fork"]:
            # Two threads moved the context's indices, which are up to the caller.
            scene.stage.manager.release(scene.target.request_id)
        scene.stage.close()


@pytest.mark.parametrize("meddle", WAITING.values(), ids=list(WAITING))
def test_copier_that_uses_its_own_target_is_refused(
    make_scene: Any, meddle: Callable[[Scene], object]
) -> None:
    """The call would wait for its own copy."""
    for scene, phase in each_moment(make_scene):
        scene.meddler.hooks[phase] = lambda scene=scene: meddle(scene)
        if scene.blocks:
            before = scene.stage.state()
            with pytest.raises(kvcore.PendingTransfersError, match="code that copies"):
                scene.act()
            scene.stage.manager.check_integrity()
            assert scene.stage.state().keys() == before.keys()
        else:
            scene.act()
        scene.stage.close()


@pytest.mark.parametrize("meddle", FREE.values(), ids=list(FREE))
def test_copier_may_use_the_manager_otherwise(
    make_scene: Any, meddle: Callable[[Scene], object]
) -> None:
    for scene, phase in each_moment(make_scene):
        scene.meddler.hooks[phase] = lambda scene=scene: meddle(scene)
        if meddle is FREE["release the target"]:
            leave_while_copied(scene)
        else:
            scene.act()
        scene.stage.close()


# -- changes while a call waits ------------------------------------------------------------------
@pytest.mark.parametrize("meddle", WAITING.values(), ids=list(WAITING))
def test_target_leaves_while_a_call_waits(
    make_scene: Any, meddle: Callable[[Scene], object]
) -> None:
    for scene, phase in each_moment(make_scene):
        waiting: list[Aside] = []
        if not scene.blocks:
            continue

        def meddle_then_leave(scene: Scene = scene, waiting: list[Aside] = waiting) -> None:
            waiting.append(Aside(lambda: meddle(scene)))
            assert waiting[0].still_waits()
            scene.stage.manager.release(scene.target.request_id)

        scene.meddler.hooks[phase] = meddle_then_leave
        leave_while_copied(scene)
        with pytest.raises(GONE):
            waiting[0].result()
        scene.stage.close()


def test_name_is_taken_while_a_fork_waits() -> None:
    for setup in SETUPS:
        scene = SCENES["partial hit"](setup)
        stage, waiting = scene.stage, list[Aside]()
        children = [stage.new([*scene.target.tokens.tolist(), 71 + n]) for n in range(2)]

        name = scene.target.request_id
        fork = functools.partial(stage.manager.fork, name, *children)

        def meddle(
            stage: Any = stage, waiting: Any = waiting, children: Any = children, fork: Any = fork
        ) -> None:
            waiting.append(Aside(fork))
            assert waiting[0].still_waits()
            stage.manager.external_claim(children[1].request_id, replica_idx=stage.replica)

        scene.meddler.hooks["middle"] = meddle
        scene.act()
        with pytest.raises(kvcore.AlreadyClaimedError):
            waiting[0].result()
        assert not stage.manager.contains(children[0].request_id)
        stage.close()
