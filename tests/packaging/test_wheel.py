# SPDX-License-Identifier: Apache-2.0
"""A wheel from the sdist: its requirements, and the platforms on which it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcore
from conftest import require, require_program

ROOT = Path(__file__).resolve().parents[2]
SHORT = (
    *("python/cache/test_paged_manager.py", "python/cache/test_prefix_cache.py"),
    "python/ops/test_attention.py",
)

pytestmark = [
    pytest.mark.slow,  # compiles everything again
    pytest.mark.xdist_group("wheel"),  # builds the wheel once
    pytest.mark.skipif(sys.platform != "linux", reason="manylinux wheels need Linux"),
]


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Return a program's output; `path` is the only folder for programs, if given."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CC", "CXX")}
    if path is not None:
        environment["PATH"] = str(path)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repaired wheel from the sdist."""
    require("build")
    require("pybind11")
    require("auditwheel")
    require_program("patchelf")
    folder = tmp_path_factory.mktemp("wheel")
    frontend = (sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check")
    run(*frontend, "--sdist", "--outdir", folder, ROOT, cwd=folder)
    run("tar", "-xzf", folder / f"kvcore-{kvcore.__version__}.tar.gz", cwd=folder)
    source = folder / f"kvcore-{kvcore.__version__}"
    # A quarter of the build time. Optimised code may need other symbols of the C++ library: the
    # symbols of a release are checked when it is made, in an environment without jax. Kernels for
    # one kind of GPU link the same libraries as kernels for all kinds.
    quickly = (
        "-Ccmake.build-type=Debug",
        "-Ccmake.define.CMAKE_CUDA_ARCHITECTURES=90-virtual",
        "-Ccmake.define.KVCORE_JAX=OFF",
    )
    run(*frontend, "--wheel", *quickly, "--outdir", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    auditwheel = (sys.executable, "-m", "auditwheel")
    run(*auditwheel, "repair", "--wheel-dir", folder / "repaired", built, cwd=folder)
    (repaired,) = (folder / "repaired").glob("*.whl")
    return repaired


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    run(folder / "bin" / "pip", "install", "-q", wheel, cwd=folder, path=folder / "bin")
    return folder / "bin"


def test_wheel_needs_nothing_but_the_system(wheel: Path) -> None:
    assert "manylinux" in wheel.name
    names = run(sys.executable, "-m", "zipfile", "-l", wheel, cwd=wheel.parent)
    assert "kvcore.libs/" not in names  # the folder of bundled libraries
    assert "kvcore/_core" in names


def test_program_tells_what_it_needs(programs: Path, tmp_path: Path) -> None:
    python = programs / "python"
    installed = run(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    names = {line.partition("==")[0] for line in installed.split()}
    assert names - {"pip", "setuptools"} == {"kvcore", "ml_dtypes", "numpy"}
    cmake_dir = run(python, "-m", "kvcore", "--cmakedir", cwd=tmp_path, path=programs).strip()
    assert (Path(cmake_dir) / "kvcoreConfig.cmake").is_file()
    done = subprocess.run(
        [programs / "kvcore", "info"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("pip install 'kvcore[cli]'\n")
    assert done.stderr.count("\n") == 1


def test_tests_pass_without_a_compiler(wheel: Path, programs: Path, tmp_path: Path) -> None:
    pip = (programs / "python", "-m", "pip")
    run(*pip, "install", "-q", f"{wheel}[cli]", "pytest", "hypothesis", cwd=tmp_path, path=programs)
    run(programs / "kvcore", "info", cwd=tmp_path, path=programs)
    tests = [ROOT / "tests" / name for name in SHORT]
    pytest_here = (programs / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    output = run(*pytest_here, *tests, cwd=tmp_path, path=programs)
    assert " passed" in output
