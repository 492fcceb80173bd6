# SPDX-License-Identifier: Apache-2.0
"""The time at which modules are imported, in every build, with and without GPU kernels."""

from __future__ import annotations

import json
import subprocess
import sys

from kvcore.apps.cli.info import collect
from kvcore.backends.cuda import availability


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_kvcore_loads_no_library_of_gpus() -> None:
    loaded = run("import sys, json, kvcore; print(json.dumps(list(sys.modules)))")
    assert {"cupy", "kvcore._cuda", "torch", "jax"}.isdisjoint(json.loads(loaded))
    assert {"kvcore.cuda", "kvcore.backends.cuda"}.isdisjoint(json.loads(loaded))


def test_calls_on_host_arrays_load_none_either() -> None:
    code = """
import sys
import numpy as np
from kvcore import ops
ops.zero_pages(np.ones((2, 3)), [0])
ops.quantize(np.ones((2, 3), np.float32), "int8", 3)
assert not {"cupy", "kvcore._cuda", "kvcore.cuda", "kvcore.backends.cuda"} & sys.modules.keys()
"""
    run(code)


def test_asking_why_there_is_no_gpu_needs_no_driver() -> None:
    code = "from kvcore.cuda import why_unavailable; print(why_unavailable())"
    assert run(code).strip() == availability.why_unavailable()


def test_info_tells_whether_kernels_are_built_in() -> None:
    cuda = collect()["cuda"]
    assert cuda["built"] == availability.is_built()
    assert cuda["available"] == (availability.why_unavailable() == "")
    assert bool(cuda["reason"]) != cuda["available"]
    assert bool(cuda["devices"]) == cuda["available"]
