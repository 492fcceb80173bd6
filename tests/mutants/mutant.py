# SPDX-License-Identifier: Apache-2.0
"""One known mistake: a small change of a source file, and the test that must notice it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Mutant"]

ROOT = Path(__file__).resolve().parents[2]
NATIVE = "python/kvcore/native/"


@dataclass(frozen=True)
class Mutant:
    """A change of one file of the sources, which a test must notice.

    Attributes
    ----------
    name : str
        What the changed program does.
    path : str
        The file, below the root of the checkout.
    old, new : str
        The text that is replaced, which occurs exactly once in the file, and its replacement.
    by : str
        The test that must fail. ``explore/plain``: a search of the explorer in the scenario
        "plain"; ``explore/groups``: a search of the explorer of groups. ``layers/states``: a C++
        test, by its name for ctest; several names are separated by spaces, and the first failure
        counts. ``tests/...``: a file or a test for pytest, which also counts parametrized cases.
    """

    name: str
    path: str
    old: str
    new: str
    by: str

    @property
    def language(self) -> str:
        """The language of the file: "C++", "Cython" or "Python"."""
        if not self.path.startswith("python/kvcore/"):
            return "C++"
        return "Cython" if self.path.startswith(NATIVE) else "Python"

    @property
    def module(self) -> str:
        """The native module of a file in Cython: "engine" for ``native/engine/claims.pxi``."""
        return Path(self.path.removeprefix(NATIVE)).parts[0].removesuffix(".pyx")

    @property
    def is_searched(self) -> bool:
        """True if an explorer searches for the mutant; else a fast test must fail."""
        return self.by.startswith("explore/")

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets of CMake that the search and the tests need, after each change."""
        if self.language != "C++":
            return (f"native_{self.module}",) if self.language == "Cython" else ()
        if self.is_searched:
            return ("explore_groups" if self.by == "explore/groups" else "explore_interleavings",)
        return tuple(dict.fromkeys(f"test_{name.partition('/')[0]}" for name in self.by.split()))

    def mutated(self, text: str) -> str:
        """Return a text of the file with the mistake.

        Raises
        ------
        ValueError
            The replaced text does not occur exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.name}: the text to replace is {count} times in {self.path}, must be there "
                f"once; change it in tests/mutants as the source has changed:\n{self.old}"
            )
        return text.replace(self.old, self.new)

    def original(self) -> str:
        """Return the text of the file in the checkout."""
        return (ROOT / self.path).read_text()
