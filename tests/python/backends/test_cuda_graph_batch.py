# SPDX-License-Identifier: Apache-2.0
"""A batch in fixed memory: one captured graph gives the results of every single step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, require_emulation
from grouped_traffic import manager_of
from kvcore import PagedKVCacheManager, RaggedKVCacheInputs, TextGenerationContext
from kvcore import ops as verbs

require_emulation()

from graph_steps import ROWS, SHAPES, Model, Run, captured  # noqa: E402
from kvcore.cuda import GraphBatch  # noqa: E402


def pools_of(machine: Machine, manager: PagedKVCacheManager) -> list[Any]:
    (inputs,) = manager.fetch([])
    parts = inputs.blocks if isinstance(inputs.blocks, tuple) else (inputs.blocks,)
    return [machine.host(part) for part in parts]


@pytest.mark.parametrize("shape", SHAPES)
def test_replays_write_what_each_step_would(machine: Machine, shape: str) -> None:
    """In 64 steps requests arrive, cross pages and leave."""
    params = SHAPES[shape]
    runs = Run(params), Run(params)
    (first,) = runs[0].manager.fetch([])
    model = Model(machine, params, 8 * ROWS)
    batch = GraphBatch(first, ROWS, 100, tokens_per_row=8)
    launch = captured(machine, lambda: model.step(batch))

    def replay(inputs: RaggedKVCacheInputs) -> None:
        batch.load(inputs)
        for source, fixed in zip(inputs.tables, batch.inputs.tables, strict=True):
            rows, columns = source.shape
            found = machine.host(fixed)
            assert (found[:rows, :columns] == machine.host(source)).all()
            found[:rows, :columns] = 2**32 - 1
            assert (found == 2**32 - 1).all()  # no page
        launch()

    for turn in range(64):
        for run, how in zip(runs, (replay, model.eager), strict=True):
            if turn % 7 == 0:
                run.end(turn % 3)
                run.begin(min(1 + turn % 4, ROWS - len(run.contexts)), seed=turn)
            run.step(model, how)
        lengths = machine.host(batch.inputs.cache_lengths)
        assert lengths.tolist()[: len(runs[0].contexts)] == [c.start_idx for c in runs[0].contexts]
        assert not lengths[len(runs[0].contexts) :].any()
        assert machine.host(model.skipped).tolist() == [0]
    tokens = [[c.tokens.tolist() for c in run.contexts] for run in runs]
    assert tokens[0] == tokens[1]
    for ours, theirs in zip(*(pools_of(machine, run.manager) for run in runs), strict=True):
        assert np.array_equal(ours, theirs, equal_nan=True)
        assert not np.isnan(ours).any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(5))
def test_a_load_on_another_stream_comes_behind_the_fetch(
    machine: Machine, shape: str, seed: int
) -> None:
    kernels = machine.kernels
    manager = manager_of(SHAPES[shape], devices=["cuda:0"])
    contexts = [TextGenerationContext(name, [name, name + 1]) for name in (3, 8)]
    for context in contexts:
        manager.claim(context.request_id)
    (first,) = manager.fetch([])
    batch = GraphBatch(first, ROWS, 100, tokens_per_row=8)
    side, current = kernels.Stream(0), kernels.Stream(0)
    machine.streams[0] = current.ptr
    machine.in_any_order(seed)
    (inputs,) = manager.fetch(contexts)
    batch.load(inputs, stream=side)
    kernels.synchronize(0, side.ptr)
    given = (inputs.cache_lengths, *inputs.tables, *inputs.states)
    kept = (batch.inputs.cache_lengths, *batch.inputs.tables, *batch.inputs.states)
    found = [machine.view(each).copy() for each in kept]
    for source, array in zip(given, found, strict=True):
        expected = machine.host(source)
        assert (array[tuple(slice(0, n) for n in expected.shape)] == expected).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_one_fetch_serves_several_replays(machine: Machine, shape: str) -> None:
    """The tables already have the pages that later steps write."""
    params, steps = SHAPES[shape], 9
    manager = manager_of(params, devices=["cuda:0"])
    contexts = [TextGenerationContext(name, [name, name + 1]) for name in (3, 8)]
    for context in contexts:
        manager.claim(context.request_id)
    (inputs,) = manager.fetch(contexts, num_steps=steps)
    batch = GraphBatch(inputs, ROWS, 40, tokens_per_row=2)
    batch.load(inputs)
    model = Model(machine, params, 2 * ROWS)
    launch = captured(machine, lambda: model.step(batch))
    written: list[list[int]] = [[], []]
    for step in range(steps):
        added = 2 if step == 0 else 1
        for row in range(2):
            written[row] += [100 * row + 10 * step + i for i in range(added)]
        new = np.concatenate([rows[-added:] for rows in written])
        machine.kernels.emulation.set_order(is_any=False)
        for k in model.k:
            machine.view(k)[: len(new)] = new[:, None, None]
        if step == 1:  # from now on each row runs one token
            lengths = machine.host(batch.inputs.cache_lengths)
            assert lengths.tolist()[:2] == [2, 2]
            machine.view(batch.row_offsets)[:] = np.minimum(np.arange(ROWS + 1), 2)
        launch()
    ends = np.array([steps + 1] * 2 + [0] * (ROWS - 2), np.uint32)
    for layer in range(params.num_layers):
        k, _, _ = verbs.gather(batch.inputs, layer, lengths=ends)
        found = machine.host(k)[:, 0, 0].reshape(2, -1)
        group = None if params.groups is None else params.groups[layer]
        span = getattr(group, "window", steps + 1)
        for row in range(2):  # before the window the page may be gone
            assert found[row, -span:].tolist() == written[row][-span:]


def test_what_has_no_room_is_refused_and_changes_nothing(machine: Machine) -> None:
    manager = manager_of(SHAPES["plain"], devices=["cuda:0"])
    contexts = [TextGenerationContext(str(i), [i] * 3) for i in range(4)]
    for context in contexts:
        manager.claim(context.request_id)
    (few,) = manager.fetch(contexts[:2])
    batch = GraphBatch(few, 2, 4, tokens_per_row=3)
    batch.load(few)
    kept = machine.host(batch.inputs.lookup_table), machine.host(batch.row_offsets)
    (many,) = manager.fetch(contexts)
    grown = TextGenerationContext("long", [1] * 5)
    manager.claim("long")
    (long,) = manager.fetch([grown])
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((many,), "the batch has 4 rows, there is room for max_rows=2"),
        ((long,), "a request has 3 pages, there is room for 2"),
        ((few, [0, 4, 7]), "give rows 3 to 4 tokens, must be 0 to tokens_per_row=3"),
        ((few, [0, 3, 2]), "give rows -1 to 3 tokens"),
        ((few, [0, 3]), r"row_offsets have shape \(2,\)"),
        ((few, [1, 3, 4]), r"begin with \[1\]"),
        ((few, machine.array(np.array([0, 1, 2], np.uint32))), "row_offsets are on a GPU"),
        ((manager_of(SHAPES["windows"], devices=["cuda:0"]).fetch([])[0],), "2 tables, must have"),
        ((manager_of(SHAPES["plain"]).fetch([])[0],), "in host memory, must be on a GPU"),
    ]
    for given, text in wrong:
        with pytest.raises(ValueError, match=text):
            batch.load(*given)
    with pytest.raises(TypeError, match="inputs are a list"):
        batch.load([few])  # type: ignore[arg-type]
    assert machine.host(batch.inputs.lookup_table).tolist() == kept[0].tolist()
    assert machine.host(batch.row_offsets).tolist() == kept[1].tolist() == [0, 3, 6]
    with pytest.raises(ValueError, match="max_rows is 0"):
        GraphBatch(few, 0, 4)
    with pytest.raises(ValueError, match="no pool"):
        GraphBatch(few.with_pool(None), 1, 4)
    grouped = GraphBatch(manager_of(SHAPES["windows"], devices=["cuda:0"]).fetch([])[0], 1, 4)
    with pytest.raises(IndexError):
        grouped.slots(2)
