# SPDX-License-Identifier: Apache-2.0
"""kvcore uses arrays of other libraries in place."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from conftest import require
from kvcore import PagedBatch, ops
from kvcore.backends.arrays import host_array
from kvcore.support.dtypes import NARROW, WIDE


def shaped(values: array[float], *shape: int) -> Any:
    return memoryview(values).cast("B").cast("f", shape)


def test_buffers_go_into_pages_and_are_pools_themselves() -> None:
    pool, tokens = array("f", [0.0] * 16), array("f", range(8))
    keys = shaped(pool, 2, 4, 1, 2)
    table, lengths = array("I", [1]), array("I", [0])
    batch = PagedBatch(keys, None, memoryview(table).cast("B").cast("I", (1, 1)), lengths)
    ops.append(batch, 0, shaped(tokens, 4, 1, 2), None, array("I", [0, 4]))
    assert pool.tolist() == [0.0] * 8 + [float(i) for i in range(8)]


def test_buffer_that_is_read_only_stays_so() -> None:
    assert not host_array(bytes(4), "k").flags.writeable


@pytest.mark.parametrize("value", [None, 5, [1.0], "text", object()])
def test_anything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^k is a .*, must be a numpy array, or one with DLPack"):
        host_array(value, "k")


@pytest.mark.parametrize("dtype", [*WIDE, *NARROW])
def test_torch_tensors_share_their_memory(dtype: str) -> None:
    torch = require("torch")
    tensor = torch.zeros((2, 3), dtype=getattr(torch, dtype))
    seen = host_array(tensor, "k")
    assert seen.dtype.name == dtype
    assert seen.ctypes.data == tensor.data_ptr()
    seen[1, 2] = np.ones((), seen.dtype)
    assert float(tensor[1, 2]) == 1.0
