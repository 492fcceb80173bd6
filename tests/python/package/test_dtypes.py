# SPDX-License-Identifier: Apache-2.0
"""The table of dtypes: one for kernels, bindings and Python, and few files that spell a dtype."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import kvcore
from conftest import require
from kvcore import _core
from kvcore.snapshots.format import DTYPES
from kvcore.support.dtypes import FROM_ML_DTYPES, NARROW, WIDE, itemsize, numpy_dtype

ROOT = Path(__file__).parents[3]
#: The files of a narrow dtype that "Add a dtype" in CONTRIBUTING.md names.
PLACES = {
    "cpp/include/kvcore/dtype.hpp",
    "cpp/src/simd/elements.hpp",
    "cpp/src/simd/four.hpp",
}
#: The codes of XLA and DLPack for a dtype.
OTHERS_NAMES = {
    "python/bindings/jax/cache_buffers.hpp",
    "python/bindings/tensor_exchange.hpp",
}


def test_python_reads_the_table() -> None:
    table = {name: (size, largest) for name, size, largest in _core.dtypes()}
    assert tuple(table) == (*WIDE, *NARROW)
    assert WIDE == ("float32", "float16", "bfloat16")
    assert NARROW == ("float8_e4m3fn", "float8_e5m2", "int8")
    assert FROM_ML_DTYPES == ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    assert table.keys() <= DTYPES.keys()
    for name, (size, _) in table.items():
        assert itemsize(name) == size
        assert kvcore.KVCacheParams(name, 1, 2, 1).dtype == name


def test_the_table_agrees_with_numpy() -> None:
    ml_dtypes = require("ml_dtypes")
    for name, size, largest in _core.dtypes():
        dtype = numpy_dtype(name)
        assert (dtype.name, dtype.itemsize) == (name, size)
        most = np.iinfo("int8").max if name == "int8" else ml_dtypes.finfo(dtype).max
        assert float(most) == largest


@pytest.mark.skipif(not (ROOT / "cpp").exists(), reason="needs a checkout")
def test_a_narrow_dtype_is_spelled_in_three_files() -> None:
    """float8_e5m2 has no kernels for pieces on GPUs, so no file of ``cpp/cuda`` names it."""
    spelled = re.compile("F(loat)?8E5M2")
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("cpp", "python/bindings")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".hpp", ".cpp", ".cu"} and spelled.search(path.read_text())
    }
    assert found == PLACES | OTHERS_NAMES
