# SPDX-License-Identifier: Apache-2.0
"""The stored results of the benches: rows, and the machine and versions of each row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import run
    from harness import PACE

    monkeypatch.setattr(run, "best_pace", lambda: 1000)
    monkeypatch.setenv(PACE, "1000")  # a run sets it; pytest restores it after the test
    return run


def measured_on(run: Any, monkeypatch: pytest.MonkeyPatch, cpu: str, version: str) -> None:
    """Make every bench measure one row on a machine with this processor."""
    from harness import plain_row

    facts = {"cpu": cpu, "cores": 2, "libc": "l", "python": "3", "numpy": "2", "kvcore": version}
    rows = {
        "data_path": plain_row("data.append.1", f"append, {cpu}", 1.0, "us", limit=1.0),
        "swap": plain_row("swap.none", f"swap, {cpu}", 1.0, "us"),
    }
    monkeypatch.setattr(
        run, "run_bench", lambda name, _: run.Measured(facts, [rows[name]] if name in rows else [])
    )


def test_rows_that_are_kept_keep_the_machine_they_were_measured_on(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    measured_on(run, monkeypatch, "old processor", "1.0")
    assert run.main(["data-path", "--json", str(out)]) == 0
    measured_on(run, monkeypatch, "new processor", "2.0")
    assert run.main(["data-path", "--json", str(out), "--only", "swap"]) == 0
    machines = {
        name: bench["machine"]["cpu"]
        for name, bench in json.loads(out.read_text())["benches"].items()
    }
    expected = dict.fromkeys(run.SUITES["data-path"], "old processor") | {"swap": "new processor"}
    assert machines == expected
    capsys.readouterr()
    assert run.main(["data-path", "--json", str(out), "--stored"]) == 0
    old, new = capsys.readouterr().out.split("\n\nnew processor, ")
    assert old.startswith("old processor, 2 cores, l, Python 3, numpy 2, kvcore 1.0;")
    assert "append, old processor" in old
    assert "swap, new processor" in new


def test_headlines_name_every_version_they_are_from(run: Any) -> None:
    from harness import plain_row

    one, other = (
        run.Measured({"kvcore": version}, [plain_row(key, "", 1.0, "us")])
        for version, key in (("1.0", "pin.64"), ("2.0", "alloc.build"))
    )
    assert "| kvcore 1.0 |" in run.headlines([one, one])
    assert "| kvcore 1.0 and 2.0 |" in run.headlines([one, other])


@pytest.mark.parametrize("suite", ["control-path", "data-path", "generate"])
def test_no_two_stored_rows_say_the_same(run: Any, suite: str) -> None:
    rows = run.rows_of(run.stored(run.RESULTS / f"{suite}.json").values())
    assert rows
    texts = [row.work for row in rows]
    assert sorted({text for text in texts if texts.count(text) > 1}) == []
