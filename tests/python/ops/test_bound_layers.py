# SPDX-License-Identifier: Apache-2.0
"""Inputs bind a layer at its first use; later calls are short, and see every change of an array."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import make_context, make_params
from conftest import require
from grouped_traffic import params_of
from kvcore import PagedBatch, RaggedKVCacheInputs, ops
from kvcore.groups import FullAttention, SlidingWindow
from kvcore.ops import batch as batch_module
from kvcore.ops.batch import layer_pools
from torch_exchange import require_exchange

PAGES, PAGE, HEADS, DIM = 8, 4, 2, 8
K, V = (np.full((1, HEADS, DIM), value, np.float32) for value in (1, 2))
Q = np.ones((1, HEADS, DIM), np.float32)
OFFSETS = np.array([0, 1], np.uint32)


def pool_of(layers: int = 2) -> Any:
    return np.zeros((PAGES, 2, layers, PAGE, HEADS, DIM), np.float32)


def inputs_of(blocks: Any, page: int = 3, lengths: Any = None, scales: Any = None) -> Any:
    lengths = np.zeros(1, np.uint32) if lengths is None else lengths
    table = np.array([[page]], np.uint32)
    return RaggedKVCacheInputs(blocks, lengths, table, np.array([[1, 1]], np.uint32), scales)


def manager_of(**params: Any) -> kvcore.PagedKVCacheManager:
    return kvcore.PagedKVCacheManager(make_params(**params), 4, 64, num_pages=PAGES)


def python_calls(call: Callable[[], object]) -> list[str]:
    """Return the names of the Python functions that a call enters."""
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered[1:]  # the first is `call`


def test_layers_share_one_view_of_each_array_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    see = batch_module._seen

    def noted(given: Any, name: str) -> Any:
        seen.append(name)
        return see(given, name)

    monkeypatch.setattr(batch_module, "_seen", noted)
    blocks = pool_of(layers=3).astype(np.int8)
    scales = np.ones((*blocks.shape[:-1], 1), np.float32)
    inputs = inputs_of(blocks, scales=scales)
    for layer in range(3):
        ops.append(inputs, layer, K, V, OFFSETS)
    assert seen == ["blocks", "kv_scales"]
    blocks.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ops.append(inputs, 0, K, V, OFFSETS)
    assert seen == ["blocks", "kv_scales"] * 2


# -- number of Python calls ------------------------------------------------------------------------
def own_batch(library: Callable[[Any], Any], *, is_model: bool) -> PagedBatch:
    keys, values = (library(np.zeros((PAGES, PAGE, HEADS, DIM), np.float32)) for _ in "kv")
    step = library(np.array([[3]], np.uint32)), library(np.zeros(1, np.uint32))
    if not is_model:
        return PagedBatch(keys, values, *step)
    params = kvcore.KVCacheParams("float32", HEADS, DIM, 1, page_size=PAGE)
    return PagedBatch([keys], [values], *step, params=params)


def torch_library() -> Any:
    torch = require("torch")
    require_exchange()
    return torch.from_numpy


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("kind", ["fetched", "own", "model"])
def test_a_small_call_enters_few_python_functions(library: str, kind: str) -> None:
    see = np.asarray if library == "numpy" else torch_library()
    if kind == "fetched":
        inputs = inputs_of(see(pool_of()), lengths=see(np.zeros(1, np.uint32)))
    else:
        inputs = own_batch(see, is_model=kind == "model")
    k, v, q, offsets = (see(each.copy()) for each in (K, V, Q, OFFSETS))
    calls: dict[str, Callable[[], object]] = {
        "append": lambda: ops.append(inputs, 0, k, v, offsets),
        "scatter": lambda: ops.scatter(inputs, 0, k, v, offsets),
        "attention": lambda: ops.attention(inputs, 0, q, offsets),
    }
    for call in calls.values():
        call()  # binds the layer
    entered = {name: python_calls(call) for name, call in calls.items()}
    most = {"append": 4, "scatter": 4, "attention": 5}
    for name, found in entered.items():
        assert len(found) <= most[name], found


def test_a_quantised_pool_is_bound_as_well() -> None:
    codes, scales = np.zeros((PAGES, 2, 1, PAGE, HEADS, DIM), np.int8), None
    inputs = inputs_of(codes, scales=scales)
    ops.append(inputs, 0, K.astype(np.int8), V.astype(np.int8), OFFSETS)
    assert codes[3, :, 0, 0, 0, 0].tolist() == [1, 2]
    scales = np.zeros((PAGES, 2, 1, PAGE, HEADS, 1), np.float32)
    inputs = inputs_of(codes, scales=scales)
    ops.append(inputs, 0, K, V, OFFSETS)
    scales.setflags(write=False)
    before = codes.copy()
    with pytest.raises(ValueError, match="the array of scales is read-only"):
        ops.append(inputs, 0, 2 * K, V, OFFSETS)
    assert np.array_equal(codes, before)


# -- layers ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["fetched", "model"])
def test_only_integers_name_a_layer_that_is_bound(kind: str) -> None:
    if kind == "fetched":
        inputs = inputs_of(pool_of())
    else:
        params = kvcore.KVCacheParams("float32", HEADS, DIM, 2, page_size=PAGE)
        keys, values = ([np.zeros((PAGES, PAGE, HEADS, DIM), np.float32)] * 2 for _ in "kv")
        table, lengths = np.array([[3]], np.uint32), np.zeros(1, np.uint32)
        inputs = PagedBatch(keys, values, table, lengths, params=params)
    for layer in (0, 1, np.int64(1)):
        ops.append(inputs, layer, K, V, OFFSETS)
    for wrong in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match=r"layer is a .*, must be an int"):
            ops.append(inputs, wrong, K, V, OFFSETS)  # type: ignore[arg-type]
    for layer in (-1, 2):
        with pytest.raises(IndexError, match=f"layer is {layer}, must be at least 0 and below 2"):
            ops.append(inputs, layer, K, V, OFFSETS)


def test_layers_of_several_bundles_keep_their_own_tables() -> None:
    params = params_of(FullAttention([0]), SlidingWindow([1], 5), n_kv_heads=2)
    manager = kvcore.PagedKVCacheManager(params, 2, 64, num_pages=32)
    manager.claim("a")
    context = kvcore.TextGenerationContext("a", list(range(9)))
    (inputs,) = manager.fetch([context])
    for _ in range(2):
        bound = [layer_pools(inputs, layer) for layer in range(2)]
        for pools, table in zip(bound, inputs.tables, strict=True):
            assert np.array_equal(pools.lookup_table, table)
        assert [pools.window for pools in bound] == [None, 5]


# -- arrays that change ----------------------------------------------------------------------------
def test_a_pool_that_becomes_read_only_is_refused_and_not_written() -> None:
    blocks = pool_of()
    inputs = inputs_of(blocks)
    other = copy(inputs)
    for each in (inputs, other):
        ops.append(each, 0, K, V, OFFSETS)
    blocks.setflags(write=False)
    for each in (inputs, other):
        with pytest.raises(ValueError, match="the pool is read-only"):
            ops.append(each, 0, 5 * K, V, OFFSETS)
    assert blocks[3, 0, 0, 0, 0, 0] == 1
    assert np.array_equal(ops.gather(inputs, 0, lengths=np.array([1]))[0], K)
    blocks.setflags(write=True)
    for factor, each in ((3, inputs), (4, other)):
        ops.append(each, 0, factor * K, V, OFFSETS)
        assert blocks[3, 0, 0, 0, 0, 0] == factor


def test_tables_and_lengths_are_read_at_each_call() -> None:
    blocks, lengths = pool_of(), np.zeros(1, np.uint32)
    inputs = inputs_of(blocks, lengths=lengths)
    for position in range(PAGE):
        lengths[0] = position
        ops.append(inputs, 1, (position + 1) * K, V, OFFSETS)
    lengths[0] = PAGE
    with pytest.raises(IndexError, match="position 4 of row 0 has no page"):
        ops.append(inputs, 1, K, V, OFFSETS)
    assert blocks[3, 0, 1, :, 0, 0].tolist() == [1, 2, 3, 4]


def test_inputs_over_another_pool_write_there() -> None:
    first, second = pool_of(), pool_of()
    inputs = inputs_of(first)
    ops.append(inputs, 0, K, V, OFFSETS)
    moved = inputs.with_pool(second)
    ops.append(moved, 0, 2 * K, V, OFFSETS)
    ops.append(inputs, 1, 3 * K, V, OFFSETS)
    assert first[3, 0, :, 0, 0, 0].tolist() == [1, 3]
    assert second[3, 0, :, 0, 0, 0].tolist() == [2, 0]
    with pytest.raises(ValueError, match="the inputs have no pool"):
        ops.append(inputs.with_pool(None), 0, K, V, OFFSETS)
    inputs.__init__(second, inputs.cache_lengths, inputs.lookup_table, inputs.max_lengths)
    ops.append(inputs, 1, 4 * K, V, OFFSETS)
    assert second[3, 0, :, 0, 0, 0].tolist() == [2, 4]


def test_a_tensor_that_gets_other_memory_is_seen_anew() -> None:
    torch = require("torch")
    pool, other = torch.from_numpy(pool_of()), torch.from_numpy(pool_of())
    inputs = inputs_of(pool)
    ops.append(inputs, 0, K, V, OFFSETS)
    first = pool.clone()
    pool.data = other
    ops.append(inputs, 0, 2 * K, V, OFFSETS)
    assert (first[3, 0, 0, 0, 0, 0], other[3, 0, 0, 0, 0, 0]) == (1, 2)
    pool.requires_grad_()
    with pytest.raises(TypeError, match=r"blocks is a Tensor .* expects a gradient"):
        ops.append(inputs, 0, 3 * K, V, OFFSETS)
    assert other[3, 0, 0, 0, 0, 0] == 2


def test_a_table_that_gets_other_memory_is_seen_anew() -> None:
    torch = require("torch")
    blocks = pool_of()
    table = torch.full((1, 1), 3, dtype=torch.int32).view(torch.uint32)
    lengths = torch.zeros(1, dtype=torch.int32).view(torch.uint32)
    inputs = RaggedKVCacheInputs(blocks, lengths, table, np.array([[1, 1]], np.uint32))
    ops.append(inputs, 0, K, V, OFFSETS)
    table.data = torch.full((1, 1), 5, dtype=torch.int32).view(torch.uint32)
    ops.append(inputs, 0, 2 * K, V, OFFSETS)
    assert blocks[:, 0, 0, 0, 0, 0].tolist() == [0, 0, 0, 1, 0, 2, 0, 0]


# -- fetches ---------------------------------------------------------------------------------------
def test_inputs_of_each_fetch_keep_their_own_pages() -> None:
    manager = manager_of(num_layers=2)
    contexts = [make_context([1, 2, 3], name) for name in "ab"]
    for context in contexts:
        manager.claim(context.request_id)
    fetched = [manager.fetch([context])[0] for context in contexts]
    shape: Any = fetched[0].blocks.shape
    offsets = np.array([0, 3], np.uint32)
    for _ in range(2):
        for value, inputs in enumerate(fetched, 1):
            rows = np.full((3, *shape[4:]), value, fetched[0].blocks.dtype)
            ops.append(inputs, 1, rows, rows, offsets)
    pages = [int(inputs.lookup_table[0, 0]) for inputs in fetched]
    written: Any = fetched[0].blocks
    assert [float(written[page, 0, 1, 2, 0, 0]) for page in pages] == [1, 2]


def test_memory_of_a_table_is_used_again_after_its_inputs() -> None:
    manager = manager_of(num_layers=1)
    context = make_context([1], "a")
    manager.claim("a")
    addresses = set()
    for _ in range(8):
        (inputs,) = manager.fetch([context])
        shape: Any = inputs.blocks.shape
        rows = np.zeros((1, *shape[4:]), inputs.blocks.dtype)
        ops.append(inputs, 0, rows, rows, OFFSETS)
        addresses.add(inputs.lookup_table.ctypes.data)
        del inputs
    assert len(addresses) == 1


def test_a_pool_dies_with_its_manager_and_inputs() -> None:
    manager = manager_of(num_layers=1)
    context = make_context([1], "a")
    manager.claim("a")
    (inputs,) = manager.fetch([context])
    pool = weakref.ref(inputs.blocks)
    rows = np.zeros((1, *inputs.blocks.shape[4:]), inputs.blocks.dtype)
    ops.append(inputs, 0, rows, rows, OFFSETS)
    del manager
    gc.collect()
    ops.append(inputs, 0, rows, rows, OFFSETS)  # inputs keep the pool
    del inputs
    gc.collect()
    assert pool() is None


# -- names -----------------------------------------------------------------------------------------
def test_only_public_names_are_listed() -> None:
    assert dir(ops) == sorted(ops.__all__)
