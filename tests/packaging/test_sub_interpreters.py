# SPDX-License-Identifier: Apache-2.0
"""The import of kvcore in a sub-interpreter raises an error at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
if {in_main}:
    import kvcore
code = '''
try:
    import {module}
except ImportError as error:
    print("refused:", error, flush=True)
else:
    print("imported", flush=True)
'''
try:
    new = interpreters.create("legacy")
except TypeError:
    new = interpreters.create(isolated=False)
run = getattr(interpreters, "exec", None) or interpreters.run_string
run(new, code)
print("still running", flush=True)
"""


@pytest.mark.parametrize("in_main", [False, True])
@pytest.mark.parametrize(
    "module", ["kvcore", "kvcore._core", "kvcore.native.engine", "kvcore.apps.cli"]
)
def test_sub_interpreter_is_refused(module: str, *, in_main: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module, in_main=in_main)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "refused: " in done.stdout, done.stdout + done.stderr
    assert "sub-interpreter" in done.stdout
    assert "still running" in done.stdout
    assert done.stderr == ""
    assert done.returncode == 0
