# SPDX-License-Identifier: Apache-2.0
"""``kvcore demo``: its JSON, table and options, and its exit on bad input or wrong outputs."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from cli_runs import refused, shown, told
from kvcore import ops
from kvcore.apps.cli.demo_table import print_demo
from kvcore.apps.cli.main import main
from kvcore.apps.demo import DemoReport, DemoSettings, run_demo
from kvcore.backends.cuda import availability

SMALL = ["--chats", "2", "--turns", "1", "--threads", "1"]
RUN_KEYS = {
    "seconds",
    "manager_seconds",
    "manager_share",
    "prompt_tokens",
    "generated_tokens",
    "tokens_per_second",
    "generated_tokens_per_second",
    "cached_tokens",
    "token_hit_rate",
    "first_token_s_p50",
    "first_token_s_p99",
    "steps",
    "peak_running",
    "peak_used_pages",
    "evicted_pages",
    "leaked_pages",
    "preemptions",
    "recomputed_tokens",
}
CHECK_KEYS = {
    "tokens",
    "differing",
    "first_difference",
    "smallest_margin",
    "largest_difference",
}


def demo_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return told(capsys, "demo", *SMALL, *arguments)


@pytest.fixture(scope="module")
def report() -> DemoReport:
    return run_demo(DemoSettings(chats=3, turns=2))


def test_json_has_every_key(capsys: pytest.CaptureFixture[str], report: DemoReport) -> None:
    answer = demo_json(capsys)
    assert answer.keys() == report.to_dict().keys()
    assert answer["with_cache"].keys() == answer["without_cache"].keys() == RUN_KEYS
    assert answer["check"].keys() == CHECK_KEYS
    asked = ("chats", "turns", "seed", "dtype", "page_size", "threads", "device")
    assert [answer[name] for name in asked] == [2, 1, 0, "float32", 16, 1, "cpu"]
    assert (answer["same_without_cache"], answer["is_right"]) == (2, True)


def test_both_runs_serve_the_same(report: DemoReport) -> None:
    ours, theirs = report.with_cache, report.without_cache
    assert ours.prompt_tokens == theirs.prompt_tokens
    assert ours.generated_tokens == theirs.generated_tokens == report.check.tokens
    assert ours.token_hit_rate == ours.cached_tokens / ours.prompt_tokens > 0.3
    assert theirs.cached_tokens == 0
    assert ours.leaked_pages == theirs.leaked_pages == 0
    assert (report.check.differing, report.same_without_cache, report.is_right) == (0, 3, True)
    assert report.speedup == pytest.approx(ours.tokens_per_second / theirs.tokens_per_second)


def test_memory_is_counted_in_pages(report: DemoReport) -> None:
    token = 4 * 2 * 32 * 2 * 4  # layers x heads x elements x (K, V) x bytes
    ours = report.with_cache
    assert report.paged_bytes == ours.peak_used_pages * 16 * token
    assert report.contiguous_bytes == ours.peak_running * report.max_seq_len * token
    assert report.memory_saved == 1 - report.paged_bytes / report.contiguous_bytes


def test_options_reach_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    answer = demo_json(
        capsys, "--page-size", "24", "--pages", "50", "--seed", "7", "--dtype", "float8_e4m3fn"
    )
    assert (answer["page_size"], answer["pages"], answer["seed"]) == (24, 50, 7)
    assert answer["is_right"]  # required only for float32 pages
    # One byte per element and a float32 scale per head.
    token = 4 * 2 * 2 * (32 + 4)
    assert answer["paged_bytes"] == answer["with_cache"]["peak_used_pages"] * 24 * token


# -- the table -----------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [80, 120])
def test_table_fits_the_terminal(report: DemoReport, width: int) -> None:
    out = io.StringIO()
    print_demo(report, Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(out.getvalue().split())
    assert (
        f"all {report.check.tokens:,} generated tokens equal a recomputation without a cache"
        in text
    )
    assert "3 chats of 2 turns" in text
    assert re.search(r"time in the manager │ +\d\.\d\d% │ +\d\.\d\d% │", text)


def test_piped_table_has_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "demo", *SMALL)
    assert "\x1b" not in out
    for words in ("served in", "tokens per second", "of them cached", "saved", "smallest margin"):
        assert words in " ".join(out.split())


def test_table_tells_how_much_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(shown(capsys, "demo", *SMALL, "--dtype", "float8_e4m3fn").split())
    assert re.search(r"\d+ of \d+ generated tokens \(\d\d\.\d%\) equal a recomputation", text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_sees_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["demo", *SMALL]) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert re.search(r"prefix cache .* [\d,]+ tokens/s, hits \d+%, pool \d+%, \d running", text)
    assert re.search(r"no prefix cache .*100%.* [\d,]+ tokens/s", text)
    assert re.search(r"check .*100%.*2 chats recomputed without a cache", text)


# -- wrong outputs -------------------------------------------------------------------------------
@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the cache with a cache that skips the second token of each step."""
    right = ops.append

    def skipping(inputs: Any, layer: Any, k: Any, v: Any, offsets: Any, **rest: Any) -> None:
        k = k.copy()
        k[1:2] = 0
        right(inputs, layer, k, v, offsets, **rest)

    monkeypatch.setattr(ops, "append", skipping)


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("how", [[], ["--json"]], ids=str)
def test_wrong_outputs_are_one_line_and_exit_1(
    capsys: pytest.CaptureFixture[str], how: list[str]
) -> None:
    assert main(["demo", *SMALL, *how]) == 1
    shown = capsys.readouterr()
    assert re.fullmatch(
        r"kvcore: error: \d+ of \d+ generated tokens differ from a recomputation without a cache: "
        r"token \d+ of chat \d is \d+, recomputed \d+ by a margin of \d\.\de[-+]\d\d\n",
        shown.err,
    )
    if how:
        assert json.loads(shown.out)["is_right"] is False


# -- bad input -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chats", "0"], "'--chats': expected 1 to 100000, got 0"),
        (["--turns", "-1"], "'--turns': expected 1 to 100, got -1"),
        (["--seed", "-1"], "'--seed': expected at least 0, got -1"),
        (["--dtype", "float64"], "'--dtype': dtype is 'float64', must be one of float32, "),
        (["--page-size", "0"], "'--page-size': expected 1 to 2147483647, got 0"),
        (["--pages", "0"], "'--pages': expected 1 to 2147483647, got 0"),
        (["--pages", "3"], "'--pages': 3 pages of 16 tokens hold no chat of "),
        (["--threads", "0"], "'--threads': expected 1 to 1024, got 0"),
        (["--threads", "two"], "'--threads'"),
        (["--device", "gpu"], "'--device': device is 'gpu', must be 'cpu', 'cuda' or 'cuda:<inde"),
        (["--device", "cuda:-1"], "'--device': device is 'cuda:-1', must be 'cpu', 'cuda' or"),
        (["--device", "pinned"], "'--device': device is 'pinned', must be 'cpu', 'cuda' or 'cuda"),
        (["chats"], "unexpected extra argument"),
        (["--fast"], "No such option"),
    ],
)
def test_bad_option_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert words in refused(capsys, "demo", *arguments)


@pytest.mark.skipif(availability.why_unavailable() == "", reason="there is a GPU")
def test_without_a_gpu_one_line_says_why_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "demo", "--device", "cuda:0", code=1)
    assert line == f"kvcore: error: CUDA unavailable: {availability.why_unavailable()}\n"


def test_import_of_the_package_leaves_the_demo_out() -> None:
    code = (
        "import sys, kvcore; sys.exit('kvcore.apps.demo' in sys.modules or 'rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
