# SPDX-License-Identifier: Apache-2.0
"""Attention in a graph that was captured once gives the results of every single step."""

from __future__ import annotations

import numpy as np
import pytest

from cuda_machine import Machine, require_emulation
from kvcore import RaggedKVCacheInputs
from triton_interpreter import require_interpreter

require_interpreter()
require_emulation()

from graph_steps import SHAPES, Model, Run, nothing_from_outside  # noqa: E402
from kvcore.cuda import GraphBatch  # noqa: E402


@pytest.mark.parametrize(
    ("shape", "rows", "steps"), [("plain", 5, 8), ("windows", 2, 64), ("other pages", 5, 8)]
)
def test_replays_attend_as_each_step_would(
    machine: Machine, shape: str, rows: int, steps: int
) -> None:
    params = SHAPES[shape]
    runs = Run(params), Run(params)
    (first,) = runs[0].manager.fetch([])
    models = [Model(machine, params, 4 * rows, splits=2) for _ in runs]
    batch = GraphBatch(first, rows, 100, tokens_per_row=4)

    def replay(inputs: RaggedKVCacheInputs) -> None:
        batch.load(inputs)
        with nothing_from_outside(machine):
            models[0].step(batch)

    for turn in range(steps):
        for run, model, how in zip(runs, models, (replay, models[1].eager), strict=True):
            if turn % 9 == 0:
                run.end(turn % 3)
                run.begin(min(1 + turn % 4, rows - len(run.contexts)), seed=turn, most=4)
            run.step(model, how)
        for ours, theirs in zip(*(model.out for model in models), strict=True):
            found = machine.host(ours)
            assert found.tobytes() == machine.host(theirs).tobytes()
            assert np.isfinite(found).all()
            assert found.any()
