# SPDX-License-Identifier: Apache-2.0
"""A comparison of two engines with the same requests: one with its own cache, one with kvcore's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["EnginePair", "served"]


def served(
    command: Sequence[str | Path], environment: dict[str, str], log: Path, seconds: float
) -> dict[str, Any]:
    """Run a program that serves scenes, and return the result that it prints.

    Raises
    ------
    RuntimeError
        The program fails, or prints no result.
    subprocess.TimeoutExpired
        The program takes longer than `seconds`.
    """
    with log.open("w") as file:
        done = subprocess.run(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=file,
            timeout=seconds, check=False,
        )  # fmt: skip
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not found:
        raise RuntimeError(f"the engine fails:\n{log.read_text()[-3000:]}")
    result: dict[str, Any] = json.loads(found[0].removeprefix("RESULT "))
    return result


class EnginePair:
    """A pair of engines; counts the checks of all runs."""

    def __init__(self) -> None:
        self.passed = self.failed = 0

    def check(self, run: str, what: str, holds: bool, detail: str) -> None:
        """Count a check, and print it if it fails."""
        self.passed += holds
        self.failed += not holds
        if not holds:
            print(f"FAILED {run}: {what}: {detail}", flush=True)

    def serve_both(
        self, run: str, sides: Sequence[str], serve: Callable[[str], dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Run both sides at the same time and return their results; empty if an engine fails."""
        with ThreadPoolExecutor(2) as both:
            futures = [both.submit(serve, side) for side in sides]
            errors = [each.exception() for each in futures]
        for side, error in zip(sides, errors, strict=True):
            if error is not None:
                self.check(run, f"the engine runs with {side}", False, str(error))
        return [] if any(errors) else [each.result() for each in futures]

    def check_tokens(self, run: str, own: dict[str, Any], ours: dict[str, Any]) -> None:
        """Check that both sides answer each scene with the same tokens."""
        for scene, answers in own["answers"].items():
            theirs = ours["answers"][scene]
            different = [name for name in answers if answers[name] != theirs.get(name)]
            same = not different and answers.keys() == theirs.keys()
            self.check(run, f"the tokens of {scene!r} are equal", same, f"not of {different[:9]}")
