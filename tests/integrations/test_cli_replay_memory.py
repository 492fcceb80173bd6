# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay`` in GiB: sizes of pools and tiers, rows, the decision, saved time, refusals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli_runs import refused, shown, told
from kvcore.replay import chat_workload
from trace_files import random_rows, write_trace

GIB = 1 << 30
SHAPE = ("--page-size", "512", "--bytes-per-token", str(GIB // 512))  # a page is 1 GiB


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = random_rows(7, requests=80, depth=6, fan_out=2)
    return str(write_trace(tmp_path, *rows))


def test_sizes_and_pages_are_the_same_replays(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    policies = ("--policy", "lru,arc")
    by_size = told(capsys, "replay", trace, *SHAPE, *policies, "--memory", "9GiB,12GiB,100GiB")
    by_pages = told(capsys, "replay", trace, *SHAPE, *policies, "--pages", "9,12,100")
    bare = told(capsys, "replay", trace, "--page-size", "512", *policies, "--pages", "9,12,100")
    assert by_size["pages"] == by_pages["pages"] == bare["pages"] == [9, 12, 100]
    assert by_size["memory"] == [9 * GIB, 12 * GIB, 100 * GIB] == by_pages["memory"]
    assert by_size["replays"] == 6
    assert "memory" not in bare
    for rows in zip(by_size["results"], by_pages["results"], bare["results"], strict=True):
        assert len({each["token_hit_rate"] for each in rows}) == 1
        assert rows[0]["memory_gib"] == rows[0]["pages"] == rows[1]["memory_gib"]
        assert rows[0]["evicted_gib"] == rows[0]["evicted_pages"]
        assert rows[0]["peak_used_gib"] == rows[0]["peak_used_pages"]
        assert "memory_gib" not in rows[2]
    assert [each["memory_gib"] for each in by_size["optimum"]] == [9, 12, 100]


def test_a_model_and_a_dtype_size_a_page(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    sized = ("--page-size", "512", "--model", "llama-3.1-8b", "--pages", "32,64")
    assert told(capsys, "replay", trace, *sized)["memory"] == [2 * GIB, 4 * GIB]
    assert told(capsys, "replay", trace, *sized, "--dtype", "int8")["memory"] == [GIB, 2 * GIB]


def test_every_table_has_memory_beside_pages(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    out = shown(capsys, "replay", trace, *SHAPE, "--memory", "9GiB,12GiB", "--prefill-speed", "1e4")
    assert re.search(r"pages +┃ +memory ┃ +lru ┃ +optimum", out)
    assert re.search(r"│ +9 │ +9 GiB │ +[\d.]+% │", out)
    assert re.search(r"│ +12 │ +12 GiB │ lru +│ +[\d.]+ s │", out)
    one = shown(capsys, "replay", trace, *SHAPE, "--memory", "9GiB", "--mode", "admission")
    assert "1 x 9 pages of 512 tokens, 9 GiB, lru" in one
    assert re.search(r"peak occupancy +│ +[\d.]+% │ 6 pages, 6 GiB", one)


def test_a_router_has_memory_too(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    arguments = (
        "replay",
        trace,
        *SHAPE,
        "--memory",
        "18GiB",
        "--replicas",
        "2",
        "--route",
        "prefix",
    )
    (found,) = told(capsys, *arguments)["results"]
    assert (found["pages"], found["memory_gib"], found["page_bytes"]) == (9, 9, GIB)
    assert "2 x 9 pages of 512 tokens, 9 GiB each" in shown(capsys, *arguments)


def test_the_last_line_is_the_decision(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    arguments = ("replay", trace, *SHAPE, "--memory", "9GiB,12GiB,100GiB", "--policy", "lru,fifo")
    out = shown(capsys, *arguments)
    decision = told(capsys, *arguments)["decision"]
    assert out.splitlines()[-1] == decision["text"]
    assert re.match(
        r"95% of the best hit rate \([\d.]+% with no evictions\) from \d+ GiB on",
        out.splitlines()[-1],
    )
    assert decision["memory_gib"] == decision["pages"]


def test_each_combination_of_tiers_is_a_row(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    swept = ("--memory", "9GiB,20GiB", "--host-memory", "0,12GiB,30GiB", "--disk", "0,100GiB")
    answer = told(capsys, "replay", trace, *SHAPE, *swept)
    tiers = [(0, 0), (12, 0), (12, 100), (30, 0), (30, 100)]
    assert [(each["host_pages"], each["disk_pages"]) for each in answer["tiers"]] == tiers
    assert answer["replays"] == 10 == len(answer["results"])
    found = [
        (each["tiers"]["host_gib"], each["tiers"]["disk_gib"], each["memory_gib"])
        for each in answer["results"]
        if each["tiers"] is not None
    ]
    assert found == [(*tier, memory) for tier in tiers[1:] for memory in (9, 20)]
    alone = ("--memory", "9GiB,20GiB", "--host-memory", "12GiB", "--disk", "100GiB")
    (first, second) = told(capsys, "replay", trace, *SHAPE, *alone)["results"]
    both = [each for each in answer["results"] if each["curve"] == "lru 12 GiB host + 100 GiB disk"]
    assert [each["cached_tokens"] for each in both] == [
        first["cached_tokens"],
        second["cached_tokens"],
    ]
    out = shown(capsys, "replay", trace, *SHAPE, *swept)
    assert "5 combinations of tiers, 10 replays" in " ".join(out.split())
    rows = re.findall(r"│ +(9|20) │ +\1 GiB │ +(?:(\d+) GiB)? │ +(?:(\d+) GiB)? │ +[\d.]+% │", out)
    assert rows == [
        (pages, str(host or ""), str(disk or "")) for pages in ("9", "20") for host, disk in tiers
    ]
    pages = told(
        capsys, "replay", trace, "--page-size", "512", "--pages", "9,20", "--host-pages", "0,12"
    )
    assert [each["curve"] for each in pages["results"]] == ["lru device only"] * 2 + [
        "lru 12 host"
    ] * 2


def test_saved_time_is_found_tokens_over_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("replay", "--limit", "60", "--mode", "admission", "--prefill-speed", "2000")
    answer = told(capsys, *arguments)
    assert answer["saved_seconds"] == {
        name: tokens / 2000 for name, tokens in answer["hit_tokens"].items()
    }
    assert answer["hit_tokens"]["mean"] == answer["cached_tokens"] / len(chat_workload(limit=60))
    out = shown(capsys, *arguments)
    assert "an estimate at 2,000 tokens/s" in out
    compared = told(capsys, *arguments, "--pages", "100,4000")
    assert [list(each["saved_seconds"]) for each in compared["results"]] == [
        ["mean", "p50", "p95"]
    ] * 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--bytes-per-token", "9"], "expected --pages, or --memory together with --model"),
        (["--bytes-per-token", "0", "--pages", "9"], "expected 1 to 1073741824, got 0"),
        (
            ["--bytes-per-token", "9", "--model", "llama-3.1-8b", "--pages", "9"],
            "expected --model or --bytes-per-token, not both",
        ),
        (["--dtype", "int8", "--pages", "9"], "'--dtype': expected --model or --groups"),
        (["--dtype", "int9", "--model", "llama-3.1-8b", "--pages", "9"], "'--dtype': dtype is"),
        (["--host-memory", "1GiB", "--pages", "9"], "expected --model or --bytes-per-token with"),
        ([*SHAPE, "--pages", "9", "--host-memory", "1MiB"], "'--host-memory': expected room for 1"),
        ([*SHAPE, "--pages", "9", "--host-memory", "0"], "'--host-memory': expected room for 1"),
        ([*SHAPE, "--pages", "9", "--host-memory", "x"], "'--host-memory': expected a size"),
        ([*SHAPE, "--pages", "9", "--disk", "9GiB"], "or --host-memory with --disk"),
        (
            [*SHAPE, "--pages", "9", "--host-memory", "9GiB", "--host-pages", "9"],
            "expected --host-pages or --host-memory, not both",
        ),
        (["--pages", "9", "--host-pages", "0,x"], "'--host-pages': expected a whole number"),
        (
            [
                *("--pages", ",".join(map(str, range(1, 61)))),
                *("--host-pages", ",".join(map(str, range(60)))),
            ],
            "expected at most 1,024 replays, got 3,600: 1 policies x 3,600 sizes",
        ),
        (
            ["--prefill-speed", "9", "--route", "prefix", "--replicas", "2"],
            "'--prefill-speed': expected no --route",
        ),
        (["--prefill-speed", "0"], "'--prefill-speed': expected at least 1, got 0"),
    ],
)
def test_bad_sizes_are_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    # The trace does not exist: the arguments are checked before any file is read.
    assert told in refused(capsys, "replay", "no-such-trace", *arguments)
