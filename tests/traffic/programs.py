# SPDX-License-Identifier: Apache-2.0
"""Programs in separate processes, with other hash seeds than this process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import kvcore

#: The folders of test helpers, as the PYTHONPATH of a program.
HELPERS = os.pathsep.join(
    str(Path(__file__).parents[1] / name) for name in ("oracle", "traffic", "fakes")
)
_HEAD = "import sys\nsys.path[:0] = {helpers!r}\n"


def program(text: str, *arguments: Any, seed: int) -> subprocess.Popen[str]:
    """Start a Python program that can import the test helpers."""
    code = _HEAD.format(helpers=HELPERS.split(os.pathsep)) + textwrap.dedent(text)
    path = [str(Path(kvcore.__file__).parents[1]), *sys.path]
    env = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def printed(text: str, *arguments: Any, seed: int) -> list[int]:
    """Run such a program to its end; return the numbers that it prints."""
    process = program(text, *arguments, seed=seed)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return [int(number) for number in out.split()]
