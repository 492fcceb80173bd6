# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay`` with several policies or numbers of pages: JSON, table, bad values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cli_runs import refused, told
from kvcore.apps.cli.main import main
from kvcore.replay import POLICIES
from trace_files import random_rows, row, write_trace

ALL = ",".join(POLICIES)
TIMES = ("seconds", "_us_", "tokens_per_second")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = random_rows(7, requests=80, depth=6, fan_out=2)
    return str(write_trace(tmp_path, *rows))


def untimed(report: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in report.items() if not any(part in k for part in TIMES)}


def test_every_policy_is_replayed_with_every_number_of_pages(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    answer = told(
        capsys, "replay", trace, "--page-size", "512", "--pages", "12,9,100", "--policy", ALL
    )
    assert answer["policies"] == list(POLICIES)
    assert answer["pages"] == [9, 12, 100]
    assert (answer["mode"], answer["page_size"], answer["replicas"]) == ("admission", 512, 1)
    runs = [(each["policy"], each["pages"]) for each in answer["results"]]
    assert runs == [(policy, pages) for policy in POLICIES for pages in (9, 12, 100)]
    for each in answer["results"]:
        best = answer["optimum"][answer["pages"].index(each["pages"])]
        assert each["leaked_pages"] == 0
        assert (each["requests"], each["refused"]) == (best["requests"], best["refused"])
        assert 0 < each["cached_pages"] <= best["cached_pages"]
        for rate in ("token_hit_rate", "served_token_hit_rate", "page_hit_rate"):
            assert each[rate] <= best[rate]
    assert len({each["token_hit_rate"] for each in answer["results"]}) > 2


def test_each_result_is_that_of_a_replay_alone(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    for mode in ("admission", "online"):
        shared = (trace, "--mode", mode, "--page-size", "64", "--policy", POLICIES[-1])
        answer = told(capsys, "replay", *shared, "--pages", "90,200")
        for each in answer["results"]:
            alone = told(capsys, "replay", *shared, "--pages", str(each["pages"]))
            assert untimed(alone) == untimed(each) | {"assumptions": answer["assumptions"]}
            assert len(alone["assumptions"]) == 3
            assert alone["assumptions"][2].startswith("no request has a session: the policy hinted")


def test_one_pool_may_be_compared_for_several_policies(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    answer = told(
        capsys, "replay", trace, "--memory", "64MiB", "--model", "llama-3.1-8b", "--policy", ALL
    )
    assert answer["pages"] == [32]
    assert answer["policies"] == list(POLICIES)


def test_online_there_is_no_one_optimum(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    answer = told(capsys, "replay", trace, "--mode", "online", "--pages", "300,2000")
    assert answer["mode"] == "online"
    assert answer["optimum"] == []


def test_replicas_are_compared_with_one_pool_of_all_pages(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    sized = ("--replicas", "3", "--pages", "50,200", "--page-size", "128")
    answer = told(capsys, "replay", trace, *sized, "--policy", ALL)
    for each in answer["results"]:
        best = answer["optimum"][answer["pages"].index(each["pages"])]
        assert each["replicas"] == best["replicas"] == 3
        assert each["cached_tokens"] <= best["cached_tokens"]


def test_refused_requests_are_left_out_of_the_rate_of_those_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(write_trace(tmp_path, row([0, 1]), row([0, 2]), row([3, 4, 5])))
    sized = ("--mode", "admission", "--page-size", "512")
    answer = told(capsys, "replay", path, *sized, "--pages", "2")
    assert (answer["requests"], answer["refused"]) == (2, 1)
    assert answer["policy"] == "lru"
    assert answer["token_hit_rate"] == 1 / 7
    assert answer["served_token_hit_rate"] == 1 / 4
    (best,) = told(capsys, "replay", path, *sized, "--pages", "2,3")["optimum"][:1]
    assert (best["token_hit_rate"], best["served_token_hit_rate"]) == (1 / 7, 1 / 4)


def test_table_has_a_row_for_each_pool(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    assert main(["replay", trace, "--pages", "300,1200", "--policy", "lru"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "trace.jsonl, admission: token hit rate by pages of 16 tokens" in shown.out
    assert re.search(r"pages.*lru.*optimum", shown.out)
    rows = re.findall(r"│ +([\d,]+) │ +([\d.]+)% │ +([\d.]+)% │", shown.out)
    assert [pages for pages, *_ in rows] == ["300", "1,200"]
    assert all(float(rate) <= float(best) for _, rate, best in rows)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--policy", "belady"],
            f"'--policy': expected one or more of {', '.join(POLICIES)}, got 'bel",
        ),
        (["--policy", ""], "'--policy': expected one or more of "),
        (["--policy", "lru,"], "'--policy': expected one or more of "),
        (["--policy", "LRU"], "'--policy': expected one or more of "),
        (["--policy", "lru,lru"], "'--policy': expected each value once, got lru twice"),
        (["--pages", "10,x"], "'--pages': expected a whole number of pages, got 'x'"),
        (["--pages", "10,,20"], "'--pages': expected a whole number of pages, got ''"),
        (["--pages", "10,0"], "'--pages': expected 1 to 2147483647, got 0"),
        (["--pages", "10,1e3"], "'--pages': expected a whole number of pages, got '1e3'"),
        (["--pages", "10,20,10"], "'--pages': expected each value once, got 10 twice"),
        (["--pages", ",".join(map(str, range(1, 66)))], "expected at most 64 values, got 65"),
        (["--html", "no/such/folder/page.html"], "'--html': no/such/folder/page.html cannot be wr"),
    ],
)
def test_bad_value_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    # The trace does not exist: the arguments are checked before any file is read.
    line = refused(capsys, "replay", "no-such-trace", *arguments)
    assert line.startswith("kvcore: error: ")
    assert told in line


def test_pools_beyond_memory_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: str
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("kvcore.apps.replay.pool.PagedKVCacheManager", no_memory)
    told = refused(capsys, "replay", trace, "--pages", "100,2147483647")
    assert "need" in told
    assert "more memory than there is" in told


def test_a_pool_that_is_refused_is_told_before_the_others_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: str
) -> None:
    made: list[int] = []

    def refusing(*_: object, num_pages: int, **__: object) -> None:
        made.append(num_pages)
        raise ValueError("too large")

    monkeypatch.setattr("kvcore.apps.replay.pool.PagedKVCacheManager", refusing)
    told = refused(capsys, "replay", trace, "--pages", "100,9000", "--policy", ALL)
    assert "a pool of 9,000 pages of 16 tokens on each of 1 replicas: too large" in told
    assert made == [9000]


def test_prompts_of_too_many_pages_for_an_optimum_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: str
) -> None:
    monkeypatch.setattr("kvcore.apps.replay.uses.MOST_PAGE_USES", 100)
    told = refused(capsys, "replay", trace, "--pages", "100,200")
    assert "an optimum is computed for at most 100" in told
    assert main(["replay", trace, "--mode", "online", "--pages", "1000,2000"]) == 0
