# SPDX-License-Identifier: Apache-2.0
"""Copies of the checkout, in which a mutant is built and tested. The checkout never changes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

from mutant import ROOT, Mutant

__all__ = ["Copy", "fast_tests"]

SOURCES = ("cpp", "python", "tests/cpp", "CMakeLists.txt", "pyproject.toml")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd")
SUFFIX = EXTENSION_SUFFIXES[0]
LIMIT_S = 240.0

# Removes the finder of an editable install, which is asked before PYTHONPATH.
SITE_CUSTOMIZE = """\
import sys

sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in type(each).__module__]
"""


def run(
    command: Sequence[str | Path], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run a program in the checkout. Return None if it does not end in LIMIT_S seconds."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,  # one group with the programs that tests start
    ) as program:
        try:
            out, err = program.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # the group has ended
                os.killpg(program.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, program.returncode, out, err)


def fast_tests(mutants: Iterable[Mutant]) -> list[str]:
    """Return the tests of mutants without the searches, each test once."""
    fast = [each for each in mutants if not each.is_searched]
    tests = [name for each in fast for name in each.by.split()]
    return list(dict.fromkeys(tests))


def copy_changed(source: str | Path, target: str | Path) -> None:
    """Copy a file unless the target has its bytes.

    The copy has a new time, so a build that goes on compiles it again. The object of an earlier
    mutant could be newer than the source.
    """
    if not Path(target).exists() or Path(target).read_bytes() != Path(source).read_bytes():
        shutil.copyfile(source, target)


class Copy:
    """A copy of the sources with a build of its own.

    Parameters
    ----------
    where : Path
        A new folder, or the folder of an earlier copy, whose build goes on.
    """

    def __init__(self, where: Path) -> None:
        self.where = where
        self.build_folder = where / "build"
        self.package = where / "python"  # on the path of Python
        where.mkdir(parents=True, exist_ok=True)
        for name in SOURCES:
            if (ROOT / name).is_dir():
                shutil.copytree(
                    ROOT / name,
                    where / name,
                    dirs_exist_ok=True,
                    ignore=LEFT_OUT,
                    copy_function=copy_changed,
                )
            else:
                copy_changed(ROOT / name, where / name)

    # ---- builds ----------------------------------------------------------------------------------

    def configure(self, cmake_args: Iterable[str]) -> None:
        """Configure the build of the core, of its tests and of the native modules."""
        command = ["cmake", "-S", str(self.where), "-B", str(self.build_folder)]
        command += ["-DKVCORE_BUILD_PYTHON=ON", "-DKVCORE_CUDA=OFF", "-DKVCORE_JAX=OFF"]
        command += [f"-DPython_EXECUTABLE={sys.executable}"]
        # For a mutant, compiling takes longer than the search. Assertions are on.
        command += ["-DCMAKE_BUILD_TYPE=Mutants", "-DCMAKE_CXX_FLAGS_MUTANTS=-O1", *cmake_args]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"cmake fails:\n{done.stdout}{done.stderr}")

    def build(self, targets: Iterable[str], jobs: int = 1) -> None:
        """Build targets. Raise SystemExit if the build fails."""
        command = ["cmake", "--build", str(self.build_folder), "-j", str(jobs), "--target"]
        done = subprocess.run([*command, *targets], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"the tree does not build:\n{done.stdout}{done.stderr}")

    # ---- the package -----------------------------------------------------------------------------

    def add_modules(self) -> None:
        """Copy the installed native modules, so that Python imports all of kvcore from here.

        Raises
        ------
        SystemExit
            kvcore is not installed, or Python would import another copy.
        """
        spec = find_spec("kvcore._core")
        if spec is None or spec.origin is None:
            raise SystemExit("kvcore is not installed; install it from this checkout first")
        installed = Path(spec.origin).parent
        for module in (*installed.glob(f"*{SUFFIX}"), *installed.glob(f"native/*{SUFFIX}")):
            shutil.copy2(module, self.package / "kvcore" / module.relative_to(installed))
        (self.package / "sitecustomize.py").write_text(SITE_CUSTOMIZE)
        imported = "import kvcore.native.engine as engine; print(engine.__file__)"
        done = run([sys.executable, "-c", imported], self._environment())
        if done is None or not done.stdout.startswith(str(self.package)):
            raise SystemExit(f"Python does not import the copy of kvcore: {done}")

    def _environment(self) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": str(self.package),
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "200",  # pytest cuts longer lines
            "HYPOTHESIS_PROFILE": "ci",
        }

    # ---- mutants ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def changed(self, mutants: Sequence[Mutant]) -> Iterator[None]:
        """Build one mutant, or several mutants of one native module.

        Restores the files, but not the build of the core, at the end of ``with``.
        """
        texts = {mutant.path: mutant.original() for mutant in mutants}
        mistakes = texts.copy()
        for mutant in mutants:
            mistakes[mutant.path] = mutant.mutated(mistakes[mutant.path])
        first, kept = mutants[0], None
        installed = self.package / "kvcore/native" / f"{first.module}{SUFFIX}"
        try:
            self._write(mistakes)
            if first.targets:
                self.build(first.targets)
            if first.language == "Cython":
                kept = installed.read_bytes()
                shutil.copy2(self.build_folder / "native" / installed.name, installed)
            yield
        finally:
            self._write(texts)
            if kept is not None:
                installed.write_bytes(kept)

    def _write(self, texts: dict[str, str]) -> None:
        for path, text in texts.items():
            (self.where / path).write_text(text)

    def failure(self, tests: Iterable[str]) -> tuple[str, str] | None:
        """Return the first of some tests that fails, and its first words; None without a failure.

        Raises
        ------
        SystemExit
            pytest finds no test, or cannot import its file.
        """
        programs = [each for each in tests if not each.startswith("tests/")]
        scripts = [each for each in tests if each.startswith("tests/")]
        for name in programs:
            room, _, file = name.partition("/")
            done = run([self.build_folder / f"test_{room}", "--file", file])
            if done is None:
                return name, "does not end"
            if done.returncode != 0:
                words = (done.stderr + done.stdout).strip().splitlines() or ["crashed"]
                return name, words[0]
        return self._failure_of_pytest(scripts) if scripts else None

    def _failure_of_pytest(self, tests: list[str]) -> tuple[str, str] | None:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-rfE"]
        done = run([*command, "-p", "no:cacheprovider", *tests], self._environment())
        if done is None:
            return " ".join(tests), "does not end"
        if done.returncode == 0:
            return None
        if done.returncode < 0:
            return " ".join(tests), f"signal {-done.returncode}"
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", done.stdout, re.MULTILINE)
        if done.returncode != 1 or found is None:
            raise SystemExit(f"pytest cannot run {tests}:\n{done.stdout}{done.stderr}")
        return found[1], found[2] or ""
