# SPDX-License-Identifier: Apache-2.0
"""A caller's writes into the table of a fetch do not reach a later fetch."""

from __future__ import annotations

import copy
import ctypes
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from builders import claimed, make_manager
from conftest import require
from kvcore import ops


def tables(manager: Any, batch: list[Any]) -> Any:
    return manager.fetch(batch)[0].lookup_table


def scene() -> tuple[Any, list[Any], list[list[int]]]:
    manager = make_manager(1, 64)
    batch = [claimed(manager, range(100 * n, 101 * n)) for n in (4, 6)]
    expected = tables(manager, batch).tolist()
    return manager, batch, expected


# -- refused writes ------------------------------------------------------------------------------
def put(table: Any) -> None:
    table[table == 64] = 0


WRITES: dict[str, Callable[[Any], object]] = {
    "an item": put,
    "a slice": lambda table: put(table[1:]),
    "in place": lambda table: np.add(table, 1, out=table),
    "fill": lambda table: table.fill(0),
    "asarray": lambda table: put(np.asarray(table)),
    "view": lambda table: put(table.view(np.int32)),
    "memoryview": lambda table: memoryview(table).__setitem__((0, 0), 9),
    "flag": lambda table: table.setflags(write=True),
    "flag of a view": lambda table: table[:1].setflags(write=True),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_table_is_read_only(write: Callable[[Any], object]) -> None:
    manager, batch, expected = scene()
    with pytest.raises((ValueError, TypeError), match=r"read-only|WRITEABLE"):
        write(tables(manager, batch))
    assert tables(manager, batch).tolist() == expected


# -- allowed writes, and their reversal ----------------------------------------------------------
def by_numpy(table: Any) -> None:
    np.from_dlpack(table)[:] = 99


def by_a_part(table: Any) -> None:
    np.from_dlpack(table[1:, :2])[:] = 99


def by_torch(table: Any) -> None:
    require("torch").from_dlpack(table)[:] = 99


def by_address(table: Any) -> None:
    ctypes.memset(table.__dlpack__() and table.ctypes.data, 0, 8)


EXPORTS = {"numpy": by_numpy, "part": by_a_part, "torch": by_torch, "address": by_address}


@pytest.mark.parametrize("write", EXPORTS.values(), ids=list(EXPORTS))
def test_writes_into_an_export_are_gone_at_the_next_fetch(write: Callable[[Any], None]) -> None:
    manager, batch, expected = scene()
    for _ in range(6):
        write(tables(manager, batch))
    for _ in range(6):
        assert tables(manager, batch).tolist() == expected
    grown = claimed(manager, range(900, 920))
    assert tables(manager, [grown, *batch])[1:, :6].tolist() == expected


def test_export_is_held_like_an_array() -> None:
    manager, batch, expected = scene()
    kept = np.from_dlpack(tables(manager, batch))
    address = kept.ctypes.data
    for _ in range(8):
        assert tables(manager, list(reversed(batch))).ctypes.data != address
    assert kept.tolist() == expected
    kept[:] = 7
    del kept
    for _ in range(8):
        assert tables(manager, batch).tolist() == expected


def test_exports_share_the_memory_without_a_warning() -> None:
    torch = require("torch")
    manager, batch, expected = scene()
    table = tables(manager, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exported = torch.from_dlpack(table)
        assert exported.data_ptr() == table.ctypes.data
        assert exported.tolist() == expected
        assert torch.utils.dlpack.from_dlpack(table[1:]).tolist() == expected[1:]
        assert np.from_dlpack(table, copy=True).tolist() == expected
    assert np.from_dlpack(table).flags.writeable


def test_jax_takes_the_table() -> None:
    jax = require("jax")
    manager, batch, expected = scene()
    table = tables(manager, batch)
    for take in (jax.numpy.asarray, jax.device_put, jax.jit(lambda x: x * 1)):
        assert np.asarray(take(table)).tolist() == expected


# -- copies belong to the caller -----------------------------------------------------------------
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": lambda table: table.copy(),
    "np.array": np.array,
    "deepcopy": copy.deepcopy,
    "pickle": lambda table: pickle.loads(pickle.dumps(table)),
    "sum": lambda table: table + np.uint32(0),
}


@pytest.mark.parametrize("form", COPIES.values(), ids=list(COPIES))
def test_copies_are_writable_and_exportable(form: Callable[[Any], Any]) -> None:
    manager, batch, expected = scene()
    mine = form(tables(manager, batch))
    assert mine.tolist() == expected
    mine[:] = 5
    assert (np.from_dlpack(mine) == 5).all()
    assert tables(manager, batch).tolist() == expected


def test_collections_and_ops_read_the_table() -> None:
    manager = make_manager(1, 64, blocks="allocate")
    batch = [claimed(manager, range(100 * n, 101 * n)) for n in (4, 6)]
    (inputs,) = manager.fetch(batch)
    values = np.ones((10, 1, 2), np.float32)
    offsets = np.array([0, 4, 10], np.uint32)
    ops.append(inputs, 0, values, values, offsets)
    keys, _, _ = ops.gather(inputs, 0, lengths=np.array([4, 6], np.uint32))
    assert (keys == 1).all()
