# SPDX-License-Identifier: Apache-2.0
"""The example of workers and a router: the hits of each policy in caches of three processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import require

require("zmq")
require("msgspec")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "router_and_workers.py"


def run(policy: str) -> tuple[int, list[int]]:
    """Return the percentage of cached tokens, and the requests of each worker."""
    command = [sys.executable, str(EXAMPLE), "--policy", policy]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    found = re.fullmatch(rf"{re.escape(policy)}: (\d+)% of 1624 tokens were cached; (.*)\n", out)
    assert found is not None, out
    return int(found[1]), [int(n) for n in re.findall(r": (\d+)", found[2])]


@pytest.mark.xdist_group("router example")
def test_what_is_cached_and_what_runs_both_count() -> None:
    cached, served = run("prefix+load")
    others, evenly = run("round-robin")
    assert sum(served) == sum(evenly) == 28
    assert evenly == [10, 9, 9]
    assert min(served) >= 4  # all workers serve requests
    assert cached > others + 15
