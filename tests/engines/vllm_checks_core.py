# SPDX-License-Identifier: Apache-2.0
"""vLLM's EngineCore serves a model that reads its pages, on kvcore and on vLLM's own manager.

Run by ``tests/integrations/run_vllm.py --part ours``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

import vllm_engine_core

Happened = dict[str, Any]


def served(switch: str) -> list[Happened]:
    """Serve all scenes in a separate process, where vLLM loads its plug-ins itself."""
    done = subprocess.run(
        [sys.executable, vllm_engine_core.__file__],
        env=os.environ | {"KVCORE_VLLM": switch},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Happened]]:
    """Return the results on vLLM's manager and on kvcore's, scene by scene."""
    return {"own": served("0"), "kvcore": served("1")}


SCENES = range(len(vllm_engine_core.SCENES))


@pytest.mark.parametrize("scene", SCENES)
def test_answers_are_those_of_vllms_own_manager(
    runs: dict[str, list[Happened]], scene: int
) -> None:
    own, ours = runs["own"][scene], runs["kvcore"][scene]
    assert (own["manager"], ours["manager"]) == ("KVCacheManager", "KVCoreManager")
    assert own["wrong"] == ours["wrong"] == []
    assert own["told"] == ours["told"]


@pytest.mark.parametrize("scene", SCENES)
def test_all_blocks_are_free_at_the_end(runs: dict[str, list[Happened]], scene: int) -> None:
    happened = runs["kvcore"][scene]
    assert happened["free"] == vllm_engine_core.SCENES[scene].blocks - 1
    assert happened["reset"]


@pytest.mark.parametrize("scene", SCENES)
def test_the_scene_is_what_it_says(runs: dict[str, list[Happened]], scene: int) -> None:
    """Requests must be preempted and pages reused, or the other tests check little."""
    settings = vllm_engine_core.SCENES[scene]
    for happened in (runs["own"][scene], runs["kvcore"][scene]):
        assert happened["scheduler"] == ("AsyncScheduler" if settings.is_async else "Scheduler")
        assert happened["preempted"] > 0
        assert (happened["read"] > 0) is settings.cached


@pytest.mark.parametrize("scene", SCENES)
def test_as_much_is_found_in_the_cache(runs: dict[str, list[Happened]], scene: int) -> None:
    """vLLM drops passed windows at once; kvcore keeps them until it needs their room."""
    assert runs["kvcore"][scene]["read"] >= 0.95 * runs["own"][scene]["read"]


def test_answers_change_with_what_blocks_hold() -> None:
    """An overwritten block must change the answers of the model."""
    engine = vllm_engine_core.engine_of(vllm_engine_core.Scene("full"))
    prompt = list(range(50))
    told = []
    for name, change in (("first", 0), ("second", 0), ("third", 1)):
        engine.model_executor.memory[0] += change
        told.append(vllm_engine_core.serve(engine, {name: (prompt, 4)})["told"][name])
    engine.shutdown()
    assert told[0] == told[1] != told[2]
