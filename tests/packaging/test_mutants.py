# SPDX-License-Identifier: Apache-2.0
"""Known mutants can be applied, and their runner reports a mutant that no test notices."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from mutant import ROOT, Mutant
from run_mutants import MUTANTS, TOGETHER, in_builds, main

pytestmark = pytest.mark.skipif(not (ROOT / "cpp").exists(), reason="needs a checkout")

SIZES = "python/kvcore/support/byte_sizes.py"
WORDS = "_MOST_CHARACTERS = 40  # more digits than any memory needs\n"
TEST = "tests/python/package/test_dtypes.py::test_python_reads_the_table"
HARMLESS = Mutant("a comment has other words", SIZES, WORDS, "_MOST_CHARACTERS = 40\n", TEST)
NOTICED = Mutant(
    "int8 is missing",
    "python/kvcore/support/dtypes.py",
    "if size == 1)",
    'if size == 1 and name != "int8")',
    TEST,
)


def exists(test: str) -> bool:
    """Return whether a checkout has the search, the C++ test or the test of Python."""
    room, _, name = test.partition("/")
    if room == "explore":
        named = (ROOT / "tests/cpp/explore").glob("*.hpp")
        return name == "groups" or any(f'"{name}"' in path.read_text() for path in named)
    if room != "tests":
        return (ROOT / f"tests/cpp/{room}/{name}.cpp").exists()
    file, _, function = test.partition("::")
    if not (ROOT / file).exists():
        return False
    return not function or f"def {function.partition('[')[0]}(" in (ROOT / file).read_text()


def test_each_mutant_is_applied_and_has_a_test() -> None:
    for mutant in MUTANTS:
        assert mutant.mutated(mutant.original()) != mutant.original()
        assert all(map(exists, mutant.by.split())), mutant
    assert max(Counter(mutant.name for mutant in MUTANTS).values()) == 1


def test_mutants_of_a_module_share_builds() -> None:
    builds = in_builds(MUTANTS, TOGETHER)
    assert Counter(each for build in builds for each in build) == Counter(MUTANTS)
    for build in builds:
        assert len(build) <= TOGETHER
        assert len(build) == 1 or build[0].language == "Cython"
        assert len({each.targets for each in build}) == 1
        texts = {each.path: each.original() for each in build}
        for each in build:
            texts[each.path] = each.mutated(texts[each.path])
    assert len(in_builds(MUTANTS, 1)) == len(MUTANTS)


def test_there_are_mutants_in_each_language() -> None:
    counts = Counter(mutant.language for mutant in MUTANTS)
    assert counts.keys() == {"C++", "Cython", "Python"}
    assert min(counts.values()) >= 10
    assert counts.total() >= 60
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert re.search(rf"each of the {len(MUTANTS)} mutants", text), counts


def test_a_mutant_that_no_test_notices_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (ROOT / SIZES).read_bytes()
    assert main(["-j", "1", "--folder", str(tmp_path)], [HARMLESS, NOTICED]) == 1
    rows = capsys.readouterr().out.splitlines()
    assert any(row.startswith(HARMLESS.name) and row.endswith("NOT NOTICED") for row in rows)
    assert any(row.startswith(NOTICED.name) and row.endswith(TEST) for row in rows)
    assert rows[-1].startswith("2 mutants in ")
    assert rows[-1].endswith(f"NOT noticed: {HARMLESS.name}")
    assert (ROOT / SIZES).read_bytes() == before == (tmp_path / "0" / SIZES).read_bytes()
    assert main(["--only", NOTICED.name, "--folder", str(tmp_path)], [HARMLESS, NOTICED]) == 0


def test_a_text_that_is_not_there_once_is_an_error(tmp_path: Path) -> None:
    for old in ("no such text", "_UNITS"):
        mutant = Mutant("stale", SIZES, old, "", TEST)
        with pytest.raises(SystemExit, match=r"stale: .* must be there once"):
            main(["--folder", str(tmp_path)], [NOTICED, mutant])
    assert not any(tmp_path.iterdir())


def test_a_test_that_does_not_run_is_an_error(tmp_path: Path) -> None:
    mutant = Mutant("no test", SIZES, WORDS, "", f"{TEST}_twice")
    with pytest.raises(SystemExit, match="pytest cannot run"):
        main(["-j", "1", "--folder", str(tmp_path)], [mutant])
