# SPDX-License-Identifier: Apache-2.0
"""Break kvcore in known ways and check that its tests fail.

    python tests/mutants/run_mutants.py [--only NAME] [--language LANGUAGE ...] [--searched]
        [--laws] [--alone] [--jobs N] [--folder F] [--cmake-arg ARG ...]

The script changes only copies of the checkout, and uses the native modules of the installed kvcore,
which must be built from the same sources. Each mutant replaces a text that must occur exactly once:
a mutant of C++ is compiled again with its search or its test programs, a mutant of Python needs no
build. Up to five mutants of a native module share a build, since compiling a module takes longer
than the tests, and each must fail its own test; ``--alone`` builds each by itself.

An explorer searches for some mutants of the core by trying interleavings. The row of a mutant has
the length of the shortest sequence that breaks a law of the manager, and of the shortest sequence
that breaks the content of a page that a request reads; ``--laws`` skips the second search. All
other mutants must fail a fast test, which passes without the mutant; ``--searched`` skips these
mutants.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue

from known_cpp import CPP
from known_cython import CYTHON
from known_python import PYTHON
from mutant import Mutant
from mutant_copy import Copy, fast_tests, run

# The fastest mutants come last, so that the jobs end together.
MUTANTS = (*CYTHON, *CPP, *PYTHON)
TOGETHER = 5  # most mutants in one build of a native module
SEARCHES = (("--depth", "5"), ("--depth", "6"), ("--depth", "8"))


def search(copy: Copy, mutant: Mutant, extra: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the depth of the shortest sequence that detects the mutant, and the sequence."""
    program = copy.build_folder / mutant.targets[0]
    scenario = mutant.by.removeprefix("explore/")
    chosen = () if scenario == "groups" else ("--scenario", scenario)
    for options in SEARCHES:
        done = run([program, *chosen, *options, *extra])
        if done is None:
            return None
        if done.returncode != 0:
            return described(done.stdout)
    return None


def described(output: str) -> tuple[str, str]:
    """Return the depth, text and sequence of the violation in the explorer's output."""
    found = re.search(r"VIOLATION in \S+ at depth (\d+): (.*)\n\s*(.*)", output)
    if found is None:
        return "?", output.strip()[-200:]
    return found[1], f"{found[2]}: {found[3]}"


def look_for(copy: Copy, mutant: Mutant, *, by_laws_alone: bool) -> tuple[str, list[str]]:
    """Return the test that notices a mutant, "" without one, and what the test prints."""
    if not mutant.is_searched:
        failed = copy.failure(mutant.by.split())
        return ("", []) if failed is None else (failed[0], [failed[1]])
    found = search(copy, mutant, ())
    if found is None:
        return "", []
    noticed, texts = f"{mutant.by}, depth {found[0]}", [found[1]]
    if not by_laws_alone:
        read = search(copy, mutant, ("--contents",))
        noticed += f", contents {'-' if read is None else read[0]}"
        texts += [] if read is None else [read[1]]
    return noticed, texts


def in_builds(mutants: Iterable[Mutant], most: int) -> list[list[Mutant]]:
    """Return the mutants of each build: at most `most` of a native module, each other alone."""
    builds: list[list[Mutant]] = []
    modules: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        if mutant.language == "Cython":
            modules.setdefault(mutant.module, []).append(mutant)
        else:
            builds.append([mutant])
    for found in modules.values():
        count = -(-len(found) // most)
        # Neighbours in the list are often changes of the same function: they get different builds.
        builds[:0] = [found[i::count] for i in range(count)]
    return builds


def missed_of(copies: Queue[Copy], mutants: Sequence[Mutant], *, by_laws_alone: bool) -> list[str]:
    """Build mutants in a free copy, look for each, and print its row. Return the missed names."""
    copy = copies.get()
    begin = time.monotonic()
    missed = []
    try:
        with copy.changed(mutants):
            for mutant in mutants:
                noticed, texts = look_for(copy, mutant, by_laws_alone=by_laws_alone)
                seconds, begin = time.monotonic() - begin, time.monotonic()
                row = f"{mutant.name:60} {mutant.language:8} {seconds:7.0f}"
                rows = [
                    f"{row}  {noticed or 'NOT NOTICED'}",
                    *(f"    {each}" for each in texts if each),
                ]
                print("\n".join(rows), flush=True)
                missed += [] if noticed else [mutant.name]
    finally:  # another mutant may wait for the copy
        copies.put(copy)
    return missed


def make_copies(
    folder: Path, jobs: int, mutants: Sequence[Mutant], cmake_args: Sequence[str]
) -> list[Copy]:
    """Copy the sources for each job and build the targets; check that the fast tests pass.

    One copy after the other is built, with all cores: a compiler cache then serves all but the
    first. The native modules are not built, since each of their mutants builds one.
    """
    copies = [Copy(folder / str(i)) for i in range(jobs)]
    core = [mutant for mutant in mutants if mutant.language == "C++"]
    targets = sorted({target for mutant in core for target in mutant.targets})
    if any(mutant.language == "Cython" for mutant in mutants):
        targets.append("kvcore")  # the library
    needs_package = len(core) < len(mutants)
    for copy in copies:
        if targets:
            copy.configure(cmake_args)
            copy.build(targets, jobs)
        if needs_package:
            copy.add_modules()
    failed = copies[0].failure(fast_tests(mutants))
    if failed is not None:
        raise SystemExit(f"{failed[0]} fails without a mutant: {failed[1]}")
    return copies


def main(arguments: Sequence[str] | None = None, known: Sequence[Mutant] = MUTANTS) -> int:
    """Print a row for each mutant, and a summary. Return 1 if a mutant passes its tests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="run only mutants whose name contains ONLY")
    parser.add_argument("--language", nargs="+", choices=("C++", "Cython", "Python"))
    parser.add_argument("--searched", action="store_true", help="skip mutants of fast tests")
    parser.add_argument("--laws", action="store_true", help="skip the slower search by contents")
    parser.add_argument(
        "--alone", action="store_true", help="build each mutant of Cython by itself"
    )
    parser.add_argument("-j", "--jobs", type=int, default=2, help="number of mutants at a time")
    parser.add_argument("--folder", type=Path, help="folder that keeps the copies and their builds")
    parser.add_argument("--cmake-arg", action="append", default=[], help="argument of cmake -S -B")
    options = parser.parse_args(arguments)
    chosen = [each for each in known if options.only is None or options.only in each.name]
    chosen = [each for each in chosen if each.language in (options.language or [each.language])]
    chosen = [each for each in chosen if each.is_searched or not options.searched]
    for mutant in chosen:
        try:
            mutant.mutated(mutant.original())
        except ValueError as error:
            raise SystemExit(str(error)) from None
    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="kvcore-mutants-") as temporary,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        folder = (options.folder or Path(temporary)).resolve()
        copies: Queue[Copy] = Queue()
        for copy in make_copies(folder, options.jobs, chosen, options.cmake_arg):
            copies.put(copy)
        print(f"copies and builds: {time.monotonic() - begin:.0f} s\n", flush=True)
        print(f"{'mutant':60} {'language':8} {'seconds':>7}  noticed by", flush=True)
        look = partial(missed_of, copies, by_laws_alone=options.laws)
        builds = in_builds(chosen, 1 if options.alone else TOGETHER)
        missed = [name for names in pool.map(look, builds) for name in names]
    verdict = f"NOT noticed: {'; '.join(missed)}" if missed else "each noticed"
    print(f"{len(chosen)} mutants in {time.monotonic() - begin:.0f} s, {verdict}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
