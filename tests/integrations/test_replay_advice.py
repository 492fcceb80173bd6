# SPDX-License-Identifier: Apache-2.0
"""``kvcore replay --advice``: the advice of a manager beside exact hit rates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cli_runs import refused, told
from kvcore.apps.cli.main import main
from kvcore.replay import PoolError, PoolSettings, chat_workload, check_advice, optimum, page_uses
from trace_files import row, write_trace

MOST_POINTS = 1.5


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [row([0, n % 7], timestamp=n * 50, output=20) for n in range(60)]
    return str(write_trace(tmp_path, *rows))


def test_one_page_in_64_estimates_within_one_and_a_half_points() -> None:
    calls: list[int] = []
    workload = chat_workload(seed=0, limit=6000)
    pool = PoolSettings(page_size=16, pages=10_000, advice=64)
    check = check_advice(workload, pool, on_progress=calls.append)
    assert check.advice.sample == 64
    assert check.advice.admissions == 6000
    assert [rate.policy for rate in check.rates] == ["lru"] * 4 + ["optimum"]
    assert [rate.pages for rate in check.rates] == [5_000, 10_000, 20_000, 40_000, 10_000]
    exact = [rate.exact for rate in check.rates]
    assert exact[:4] == sorted(exact[:4])
    assert exact[0] + 0.2 < exact[3]
    assert exact[1] == check.report.token_hit_rate
    best = optimum(page_uses(workload, 16), 10_000)
    assert exact[4] == best.token_hit_rate > exact[1] + 0.1
    assert max(abs(rate.error_points) for rate in check.rates) <= MOST_POINTS
    assert calls == sorted(calls)
    assert len(workload) * 5 < calls[-1] < len(workload) * 6


def test_all_pages_leave_only_the_error_of_partial_pages() -> None:
    pool = PoolSettings(page_size=16, pages=2_000, advice=1)
    check = check_advice(chat_workload(seed=1, limit=200), pool)
    assert check.advice.sample == 1
    assert np.abs([rate.error_points for rate in check.rates]).max() < 0.5


def test_long_workloads_are_sampled_less() -> None:
    pool = PoolSettings(page_size=16, pages=2_000, advice=1)
    check = check_advice(chat_workload(seed=1, limit=3000), pool)
    assert check.advice.sample == 16
    assert check.advice.admissions == 3000


def test_json_has_the_rates_and_the_errors(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    answer = told(
        capsys, "replay", trace, "--advice", "--advice-sample", "1", "--pages", "200", "--json"
    )
    assert answer["mode"] == "admission"
    advice = answer["advice"]
    assert (advice["sample"], advice["admissions"]) == (1, 60)
    assert [rate["factor"] for rate in advice["rates"]] == [0.5, 1, 2, 4, 1]
    for rate in advice["rates"]:
        assert rate["error_points"] == 100 * (rate["estimate"] - rate["exact"])
        assert "memory_gib" not in rate
    assert advice["rates"][1]["exact"] == answer["token_hit_rate"]


def test_json_has_gib_if_the_bytes_are_known(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    options = ("--advice", "--pages", "1024", "--bytes-per-token", "65536", "--json")
    answer = told(capsys, "replay", trace, *options)
    assert [rate["memory_gib"] for rate in answer["advice"]["rates"]] == [0.5, 1, 2, 4, 1]


def test_the_table_has_a_row_for_each_size(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    main(["replay", trace, "--advice", "--pages", "200"])
    text = capsys.readouterr().out
    for cell in ("100 (0.5x)", "200 (1x)", "400 (2x)", "800 (4x)", "optimum", "error, points"):
        assert cell in text


@pytest.mark.parametrize(
    "options",
    [
        ("--policy", "lru,lfu"),
        ("--pages", "100,200"),
        ("--host-pages", "100"),
        ("--mode", "online"),
        ("--route", "prefix"),
        ("--html", "page.html"),
        ("--groups", "gemma-3-27b"),
    ],
)
def test_advice_is_for_one_plain_pool(
    capsys: pytest.CaptureFixture[str], trace: str, options: tuple[str, ...]
) -> None:
    assert "--advice" in refused(capsys, "replay", trace, "--advice", *options)


@pytest.mark.parametrize("sample", ["0", "3", "-1"])
def test_a_sample_is_a_power_of_two(
    capsys: pytest.CaptureFixture[str], trace: str, sample: str
) -> None:
    text = refused(capsys, "replay", trace, "--advice", "--advice-sample", sample)
    assert "--advice-sample" in text
    assert sample in text


def test_a_pool_with_tiers_is_refused() -> None:
    pool = PoolSettings(page_size=16, pages=100, host_pages=10, advice=1)
    with pytest.raises(PoolError, match="expected a pool without tiers"):
        check_advice(chat_workload(seed=0, limit=10), pool)
