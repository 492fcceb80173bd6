# SPDX-License-Identifier: Apache-2.0
"""Break the cache manager in known ways and check that its tests fail.

    python tests/cpp/mutants.py [--only NAME] [--searched] [--laws] [--jobs N] [--folder F]
        [--cmake-arg ARG ...]

The script changes only copies of the tree. Each mutant replaces a text that must occur exactly
once. An explorer searches for most mutants by trying interleavings. The row of a mutant contains
the length of the shortest sequence that breaks a law of the manager, and of the shortest sequence
that breaks the content of a page that a request reads; ``--laws`` skips the second search. Mutants
of states and tenants must fail a fast test; ``--searched`` skips these mutants.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue

from known_mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
TARGET = "explore_interleavings"
GROUPS_TARGET = "explore_groups"  # of the scenario "groups"
TESTS = {  # by scenario: test programs and the files of their cases
    "states": (
        ("test_layers", "states"),
        ("test_stress", "states"),
        ("test_layers", "state_eviction"),
    ),
    "tenants": (("test_stress", "tenants"),),
}
SOURCES = ("cpp", "tests/cpp", "CMakeLists.txt", "pyproject.toml")
SEARCHES = (("--depth", "5"), ("--depth", "6"), ("--depth", "8"))
LIMIT_S = 240.0


def copy_tree(where: Path) -> None:
    """Copy the sources of the explorer and the tests."""
    where.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, where / name, dirs_exist_ok=True)
        else:
            shutil.copy2(source, where / name)


def targets_of(mutant: Mutant) -> tuple[str, ...]:
    """Return the programs that must fail with a mutant."""
    if mutant.scenario == "groups":
        return (GROUPS_TARGET,)
    if mutant.scenario in TESTS:
        return tuple(dict.fromkeys(program for program, _ in TESTS[mutant.scenario]))
    return (TARGET,)


def prepare(where: Path, cmake_args: Iterable[str], targets: Iterable[str]) -> Path:
    """Copy the tree and build the target programs in the copy."""
    copy_tree(where)
    configure = ["cmake", "-S", str(where), "-B", str(where / "build"), "-DKVCORE_CUDA=OFF"]
    # For a mutant, compiling takes longer than the search.
    configure += ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", *cmake_args]
    subprocess.run(configure, check=True, capture_output=True)
    build(where, targets)
    return where


def build(where: Path, targets: Iterable[str]) -> None:
    """Build the target programs. Raise SystemExit if the build fails."""
    command = ["cmake", "--build", str(where / "build"), "-j", "1", "--target", *targets]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the tree does not build:\n{done.stdout}{done.stderr}")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program. Raise subprocess.TimeoutExpired after LIMIT_S seconds."""
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def search(where: Path, mutant: Mutant, extra: tuple[str, ...]) -> tuple[str, str]:
    """Return the depth of the shortest sequence that detects the mutant, and the sequence."""
    for options in SEARCHES:
        if mutant.scenario == "groups":
            command = [str(where / "build" / GROUPS_TARGET), *options, *extra]
        else:
            command = [str(where / "build" / TARGET), "--scenario", mutant.scenario]
            command += [*options, *extra]
        try:
            done = run(command)
        except subprocess.TimeoutExpired:
            break
        if done.returncode != 0:
            return described(done.stdout)
    return "-", "not found"


def fail_tests(where: Path, mutant: Mutant) -> tuple[str, str]:
    """Return "test" and the first failure, or "-" if no test fails."""
    for program, file in TESTS[mutant.scenario]:
        name = f"{program} --file {file}"
        try:
            done = run([str(where / "build" / program), "--file", file])
        except subprocess.TimeoutExpired:
            return "test", f"{name} does not end"
        if done.returncode != 0:
            words = (done.stderr + done.stdout).strip().splitlines() or ["crashed"]
            return "test", f"{name}: {words[0]}"
    return "-", "not found"


def look_for(where: Path, mutant: Mutant, *, by_laws_alone: bool) -> list[tuple[str, str]]:
    """Search for a mutant with the laws of the manager and, unless excluded, without them."""
    if mutant.scenario in TESTS:
        return [fail_tests(where, mutant), ("", "")]
    found = search(where, mutant, ())
    return [found, ("", "") if by_laws_alone else search(where, mutant, ("--contents",))]


def described(output: str) -> tuple[str, str]:
    """Return the depth, text and sequence of the violation in the explorer's output."""
    found = re.search(r"VIOLATION in \S+ at depth (\d+): (.*)\n\s*(.*)", output)
    if found is None:
        return "?", output.strip()[-200:]
    return found[1], f"{found[2]}: {found[3]}"


def is_noticed(folders: Queue[Path], mutant: Mutant, *, by_laws_alone: bool) -> bool:
    """Build a mutant in a free folder, search for it, and print its row."""
    text = (ROOT / mutant.path).read_text()
    if (count := text.count(mutant.old)) != 1:
        raise SystemExit(f"{mutant.name}: {count} times in {mutant.path}, must be 1:\n{mutant.old}")
    begin = time.monotonic()
    where = folders.get()
    try:
        (where / mutant.path).write_text(text.replace(mutant.old, mutant.new))
        build(where, targets_of(mutant))
        (laws, why), (contents, read) = look_for(where, mutant, by_laws_alone=by_laws_alone)
    finally:  # another mutant may wait for the folder
        (where / mutant.path).write_text(text)
        folders.put(where)
    row = f"{mutant.name:52} {laws:>4} {contents:>8} {time.monotonic() - begin:7.0f}"
    print("\n".join([row, *(f"    {each}" for each in (why, read) if each)]), flush=True)
    return laws != "-"


def main() -> int:
    """Print a row for each mutant. Return 1 if a mutant passes all tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="run only mutants whose name contains ONLY")
    parser.add_argument("--searched", action="store_true", help="skip mutants of fast tests")
    parser.add_argument("--laws", action="store_true", help="skip the slower search by contents")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants at a time")
    parser.add_argument("--folder", type=Path, help="folder that keeps the copies and their builds")
    parser.add_argument("--cmake-arg", action="append", default=[], help="argument of cmake -S -B")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only is None or options.only in m.name]
    if options.searched:
        chosen = [m for m in chosen if m.scenario not in TESTS]
    targets = {name for mutant in chosen for name in targets_of(mutant)}
    with (
        tempfile.TemporaryDirectory(prefix="kvcore-mutants-") as temporary,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        folder = options.folder or Path(temporary)
        folders: Queue[Path] = Queue()
        make = partial(prepare, cmake_args=options.cmake_arg, targets=targets)
        for where in pool.map(make, [folder / str(i) for i in range(options.jobs)]):
            folders.put(where)
        print(f"{'mutant':52} {'laws':>4} {'contents':>8} {'seconds':>7}", flush=True)
        look = partial(is_noticed, folders, by_laws_alone=options.laws)
        noticed = list(pool.map(look, chosen))
    return 0 if all(noticed) else 1


if __name__ == "__main__":
    sys.exit(main())
