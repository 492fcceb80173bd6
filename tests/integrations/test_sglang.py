# SPDX-License-Identifier: Apache-2.0
"""The prefix cache of SGLang on kvcore: imports, order, and with SGLang's wheel all that it does.

The wheel is looked for in the folder that ``KVCORE_SGLANG`` names; ``KVCORE_REQUIRE=sglang`` has it
fetched. Its sources run in a process of their own, beside stubs of what they import.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from conftest import REQUIRED, require
from kvcore.integrations.sglang.order import dfs_weight_order

RUNNER = Path(__file__).with_name("run_sglang.py")


def test_the_plug_in_is_an_entry_point_that_imports_nothing_of_sglang() -> None:
    found = {each.name: each.value for each in entry_points(group="sglang.srt.plugins")}
    assert found["kvcore"] == "kvcore.integrations.sglang:register"
    code = "import sys, kvcore, kvcore.integrations.sglang as s; print(s.register)\n"
    code += "assert not {'sglang', 'torch'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_its_registry_the_plug_in_says_so(caplog: pytest.LogCaptureFixture) -> None:
    from kvcore.integrations import sglang

    if "sglang" in sys.modules:
        pytest.skip("SGLang is installed")
    sglang.register()
    assert "no --radix-cache-backend" in caplog.text


@pytest.mark.parametrize(
    ("paths", "order"),
    [
        ([], []),
        ([[1]], [0]),
        ([[], [1], []], [1, 0, 2]),
        ([[1], [2, 3], [2, 4], [2]], [1, 2, 3, 0]),
        ([[1, 2], [1, 3], [1, 3, 4], [5]], [2, 1, 0, 3]),
        ([[7]] * 3, [0, 1, 2]),
    ],
)
def test_subtrees_of_many_requests_are_walked_first(
    paths: list[list[int]], order: list[int]
) -> None:
    assert dfs_weight_order(paths) == order


def test_a_long_chain_of_prefixes_is_walked() -> None:
    chain = [list(range(n)) for n in range(1500)]
    assert dfs_weight_order(chain) == list(reversed(range(1500)))


def test_written_calls_answer_as_sglangs_own_cache(tmp_path: Path) -> None:
    require("torch")
    folder = Path(os.environ.get("KVCORE_SGLANG", "."))
    if not list(folder.glob("sglang-*.whl")) and "sglang" not in REQUIRED:
        pytest.skip("KVCORE_SGLANG names no folder with the wheel of SGLang")
    found = tmp_path / "checks.json"
    options = ["--cache", str(folder), "--seeds", "1", "--steps", "25", "--json", str(found)]
    run = subprocess.run(
        [sys.executable, str(RUNNER), *options], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(json.loads(found.read_text())) > 40
