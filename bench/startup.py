# SPDX-License-Identifier: Apache-2.0
"""Compare ``import kvcore`` in a fresh process with ``import numpy``."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace

from harness import Row, main, make_row

_PROGRAM = "from time import perf_counter as t; a = t(); import {}; print((t() - a) * 1e3)"


def _import_ms(module: str) -> float:
    command = [sys.executable, "-c", _PROGRAM.format(module)]
    return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def measure(options: Namespace) -> list[Row]:
    """Import both in turn, so that a slow moment slows both."""
    rounds = 3 if options.quick else 15
    pairs = [(_import_ms("kvcore"), _import_ms("numpy")) for _ in range(rounds)]
    mine, numpy = ([pair[i] for pair in pairs] for i in range(2))
    limit = sorted(numpy)[len(numpy) // 2]
    row = make_row("import", "import kvcore", mine, unit="ms", limit=limit, limit_name="numpy")
    return [row]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
