# SPDX-License-Identifier: Apache-2.0
"""The machine code of kernels in the tested build, and the programs that read it.

``cuobjdump`` and ``nvdisasm`` come with the CUDA toolkit, and with Triton.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib import util
from pathlib import Path

import pytest

from conftest import REQUIRED, require, require_program


def built_module(*architectures: str) -> Path:
    """Return the module of the kernels, or skip if it lacks code for some of the GPUs."""
    require("kvcore._cuda")
    from kvcore import _cuda

    path = Path(_cuda.__file__)
    listed = "" if _cuda.is_emulated else cuobjdump("--list-elf", path)
    for each in architectures:
        if f".{each}.cubin" not in listed:
            missing = f"this build has no machine code for {each}"
            if "kvcore._cuda" in REQUIRED:
                raise ImportError(missing)
            pytest.skip(missing)
    return path


def cuobjdump(*arguments: str | Path, cwd: Path | None = None) -> str:
    """Run ``cuobjdump``; return its output."""
    return _output("cuobjdump", *arguments, cwd=cwd)


def disassembly(architecture: str, folder: Path) -> str:
    """Return every kernel's instructions for an architecture, such as ``sm_90``.

    Intermediate files are written to `folder`.
    """
    cuobjdump("--extract-elf", architecture, built_module(architecture), cwd=folder)
    return "".join(_output("nvdisasm", "-c", path) for path in sorted(folder.glob("*.cubin")))


def _output(name: str, *arguments: str | Path, cwd: Path | None = None) -> str:
    command = [_program(name), *arguments]
    done = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout


def _program(name: str) -> str:
    triton = util.find_spec("triton")
    if shutil.which(name) is None and triton is not None and triton.origin is not None:
        path = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / name
        if path.is_file():
            return str(path)
    return require_program(name)
