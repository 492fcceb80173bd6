# SPDX-License-Identifier: Apache-2.0
"""The timeline of a replay: every sample is in its bin, and the sums equal the report's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvcore.replay import (
    EngineSettings,
    PoolSettings,
    Timeline,
    chat_workload,
    compare,
    read_trace,
    replay_admission,
    replay_online,
)
from trace_files import BLOCK, row, write_trace


def test_a_part_has_its_own_samples() -> None:
    timeline = Timeline()
    for now, prompt, hit in ((0.0, 10, 0), (4.9, 30, 20), (5.1, 10, 10), (10.0, 10, 5)):
        timeline.add_request(now, prompt, hit)
    for now, spent in ((1.0, 1_000), (2.0, 3_000), (9.0, 50_000)):
        timeline.add_step(now, spent)
    timeline.add_pages(3.0, used=2, cached=6)
    timeline.add_pages(4.0, used=4, cached=6)
    bins = timeline.binned(2)
    assert bins.ends == [5.0, 10.0]
    assert bins.hit_rates == [0.5, 0.75]
    assert bins.step_us_p50 == [2.0, 50.0]
    assert bins.step_us_p99 == [pytest.approx(2.98), 50.0]
    assert bins.used_pages[0] == 3.0
    assert math.isnan(bins.used_pages[1])
    assert bins.cached_pages[0] == 6.0


def test_there_are_no_more_parts_than_samples() -> None:
    timeline = Timeline()
    assert timeline.binned(10).ends == []
    timeline.add_step(7.0, 2_000)
    bins = timeline.binned(10)
    assert (bins.ends, bins.step_us_p50) == ([7.0], [2.0])
    assert math.isnan(bins.hit_rates[0])


def test_admission_is_taken_down_request_by_request(tmp_path: Path) -> None:
    rows = [row([0, 1]), row([0, 1, 2]), row([0, 1, 2, 3, 4, 5]), row([7, 8, 9])]
    timeline = Timeline()
    replay_admission(
        read_trace(write_trace(tmp_path, *rows)),
        PoolSettings(page_size=BLOCK, pages=4),
        timeline=timeline,
    )
    bins = timeline.binned(4)
    assert bins.hit_rates == [0.0, 2 / 3, 0.0, 0.0]
    assert bins.used_pages == [2, 3, 0, 3]  # the third is refused
    assert bins.cached_pages == [2, 3, 3, 4]
    assert all(spent > 0 for spent in bins.step_us_p50)


def test_online_has_the_sums_of_the_report() -> None:
    workload = chat_workload(seed=4, limit=300)
    timeline = Timeline()
    pool = PoolSettings(pages=2_000)
    report = replay_online(workload, pool, EngineSettings(), timeline=timeline)
    whole = timeline.binned(1)
    assert whole.ends[0] == pytest.approx(report.virtual_seconds)
    assert whole.hit_rates == [report.served_token_hit_rate]
    assert whole.step_us_p50 == [pytest.approx(report.step_us_p50)]
    assert 0 < whole.used_pages[0] <= report.peak_used_pages
    assert 0 < whole.cached_pages[0] <= 2_000


def test_progress_counts_the_requests_of_all_replays() -> None:
    told: list[int] = []
    workload = chat_workload(seed=4, limit=100)
    pools = [PoolSettings(pages=pages) for pages in (500, 4_000)]
    compare(workload, pools, ["lru"], on_progress=told.append)
    assert told == [0, 64, 100, 164, 200, 264]


def test_pools_are_compared_in_the_order_of_their_size() -> None:
    pools = [PoolSettings(pages=pages) for pages in (4_000, 500)]
    comparison = compare(chat_workload(seed=4, limit=50), pools, ["lru"])
    assert comparison.pages == (500, 4_000)
    assert [run.report.pages for run in comparison.of("lru")] == [500, 4_000]
    assert [best.pages for best in comparison.optima] == [500, 4_000]
