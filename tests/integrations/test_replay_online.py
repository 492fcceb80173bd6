# SPDX-License-Identifier: Apache-2.0
"""Online mode: the virtual clock, preemption and cache hits of traces computed by hand."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore.replay import (
    ChatSettings,
    EngineSettings,
    PoolSettings,
    ReplayReport,
    Workload,
    chat_workload,
    read_trace,
    replay_online,
)
from trace_files import random_rows, row, write_trace

MEASURED = ("manager_seconds", "wall_seconds", "step_us", "request_us")
SLOW = {"prefill_rate": 1000.0, "decode_rate": 10.0, "chunk": 1000}


def serve(
    folder: Path,
    *rows: dict[str, Any],
    pages: int = 1000,
    page_size: int = 16,
    replicas: int = 1,
    **engine: Any,
) -> ReplayReport:
    workload = read_trace(write_trace(folder, *rows))
    pool = PoolSettings(page_size=page_size, pages=pages, replicas=replicas)
    report = replay_online(workload, pool, EngineSettings(**(SLOW | engine)))
    assert report.leaked_pages == 0
    assert report.requests + report.refused == len(rows)
    return report


def test_prompt_runs_in_chunks_and_then_one_token_per_step(tmp_path: Path) -> None:
    report = serve(tmp_path, row([0, 1], length=1000, output=5), chunk=600)
    # 600 + 400 prompt tokens, the second chunk gives the first token, then four decode steps.
    assert report.steps == 6
    assert report.first_token_s_p50 == pytest.approx(1.0)
    assert report.virtual_seconds == pytest.approx(1.4)
    assert report.output_tokens == 5


def test_prompts_share_a_step_with_each_other_and_with_decodes(tmp_path: Path) -> None:
    rows = [row([0, 1], length=600, output=3), row([2, 3], length=600, output=2)]
    report = serve(tmp_path, *rows)
    # Step 1: 600 + 400 tokens. Step 2: the other 200, and a token of the first. Step 3: both.
    assert report.steps == 3
    assert report.virtual_seconds == pytest.approx(1.0 + (0.2 + 0.1) + 0.1)
    assert report.first_token_s_p50 == pytest.approx((1.0 + 1.3) / 2)


def test_chunk_that_leaves_one_token_does_not_end_the_prompt(tmp_path: Path) -> None:
    report = serve(tmp_path, row([0], length=101, output=1), chunk=100)
    assert report.steps == 2
    assert report.first_token_s_p50 == pytest.approx(0.101)


def test_clock_jumps_to_the_next_arrival(tmp_path: Path) -> None:
    rows = [row([0], timestamp=60_000, length=100), row([1], timestamp=5_000, length=100)]
    report = serve(tmp_path, *rows)
    assert report.virtual_seconds == pytest.approx(60.1)
    assert report.first_token_s_p99 == pytest.approx(0.1)


def test_concurrency_counts_from_the_first_arrival(tmp_path: Path) -> None:
    def rows(start: float) -> list[dict[str, Any]]:
        return [row([n], timestamp=start, length=100, output=11) for n in range(3)]

    early, late = serve(tmp_path, *rows(0)), serve(tmp_path, *rows(3.6e6))
    assert early.concurrency == pytest.approx(3)
    assert late.concurrency == pytest.approx(early.concurrency)
    assert late.virtual_seconds == pytest.approx(3600 + early.virtual_seconds)


def test_mean_of_used_pages_counts_the_time_without_requests(tmp_path: Path) -> None:
    rows = [
        row([0], timestamp=5_000, length=150, output=5),
        row([1], timestamp=60_000, length=300, output=3),
        row([2], timestamp=70_000, length=20, output=40),
    ]
    report = serve(tmp_path, *rows)
    seconds = (0.15 + 0.4, 0.3 + 0.2, 0.02 + 3.9)
    assert report.virtual_seconds == pytest.approx(70 + seconds[2])
    # The third request needs 2 to 4 pages: 32 tokens end after 13 steps, 48 tokens after 29 steps.
    used = 10 * seconds[0] + 19 * seconds[1] + np.array([2, 4]) * seconds[2]
    least, most = used / (65 + seconds[2])
    assert least <= report.mean_used_pages <= most
    assert report.peak_used_pages == 19


def test_concurrency_makes_later_requests_wait(tmp_path: Path) -> None:
    rows = [row([n], length=100, output=11) for n in range(3)]
    report = serve(tmp_path, *rows, concurrency=1)
    assert report.virtual_seconds == pytest.approx(3 * (0.1 + 1.0))
    assert report.first_token_s_p50 == pytest.approx(1.1 + 0.1)


def test_several_tokens_per_step_while_no_prompt_runs(tmp_path: Path) -> None:
    rows = [row([0], length=100, output=7), row([1], length=100, output=3)]
    report = serve(tmp_path, *rows, decode_steps=4)
    # After both prompts: 6 and 2 tokens are left, a step of 4 and another step of 4.
    assert report.steps == 3
    assert report.virtual_seconds == pytest.approx(0.2 + 2 * 0.4)
    assert report.output_tokens == 10


def test_newest_request_is_preempted_and_served_later(tmp_path: Path) -> None:
    rows = [row([n], length=4, output=8) for n in range(2)]
    report = serve(tmp_path, *rows, page_size=4, pages=4)
    # Both hold two pages when each needs a third, after five tokens. The second is preempted, the
    # first takes one of its pages and ends in three steps. The second resumes, finds its first
    # page, runs five tokens again for its sixth and two more steps.
    assert (report.requests, report.preemptions, report.evicted_pages) == (2, 1, 2)
    assert report.recomputed_tokens == 4
    assert report.peak_used_pages == 4
    assert report.steps == 5 + 3 + 1 + 2
    assert report.virtual_seconds == pytest.approx(0.008 + 4 * 0.1 + 3 * 0.1 + 0.005 + 2 * 0.1)
    assert report.cached_tokens == 0


def test_look_ahead_goes_before_anyone_is_preempted(tmp_path: Path) -> None:
    rows = [row([n], length=4, output=4) for n in range(2)]
    report = serve(tmp_path, *rows, page_size=4, pages=4, decode_steps=8)
    assert report.preemptions == 0
    assert report.steps == 1 + 3


def test_request_larger_than_the_pool_is_refused_and_counts(tmp_path: Path) -> None:
    fits, too_long = row([0], length=60, output=5), row([1], length=60, output=6)
    report = serve(tmp_path, fits, too_long, page_size=16, pages=4)
    assert (report.requests, report.refused) == (1, 1)
    assert (report.prompt_tokens, report.served_prompt_tokens) == (120, 60)
    assert report.prompt_pages == 8


def one_conversation() -> Workload:
    workload = chat_workload(seed=0, settings=ChatSettings(conversations=1, mean_turns=8))
    assert len(workload) > 3
    return workload


def test_one_conversation_finds_all_it_wrote() -> None:
    workload = one_conversation()
    report = replay_online(workload, PoolSettings(page_size=1, pages=100_000))
    said = workload.prompt_lengths + workload.output_lengths
    # All tokens of an answer except the last, which never ran.
    assert report.cached_tokens == int((said[:-1] - 1).sum())


def test_next_turn_comes_after_the_answer() -> None:
    workload = one_conversation()
    engine = EngineSettings(decode_rate=5.0, prefill_rate=1e9)
    report = replay_online(workload, PoolSettings(), engine)
    answers = (workload.output_lengths - 1).sum() / 5.0
    want = workload.arrivals[0] + workload.think_times.sum() + answers
    assert report.virtual_seconds == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("page_size", [1, 16, 100, 512])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("decode_steps", [1, 5])
def test_too_few_pages_serve_everything_and_leak_nothing(
    tmp_path: Path, page_size: int, replicas: int, decode_steps: int
) -> None:
    rows = random_rows(7, requests=60, depth=4, fan_out=2)
    largest = max(r["input_length"] + r["output_length"] for r in rows)
    pages = -(-largest // page_size)
    report = serve(
        tmp_path,
        *rows,
        page_size=page_size,
        pages=pages,
        replicas=replicas,
        decode_steps=decode_steps,
        chunk=300,
    )
    assert (report.requests, report.refused) == (60, 0)
    assert report.output_tokens == sum(r["output_length"] for r in rows)
    assert 0 < report.mean_used_pages <= report.peak_used_pages <= report.total_pages


def test_same_seed_same_report_but_for_the_measured_times() -> None:
    def run() -> dict[str, Any]:
        workload = chat_workload(seed=9, limit=150)
        report = replay_online(workload, PoolSettings(pages=2000))
        return {k: v for k, v in asdict(report).items() if not k.startswith(MEASURED)}

    first = run()
    assert first == run()
    assert first["preemptions"] > 0
    assert first["evicted_pages"] > 0
    assert first["cached_tokens"] > 0


def test_outputs_are_the_workload_s_own_tokens() -> None:
    workload = chat_workload(seed=2, limit=20)
    assert all(len(workload.output(i)) == n for i, n in enumerate(workload.output_lengths))
    assert np.issubdtype(workload.output(0).dtype, np.int32)
