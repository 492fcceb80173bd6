# SPDX-License-Identifier: Apache-2.0
"""Attention on GPUs writes its logarithms into the caller's array, as a graph requires."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from attention_oracle import assert_close, assert_lse
from attention_scenes import Scene, on_device
from cuda_machine import Machine, require_emulation
from kvcore import ops
from triton_interpreter import require_interpreter

require_interpreter()
require_emulation()

from graph_steps import nothing_from_outside  # noqa: E402


@pytest.mark.parametrize("splits", [1, 3])
def test_logarithms_go_where_the_caller_says_and_into_a_graph(
    machine: Machine, splits: int
) -> None:
    scene = Scene(cached=[30, 4], new=[1, 2])
    batch, q = on_device(machine, scene)
    offsets = machine.array(scene.offsets, 1)
    out = machine.memory(q.shape, np.float32, 1)
    lse = machine.memory(q.shape[:2], np.float32, 1)
    scratch = machine.memory((ops.attention_scratch(batch, q, splits),), np.float32, 1)
    stream = machine.kernels.Stream(1)
    asked: dict[str, Any] = {"splits": splits, "scratch": scratch, "stream": stream}
    for attend in (ops.attention, partial(ops.cascade_attention, shared=[])):
        for array in (out, lse):
            machine.view(array)[...] = 7
        with nothing_from_outside(machine):
            found = attend(batch, 0, q, offsets, out=(out, lse), return_lse=True, **asked)
        assert found[0] is out
        assert found[1] is lse
        expected, sums = scene.expected()
        assert_close(machine.host(out), expected, "float32")
        assert_lse(machine.host(lse), sums)


@pytest.mark.parametrize("splits", [1, 2])
def test_logarithms_of_rows_that_share_pages(machine: Machine, splits: int) -> None:
    scene = Scene(
        cached=[9, 11, 9], new=[1, 2, 0], page=3, heads=1, shared=[([0, 1, 2], 2), ([0, 1], 3)]
    )
    batch, q = on_device(machine, scene)
    pair = machine.memory(q.shape, np.float32, 1), machine.memory(q.shape[:2], np.float32, 1)
    found = ops.cascade_attention(
        batch, 0, q, scene.offsets, scene.groups(), splits=splits, out=pair, return_lse=True
    )
    expected, sums = scene.expected()
    assert found[1] is pair[1]
    assert_close(machine.host(pair[0]), expected, "float32")
    assert_lse(machine.host(pair[1]), sums)


def test_pairs_for_results_that_do_not_fit(machine: Machine) -> None:
    scene = Scene(cached=[44, 3], new=[4, 1])
    batch, _ = on_device(machine, scene)
    queries = np.ones((5, 4, 16), np.float32)
    q = machine.array(queries, 1)
    out, lse, half = (machine.array(np.full(shape, 7, np.float32), 1) for shape in (
        queries.shape, (5, 4), (5, 8),
    ))  # fmt: skip
    elsewhere = machine.memory((5, 4), np.float32, 0)
    cases: list[tuple[Any, bool, type[Exception], str]] = [
        ((out, lse), False, TypeError, "out is a tuple, must be an array"),
        ((out,), True, ValueError, "out holds 1 items, must hold 2"),
        ((out, None), True, TypeError, r"out\[1\] is None"),
        ((out, lse[:4]), True, ValueError, r"out\[1\] has shape \(4, 4\), must be \(5, 4\)"),
        ((out, lse.view(np.int32)), True, TypeError, r"out\[1\] has dtype int32, must be float32"),
        ((out, half[:, ::2]), True, ValueError, r"out\[1\] is strided, must be in C order"),
        ((out, out.reshape(-1)[20:40].reshape(5, 4)), True, ValueError, r"overlaps out\[0\]"),
        ((out, q.reshape(-1)[20:40].reshape(5, 4)), True, ValueError, "overlaps what is read"),
        ((out, np.zeros((5, 4), np.float32)), True, ValueError, r"out\[1\] is in host memory"),
        ((out, elsewhere), True, ValueError, r"out\[1\] is on cuda:0, must be on"),
    ]
    for pair, return_lse, error, match in cases:
        with pytest.raises(error, match=match):
            ops.attention(batch, 0, q, scene.offsets, out=pair, return_lse=return_lse)
    for array, kept in ((out, 7), (lse, 7), (q, 1)):
        assert (machine.host(array) == kept).all()
