# SPDX-License-Identifier: Apache-2.0
"""The kernels of each instruction set: the same bytes, selected by KVCORE_ISA, nothing shared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import kvcore
from conftest import require_program
from kvcore import _core
from kvcore.apps.cli.machine import isa_level

LEVELS = ("x86-64-v3", "x86-64-v4")

_PROGRAM = """
import hashlib, sys, numpy as np
from kvcore import _core, ops
np.seterr(over="ignore")
x = np.random.default_rng(1).normal(size=(257, 3, 80)).astype(np.float32)
x[:9, 0, :4] = np.inf, -np.inf, np.nan, 3e38
x[9, 1], x[10, 1], x[11, 1] = np.inf, -np.inf, np.nan
parts = []
for given in (x, x.astype(np.float16)):
    for dtype in ("float8_e4m3fn", "float8_e5m2", "int8"):
        for granularity in (16, 80, "head", "tensor"):
            values, scales = ops.quantize(given, dtype, granularity, threads=2)
            parts += [values, scales, ops.dequantize(values, scales, "bfloat16")]
digest = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()
print(_core.kernel_isa(), digest)
"""

# Attention of each pool dtype, page size and group, with every option of a rule.
_ATTENTION = """
import sys, numpy as np
from kvcore import PagedBatch, ops
from kvcore.support.dtypes import NARROW, WIDE, numpy_dtype
rng = np.random.default_rng(2)
found = []
for dtype in (*WIDE, *NARROW):
    for page, heads, group, dim in (1, 1, 16, 59), (16, 2, 4, 64), (24, 3, 1, 80), (48, 1, 8, 128):
        table = rng.permutation(1800 // page // 2 * 2).reshape(2, -1).astype(np.uint32)
        pools = rng.normal(0, 2, (2, table.size, page, heads, dim)).astype(numpy_dtype(dtype))
        q = rng.normal(size=(12, heads * group, dim)).astype(np.float32)
        batch = PagedBatch(*pools, table, np.array([800, 30], np.uint32))
        offsets = np.array([0, 1, 12], np.uint32)
        rules = {}, {"window": 9, "soft_cap": 5.0, "sinks": q[0, :, 0]}, {"causal": False}
        for rule in (*rules, {"chunk": 7}, {"chunk": 40, "window": 30, "causal": False}):
            o, lse = ops.attention(batch, 0, q, offsets, return_lse=True, threads=2, **rule)
            found += [o.ravel(), lse.ravel()]
np.save(sys.argv[1], np.concatenate(found))
"""


def run_with(
    isa: str, program: str = _PROGRAM, *arguments: str
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"KVCORE_ISA": isa, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def digest_of(isa: str) -> str:
    done = run_with(isa)
    assert done.returncode == 0, done.stderr
    name, digest = done.stdout.split()
    assert name == isa
    return digest


def test_best_level_of_the_processor_is_chosen() -> None:
    if "KVCORE_ISA" in os.environ:
        assert _core.kernel_isa() == os.environ["KVCORE_ISA"]
    else:
        assert _core.kernel_isa() == (isa_level() if isa_level() in LEVELS else "baseline")


@pytest.mark.parametrize("isa", LEVELS)
def test_levels_agree_to_the_byte(isa: str) -> None:
    if isa > isa_level():
        done = run_with(isa)
        assert done.returncode != 0
        assert "cannot run" in done.stderr
        pytest.skip(f"this processor is {isa_level()}")
    assert digest_of(isa) == digest_of("baseline")


def attention_of(isa: str, folder: Path) -> npt.NDArray[np.float32]:
    path = folder / f"{isa}.npy"
    done = run_with(isa, _ATTENTION, str(path))
    assert done.returncode == 0, done.stderr
    found: npt.NDArray[np.float32] = np.load(path)
    return found


def test_attention_of_levels_with_fused_products_agrees_to_the_byte(tmp_path: Path) -> None:
    """Levels without fused products give nearly the same result."""
    levels = [isa for isa in LEVELS if isa <= isa_level()]
    if not levels:
        pytest.skip(f"this processor is {isa_level()}")
    found = [attention_of(isa, tmp_path) for isa in levels]
    assert all(np.array_equal(found[0], other) for other in found[1:])
    baseline = attention_of("baseline", tmp_path)
    np.testing.assert_allclose(baseline, found[0], atol=1e-5, rtol=1e-5)


def test_unknown_level_is_refused() -> None:
    done = run_with("avx9")
    assert done.returncode != 0
    assert "KVCORE_ISA is avx9, must be one of" in done.stderr


def exported_symbols() -> dict[str, list[str]]:
    """Return the symbols that each object of the library exports, by object name."""
    nm = require_program("nm")
    library = Path(kvcore.get_cmake_dir()).parents[1] / "libkvcore.a"
    listing = subprocess.run(
        [nm, "--defined-only", "--print-file-name", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exported: dict[str, list[str]] = {}
    for line in listing.splitlines():
        *place, kind, symbol = line.split()
        member = place[0].split(":")[-2] if ":" in place[0] else place[0]
        if not kind.islower():
            exported.setdefault(member, []).append(symbol)
    return exported


def test_objects_of_a_level_export_their_table_only() -> None:
    """With a shared symbol, the linker could use a newer level's code on an old processor."""
    exported = {k: v for k, v in exported_symbols().items() if k.startswith("isa_")}
    assert len(exported) == (3 if isa_level().startswith("x86-64") else 1)
    for member, symbols in exported.items():
        assert len(symbols) == 1, f"{member} exports {symbols}"
        assert symbols[0].endswith("KernelsE")


def test_objects_for_some_processors_export_their_function_only() -> None:
    names = ("compress_sha_ni", "write_tokens_sse4", "sum_chunks_avx2")
    found = {
        name: symbols
        for member, symbols in exported_symbols().items()
        for name in names
        if member.startswith(name)
    }
    assert set(found) == (set(names) if isa_level().startswith("x86-64") else set())
    for name, symbols in found.items():
        assert len(symbols) == 1, f"{name} exports {symbols}"
        assert name in symbols[0]
