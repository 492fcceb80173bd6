# SPDX-License-Identifier: Apache-2.0
"""compact_table on GPUs: equal to the CPU for any list of rows, and usable in graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compacted import NOTHING, compacted
from cuda_machine import Machine, require_emulation
from grouped_traffic import manager_of, params_of
from kvcore import TextGenerationContext, ops
from kvcore.groups import FullAttention, SlidingWindow, State

KERNELS = require_emulation()

from graph_steps import captured  # noqa: E402
from kvcore.cuda import GraphBatch  # noqa: E402

U32 = np.uint32


def drawn(rows: int, columns: int, seed: int = 0) -> list[Any]:
    """A table, lengths and row offsets."""
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 2**32, (rows, columns)).astype(U32)
    offsets = np.cumsum([0, *rng.integers(0, 4, rows)]).astype(U32)
    return [table, rng.integers(0, 2**32, rows).astype(U32), offsets]


# The number of rows, the number of columns, and the rows to keep.
CASES: dict[str, tuple[int, int, Any]] = {
    "a hole": (9, 70, [0, 1, 3, 4, 7, 8]),
    "none": (9, 5, []),
    "all": (9, 5, range(9)),
    "the last": (33, 1, [32]),
    "one row that stays": (1, 130, [0]),
    "one row that goes": (1, 3, []),
    "no columns": (5, 0, [1, 4]),
    "no rows": (0, 4, []),
    "many": (300, 67, range(1, 300, 2)),
}


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("case", CASES)
def test_rows_that_stay_move_to_the_front(machine: Machine, case: str, where: str) -> None:
    rows, columns, kept = CASES[case]
    arrays = drawn(rows, columns)
    expected = compacted(arrays[0], arrays[1], arrays[2], kept)
    table, lengths, offsets = map(machine.array, arrays)
    named = np.array([*kept], U32)
    given = machine.array(named) if where == "device" else named
    ops.compact_table(table, lengths, given, row_offsets=offsets)
    for found, wanted in zip((table, lengths, offsets), expected, strict=True):
        assert np.array_equal(machine.host(found), wanted)


@pytest.mark.parametrize(
    ("kept", "good"),
    [([1, 2, 2, 3], 2), ([0, 3, 1, 2], 2), ([2, 9, 3], 1), ([1, NOTHING, 2], 1), ([5], 0)],
)
def test_rows_on_the_device_that_are_wrong_end_the_list(
    machine: Machine, kept: list[int], good: int
) -> None:
    """No list of rows causes a write outside of the arrays."""
    rows = 4
    whole = drawn(rows + 2, 9)
    fixed = [machine.array(array) for array in whole]
    inside = fixed[0][1:-1, 1:-1], fixed[1][1:-1], fixed[2][1:-1]
    host = whole[0][1:-1, 1:-1], whole[1][1:-1], whole[2][1:-1] - whole[2][1]
    machine.view(inside[2])[...] = host[2]
    expected = compacted(*host, kept[:good])
    ops.compact_table(
        inside[0], inside[1], machine.array(np.array(kept, U32)), row_offsets=inside[2]
    )
    for found, wanted in zip(inside, expected, strict=True):
        assert np.array_equal(machine.host(found), wanted)
    for i in (0, 1, 2):  # the rows around them
        around, before = machine.host(fixed[i]), whole[i]
        for edge in (0, -1):
            assert np.array_equal(around[edge], before[edge])
    assert np.array_equal(machine.host(fixed[0])[:, [0, -1]], whole[0][:, [0, -1]])


def test_int32_arrays_and_a_list_with_an_end(machine: Machine) -> None:
    table, lengths, _ = (array.view(np.int32) for array in drawn(6, 8))
    expected = compacted(table, lengths, np.zeros(7, np.int32), [2, 5])
    fixed, left = machine.array(table), machine.array(lengths)
    ops.compact_table(fixed, left, machine.array(np.array([2, 5, -1, 3], np.int32)))
    assert np.array_equal(machine.host(fixed), expected[0])
    assert np.array_equal(machine.host(left), expected[1])


def test_what_is_refused_changes_nothing(machine: Machine) -> None:
    arrays = drawn(3, 4)
    table, lengths, offsets = map(machine.array, arrays)
    wrong: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((table, lengths, [2, 1]), ValueError, r"kept\[1\] is 1, must be above"),
        ((table, lengths, [3]), IndexError, r"kept\[0\] is 3"),
        ((table, lengths, machine.array(np.arange(2))), TypeError, "kept has dtype int64"),
        ((table, lengths, machine.array(np.arange(4, dtype=U32))), ValueError, "kept names 4"),
        ((table, lengths, lengths), ValueError, "memory"),
        ((table, arrays[1], [0]), ValueError, "cache_lengths is in host memory"),
        ((table, machine.array(arrays[1], 1), [0]), ValueError, "is on cuda:1, must be on cuda:0"),
    ]
    for given, error, text in wrong:
        with pytest.raises(error, match=text):
            ops.compact_table(*given, row_offsets=offsets)
    for found, before in zip((table, lengths, offsets), arrays, strict=True):
        assert np.array_equal(machine.host(found), before)


def test_a_graph_compacts_by_the_rows_of_each_replay(machine: Machine) -> None:
    arrays = drawn(7, 20)
    table, lengths, offsets = map(machine.array, arrays)
    kept = machine.array(np.zeros(7, np.int32))
    launch = captured(machine, lambda: ops.compact_table(table, lengths, kept, row_offsets=offsets))
    expected = arrays
    for rows in ([0, 1, 3, 4, 6], [1, 2, 4], [0, 1, 2], []):
        machine.in_any_order(len(rows))
        machine.view(kept)[...] = [*rows, *[-1] * (7 - len(rows))]
        launch()
        expected = compacted(expected[0], expected[1], expected[2], rows)
        for found, wanted in zip((table, lengths, offsets), expected, strict=True):
            assert np.array_equal(machine.host(found), wanted)


def test_rows_of_the_host_are_refused_while_a_stream_is_captured(machine: Machine) -> None:
    arrays = drawn(3, 4)
    table, lengths, _ = map(machine.array, arrays)
    with pytest.raises(ValueError, match="kept is in host memory, while the stream is captured"):
        captured(machine, lambda: ops.compact_table(table, lengths, [1]))
    KERNELS.emulation.end_capture(0, machine.streams[0])
    assert np.array_equal(machine.host(table), arrays[0])


# ---- batches of graphs ---------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["host", "device"])
def test_a_batch_loses_the_rows_of_requests_that_ended(machine: Machine, where: str) -> None:
    """All tables, lengths, row offsets and state slots move; the rest is padding."""
    params = params_of(FullAttention([0]), SlidingWindow([1], 5), State([2], {"s": ((3,), "int8")}))
    manager = manager_of(params, devices=["cuda:0"])
    contexts = [TextGenerationContext(str(n), [*range(n, 3 * n)]) for n in (3, 5, 2, 4)]
    for context in contexts:
        manager.claim(context.request_id)
    (inputs,) = manager.fetch(contexts)
    batch, wanted = (GraphBatch(inputs, 6, 40, tokens_per_row=10) for _ in range(2))
    batch.load(inputs)
    stay = [1, 3]
    kept: Any = machine.array(np.array(stay, np.int32)) if where == "device" else stay
    launch = captured(machine, lambda: batch.compact(kept)) if where == "device" else None
    if launch is None:
        batch.compact(kept)
    else:
        launch()
    (fewer,) = manager.fetch([contexts[row] for row in stay])
    wanted.load(fewer)
    ours, theirs = (
        [*b.inputs.tables, *b.inputs.states, b.inputs.cache_lengths, b.row_offsets]
        for b in (batch, wanted)
    )
    assert len(ours) == 5
    for found, expected in zip(ours, theirs, strict=True):
        pages = 64  # an entry of 64 or more means no page, in both batches
        one, other = (machine.host(array).view(U32) for array in (found, expected))
        assert np.minimum(one, pages).tolist() == np.minimum(other, pages).tolist()
