# SPDX-License-Identifier: Apache-2.0
"""Requests move between (emulated) GPUs and host memory, with streams in any order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from cuda_machine import Machine, emulated, require_emulation
from device_traffic import DeviceTraffic
from grouped_traffic import SHAPES
from kvcore.moving import read_sequence
from moving_traffic import Moves
from state_model import digest, prefill, state_manager, state_params

require_emulation()


@pytest.fixture
def machine() -> Iterator[Machine]:
    with emulated(devices=4) as made:
        yield made


class DeviceMoves(DeviceTraffic, Moves):
    """The side of a move that is on GPUs."""


@pytest.mark.parametrize(
    "shape", ["one width", "wide values", "latent rows", "other heads", "devices"]
)
def test_requests_move_to_gpus_and_back(machine: Machine, shape: str) -> None:
    params = SHAPES[shape]
    there, here = DeviceMoves(machine, params, 3), Moves(replace(params, page_size=4), 4)
    there.side, here.side = "there", "here"
    machine.in_any_order(seed=5)
    draw = random.Random(6)
    for _ in range(25):
        one, other = draw.sample([there, here], 2)
        one.act(["claim", "release", "fork", *(["step"] * 6)], 3)
        one.send(other)
        machine.in_any_order(seed=draw.randrange(99))
        other.step()
    there.look()
    assert there.moved > 0
    assert here.moved > 0
    for side in (there, here):
        assert side.read > 0
        side.end()


def test_states_move_to_gpus_and_back(machine: Machine) -> None:
    here = state_manager(state_params())
    there = state_manager(state_params(page_size=8), devices=["cuda:0"])
    tokens = list(range(9))
    prefill(here, "r", tokens)
    data = here.export_sequence("r")
    machine.in_any_order(seed=1)
    context = read_sequence(data).context("r")
    assert there.import_sequence(context, data)
    (inputs,) = there.fetch([context])
    slot = int(machine.host(inputs.states[0])[0])
    for array in there.states[0].values():
        assert set(np.unique(machine.host(array[0][slot]))) == {digest(tokens)}
    context.update(1)
    there.step([context])
    back = read_sequence(there.export_sequence("r"))
    for name, saved in read_sequence(data).tensors.items():
        if name.startswith("states"):
            np.testing.assert_array_equal(back.tensors[name], saved)
