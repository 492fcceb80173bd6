# SPDX-License-Identifier: Apache-2.0
"""Compare ``import kvcore`` with ``import numpy``, and the first manager with the second."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from argparse import Namespace
from typing import Any

from harness import Row, main, make_row

_IMPORT = """
from time import perf_counter as now
begun = now()
import {}
print((now() - begun) * 1e3)
"""

_MANAGERS = """
from time import perf_counter as now
import kvcore
params = kvcore.KVCacheParams(
    dtype="float32", n_kv_heads=1, head_dim=8, num_layers=1, page_size=16,
    enable_prefix_caching=True,
)
times = []
for _ in range(2):
    begun = now()
    kvcore.PagedKVCacheManager(params, max_batch_size=8, max_seq_len=256, num_pages=64)
    times.append((now() - begun) * 1e3)
print(times)
"""


def _run(program: str) -> Any:
    """Return the number or the list that a program prints in a fresh process."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    return json.loads(done.stdout)


def measure(options: Namespace) -> list[Row]:
    """Measure both sides of a row in turn, so that a slow moment slows both."""
    rounds = 3 if options.quick else 15
    imports = [
        (_run(_IMPORT.format("kvcore")), _run(_IMPORT.format("numpy"))) for _ in range(rounds)
    ]
    managers = [_run(_MANAGERS) for _ in range(rounds)]
    return [
        _pair("startup.import", "import kvcore", imports, "numpy"),
        _pair("startup.manager", "the first manager of a process", managers, "the second"),
    ]


def _pair(key: str, work: str, pairs: list[Any], limit_name: str) -> Row:
    mine, limits = zip(*pairs, strict=True)
    limit = statistics.median(limits)
    return make_row(key, work, mine, unit="ms", limit=limit, limit_name=limit_name)


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
