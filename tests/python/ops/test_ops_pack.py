# SPDX-License-Identifier: Apache-2.0
"""The packed tokens of a step, and the offsets of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcore
from foreign_context import Context
from kvcore import PagedBatch, RaggedKVCacheInputs, TextGenerationContext, ops
from toy_engine import make_manager

lengths_of = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 1000), st.integers(0, 1000), st.booleans()),
    max_size=8,
)


def batch_of(manager: Any, drawn: list[tuple[int, int, int, bool]]) -> list[Any]:
    """Return contexts whose first tokens are written, each before its next chunk."""
    batch = []
    for n, (length, start, active, is_foreign) in enumerate(drawn):
        start %= length
        end = start + 1 + active % (length - start)
        tokens = [(31 * n + place) % 97 for place in range(length)]
        context: Any = (Context if is_foreign else TextGenerationContext)(n, tokens)
        manager.claim(n)
        if start:
            context.active_idx = start
            manager.fetch([context])
            context.update(0)
            manager.step([context])
        context.active_idx = end
        batch.append(context)
    return batch


@given(drawn=lengths_of)
def test_packed_tokens_are_those_of_a_plain_construction(
    drawn: list[tuple[int, int, int, bool]],
) -> None:
    manager = make_manager(64, blocks=None)
    batch = batch_of(manager, drawn)
    (inputs,) = manager.fetch(batch)
    packed = ops.pack(inputs, batch)
    spans = [(context.start_idx, context.active_idx) for context in batch]
    counts = [end - start for start, end in spans]
    tokens = [np.asarray(c.tokens)[slice(*span)] for c, span in zip(batch, spans, strict=True)]
    expected = {
        "tokens": np.concatenate([np.empty(0, np.int32), *tokens]),
        "positions": np.concatenate([np.empty(0, np.int64), *(np.arange(*s) for s in spans)]),
        "row_offsets": np.cumsum([0, *counts]).astype(np.uint32),
        "last_rows": np.cumsum(np.array(counts, np.int64)) - 1,
    }
    for name, array in expected.items():
        got = getattr(packed, name)
        assert got.dtype == array.dtype
        assert np.array_equal(got, array)
    assert packed.max_length == max(counts, default=0)
    assert inputs.row_offsets.dtype == np.uint32
    assert np.array_equal(inputs.row_offsets, packed.row_offsets)


def fetched(count: int = 3) -> tuple[Any, list[Any]]:
    manager = make_manager(64, blocks=None)
    batch = batch_of(manager, [(5 + n, 0, 4 + n, False) for n in range(count)])
    return manager.fetch(batch)[0], batch


# -- errors --------------------------------------------------------------------------------------
def test_batch_is_the_one_that_was_fetched() -> None:
    inputs, batch = fetched()
    with pytest.raises(ValueError, match="2 contexts for inputs of 3 rows"):
        ops.pack(inputs, batch[:2])
    kvcore.update_batch(batch, [1, 2, 3])
    with pytest.raises(ValueError, match="row 0 has 0 tokens written, its context has 5"):
        ops.pack(inputs, batch)


@pytest.mark.parametrize(("start", "active"), [(3, 3), (4, 3), (-1, 3), (0, 9)])
def test_foreign_context_stands_within_its_tokens(start: int, active: int) -> None:
    inputs, _ = fetched(1)
    context = Context("x", [1, 2, 3, 4], active_idx=active)
    context.start_idx = start
    with pytest.raises(ValueError, match="'x' has start_idx"):
        ops.pack(inputs, [context])
    with pytest.raises(TypeError, match="is no context"):
        ops.pack(inputs, [object()])  # type: ignore[list-item]


def test_contexts_whose_code_changes_others_do_no_harm() -> None:
    class Meddler(Context):
        def __getattribute__(self, name: str) -> Any:
            if name == "tokens":
                batch[0].extend([9] * 5000)
            return super().__getattribute__(name)

    batch = [TextGenerationContext("a", [1, 2, 3, 4, 5])]
    pool, table = np.zeros((1, 1, 1, 1), np.float32), np.zeros((2, 1), np.uint32)
    both = PagedBatch(pool, None, table, np.zeros(2, np.uint32))
    packed = ops.pack(both, [batch[0], Meddler("m", [1, 2])])
    assert len(packed.tokens) == batch[0].end_idx + 2
    assert packed.tokens[4:7].tolist() == [5, 9, 9]


# -- row_offsets ---------------------------------------------------------------------------------
def test_row_offsets_stay_when_contexts_and_buffers_go_on() -> None:
    manager = make_manager(64)
    batch = batch_of(manager, [(5, 0, 4, False), (7, 0, 6, True)])
    (held,) = manager.fetch(batch)
    kvcore.update_batch(batch, [1, 2])
    manager.step(batch)
    (later,) = manager.fetch(batch)
    assert later.row_offsets.tolist() == [0, 1, 2]
    assert held.row_offsets.tolist() == [0, 5, 12]
    assert held.row_offsets is held.row_offsets


def test_row_offsets_of_every_device_are_those_of_its_replica() -> None:
    manager = make_manager(64, replicas=2, blocks=None)
    batch = [TextGenerationContext(n, [1] * (n + 2)) for n in range(4)]
    for n, context in enumerate(batch):
        manager.claim(n, n % 2)
        assert manager.reserve(context)
    inputs = manager.fetch(batch)
    assert [each.row_offsets.tolist() for each in inputs] == [[0, 2, 6], [0, 3, 8]]


def test_advanced_inputs_have_a_token_per_row() -> None:
    manager = make_manager(64)
    batch = batch_of(manager, [(5, 0, 4, False), (7, 0, 6, False)])
    inputs = manager.fetch(batch, 2)
    (advanced,) = manager.increment_cache_lengths(inputs, inputs[0].row_offsets)
    assert advanced.row_offsets.tolist() == [0, 1, 2]


def test_inputs_made_by_hand_know_none() -> None:
    inputs, _ = fetched()
    made = RaggedKVCacheInputs(None, inputs.cache_lengths, inputs.lookup_table, inputs.max_lengths)
    with pytest.raises(AttributeError, match="made by hand"):
        made.row_offsets  # noqa: B018
