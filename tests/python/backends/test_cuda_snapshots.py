# SPDX-License-Identifier: Apache-2.0
"""Caches on (emulated) GPUs are saved and restored, on GPUs and in host memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuda_machine import Machine, emulated, require_emulation
from device_traffic import DeviceTraffic
from grouped_traffic import SHAPES, Traffic
from kvcore import moving
from snapshot_contents import cached_in, contents_of
from state_model import prefill, prompt, state_manager, state_params

require_emulation()


@pytest.fixture
def machine() -> Iterator[Machine]:
    with emulated(devices=4) as made:
        yield made


@pytest.mark.parametrize("shape", ["one width", "wide values", "latent rows", "devices"])
def test_caches_move_to_gpus_and_back(machine: Machine, shape: str, tmp_path: Path) -> None:
    there, path = DeviceTraffic(machine, SHAPES[shape], 3), tmp_path / "cache.kv"
    machine.in_any_order(seed=5)
    there.act(["claim", "release", *(["step"] * 6)], 40)
    saved = there.manager.snapshot(path)
    assert saved.num_pages > 0
    wanted = contents_of(path)
    here, again = Traffic(SHAPES[shape], 4), DeviceTraffic(machine, SHAPES[shape], 5)
    machine.in_any_order(seed=6)
    for side in (here, again):
        assert side.manager.restore(path).num_pages == saved.num_pages
        assert cached_in(side.manager, tmp_path) == wanted
        side.prompts = there.prompts
        side.act(["claim", "release", *(["step"] * 6)], 40)
        assert side.manager.metrics.cache_tokens > 0
    for side in (there, again):
        side.look()
        assert side.read > 0
    for each in (there, here, again):
        each.end()


def test_checkpoints_move_to_gpus(machine: Machine, tmp_path: Path) -> None:
    here, path = state_manager(state_params(interval=8), num_states=16), tmp_path / "cache.kv"
    prefill(here, "r", prompt((0, 21)))
    here.release("r")
    saved = here.snapshot(path)
    assert saved.num_states > 1
    options: dict[str, Any] = {"devices": ["cuda:0"], "num_states": 16}
    there = state_manager(state_params(interval=8), **options)
    machine.in_any_order(seed=random.Random(1).randrange(99))
    restored = there.restore(path)
    assert (restored.num_pages, restored.num_states) == (saved.num_pages, saved.num_states)
    assert cached_in(there, tmp_path) == contents_of(path)
    assert replace(moving.check_snapshot(tmp_path / "now.kvcache"), num_bytes=0) == replace(
        saved, num_bytes=0
    )
