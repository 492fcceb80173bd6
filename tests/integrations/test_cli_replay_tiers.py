# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay --host-pages --disk-pages``: JSON, tables, page, refusals, a full disk."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runs import refused, shown, told
from trace_files import random_rows, write_trace

SIZED = ("--page-size", "512", "--host-pages", "12", "--disk-pages", "1000")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = random_rows(7, requests=80, depth=6, fan_out=2)
    return str(write_trace(tmp_path, *rows))


def test_json_tells_where_tokens_were_found(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    answer = told(capsys, "replay", trace, "--mode", "admission", "--pages", "9", *SIZED)
    tiers = answer["tiers"]
    assert (tiers["host_pages"], tiers["disk_pages"], tiers["disk_errors"]) == (12, 1000, 0)
    found = [tiers[f"{where}_tokens"] for where in ("device", "host", "disk")]
    assert min(found) > 0
    assert sum(found) == answer["cached_tokens"]
    assert sum(found) + tiers["computed_tokens"] == answer["prompt_tokens"]
    shares = [tiers[f"{where}_share"] for where in ("device", "host", "disk", "computed")]
    assert sum(shares) == pytest.approx(1)
    assert answer == told(
        capsys, "replay", trace, "--mode", "admission", "--pages", "9", *SIZED
    ) | {
        name: answer[name]
        for name in answer
        if "seconds" in name or "_us_" in name or name in ("tokens_per_second", "tiers")
    }


def test_json_without_tiers_has_none(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    assert told(capsys, "replay", trace, "--pages", "500")["tiers"] is None
    assert "host_pages" not in told(capsys, "replay", trace, "--pages", "500,600")


def test_table_has_a_row_for_each_tier(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    out = shown(capsys, "replay", trace, "--mode", "admission", "--pages", "9", *SIZED)
    assert "12 pages of a host tier and 1,000 on disk" in " ".join(out.split())
    rows = dict(re.findall(r"│ (found [a-z ]+?|computed) +│ +([\d.]+)% │ [\d,]+ tokens", out))
    assert list(rows) == [
        "found on the device",
        "found in the host tier",
        "found on disk",
        "computed",
    ]
    assert sum(map(float, rows.values())) == pytest.approx(100, abs=0.03)
    assert "disk errors" not in out
    shallow = shown(capsys, "replay", trace, "--mode", "admission", "--pages", "9", *SIZED[:4])
    assert "found in the host tier" in shallow
    assert "disk" not in shallow


def test_online_has_them_too(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    out = shown(capsys, "replay", trace, "--mode", "online", "--pages", "9", *SIZED)
    assert "found on disk" in out


def test_policies_and_pools_are_compared(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path
) -> None:
    compared = ("replay", trace, "--pages", "9,20", "--policy", "lru,arc", *SIZED)
    answer = told(capsys, *compared)
    assert (answer["host_pages"], answer["disk_pages"]) == (12, 1000)
    page = tmp_path / "page.html"
    out = shown(capsys, *compared, "--html", str(page))
    assert "device optimum" in out
    assert "where prompt tokens were found" in out
    rows = [
        [f"{each['pages']:,}", each["policy"]]
        + [f"{each['tiers'][f'{at}_share']:.2%}" for at in ("device", "host", "disk", "computed")]
        for each in sorted(answer["results"], key=lambda each: each["pages"])
    ]
    assert [list(map(str.strip, line.split("│")))[1:7] for line in out.splitlines()][-6:-2] == rows
    html = page.read_text(encoding="utf-8")
    assert "Where prompt tokens were found" in html
    assert "The optimum is only for the device: tiers find more." in html
    assert "Below the device are 12 pages of a host tier and 1,000 on disk." in html
    assert all(f"<td>{share}</td>" in html for row in rows for share in row[2:])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--host-pages", "0"], "'--host-pages': expected 1 to 2147483647, got 0"),
        (["--host-pages", "1", "--disk-pages", "0"], "'--disk-pages': expected 1 to 2147483647"),
        (["--disk-pages", "9"], "expected --host-pages with --disk-pages"),
        (
            ["--host-pages", "9", "--groups", "gemma-3-27b", "--memory", "8GiB"],
            "expected --host-pages or --groups",
        ),
    ],
)
def test_bad_tiers_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    # The trace does not exist: the arguments are checked before any file is read.
    assert told in refused(capsys, "replay", "no-such-trace", *arguments)


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_disk_that_takes_no_more_is_told(trace: str, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-m", "kvcore", "replay", trace, "--mode", "admission"]
    command += ["--pages", "9", *SIZED]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(folder)},
        preexec_fn=small_files,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"disk errors +│ +[1-9][\d,]* │ hits are missing", done.stdout)
    assert not [*folder.iterdir()]
