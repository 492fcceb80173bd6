# SPDX-License-Identifier: Apache-2.0
"""Hints of a replay: from the recorded times of sessions to the policy ``hinted``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcore.apps.replay.hints import HINTS, VirtualClock, return_hints
from kvcore.replay import (
    EngineSettings,
    PoolSettings,
    chat_workload,
    compare,
    read_trace,
    replay_admission,
    replay_online,
)

BLOCK = 64
AGENTS = Path(__file__).parents[3] / "bench" / "agent_sessions.py"


def trace(path: Path, rows: list[tuple[str | None, float, list[int]]]) -> Any:
    """Read a trace of sessions: session, seconds, blocks of 64 tokens."""
    with path.open("w") as file:
        for session, seconds, blocks in rows:
            row: dict[str, Any] = {"timestamp": seconds * 1000, "hash_ids": blocks}
            row |= {"input_length": len(blocks) * BLOCK, "output_length": 1}
            file.write(json.dumps(row if session is None else row | {"session_id": session}) + "\n")
    return read_trace(path)


ROWS: list[tuple[str | None, float, list[int]]] = [
    ("a", 0, [1, 2]),
    ("b", 10, [3, 4]),
    ("a", 60, [1, 2, 5]),
    (None, 61, [6, 7]),
    ("b", 100, [3, 4, 8]),
    ("a", 700, [1, 2, 5, 9]),
]


@pytest.mark.parametrize(
    ("kind", "hints"),
    [
        ("exact", [60, 90, 640, None, "never", "never"]),
        ("class", ["soon", "later", None, None, "never", "never"]),
        ("closed", [None, None, None, None, "never", "never"]),
        ("none", [None] * 6),
    ],
)
def test_hints_come_from_the_times_of_a_session(tmp_path: Path, kind: str, hints: Any) -> None:
    assert kind in HINTS
    assert return_hints(trace(tmp_path / "trace.jsonl", ROWS), kind) == hints


def test_chats_return_with_their_next_turn() -> None:
    workload = chat_workload(limit=50)
    hints = return_hints(workload, "closed")
    assert [hint == "never" for hint in hints] == (workload.next_turns < 0).tolist()
    exact = return_hints(workload, "exact")
    assert all(hint == "never" or (isinstance(hint, float) and hint >= 0) for hint in exact)


def test_a_replay_keeps_the_pages_of_the_session_that_returns(tmp_path: Path) -> None:
    workload = trace(
        tmp_path / "trace.jsonl",
        [
            ("a", 0, [1, 2]),
            ("b", 10, [3, 4]),
            ("c", 20, [5, 6]),
            ("a", 30, [1, 2, 7]),
            ("c", 900, [5, 6, 8]),
        ],
    )

    def cached(policy: str, hints: str) -> int:
        pool = PoolSettings(page_size=BLOCK, pages=4, policy=policy, hints=hints)
        return replay_admission(workload, pool).cached_pages

    assert cached("lru", "exact") == cached("hinted", "none") == 1
    assert cached("hinted", "closed") == cached("hinted", "exact") == 3


def test_a_comparison_has_hints() -> None:
    workload = chat_workload(limit=300)
    pools = [PoolSettings(pages=pages, hints="exact") for pages in (500, 1000)]
    found = compare(workload, pools, ["lru", "hinted"])
    for lru, hinted, best in zip(found.of("lru"), found.of("hinted"), found.optima, strict=True):
        assert lru.report.cached_tokens < hinted.report.cached_tokens <= best.cached_tokens


def test_an_online_replay_has_hints() -> None:
    workload = chat_workload(limit=300)
    engine = EngineSettings(concurrency=8)
    found = {
        hints: replay_online(
            workload, PoolSettings(pages=2000, policy="hinted", hints=hints), engine
        )
        for hints in HINTS
    }
    assert found["closed"].requests == len(workload)
    assert found["closed"].cached_tokens > found["none"].cached_tokens


def test_a_virtual_clock_stays_in_the_bounds_of_a_manager() -> None:
    clock = VirtualClock()
    for now, shown in ((-1.0, 0.0), (5.0, 5.0), (1e300, 8e9)):
        clock.now = now
        assert clock() == shown


def test_the_generator_of_agent_sessions_writes_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "agents.jsonl"
    for _ in range(2):
        subprocess.run([sys.executable, AGENTS, path, "--sessions", "12"], check=True)
        workload = read_trace(path)
        assert (len(workload), int(workload.prompt_lengths.sum())) == (184, 5_372_352)
    pools = [PoolSettings(page_size=BLOCK, pages=1500, hints="exact")]
    found = compare(workload, pools, ["lru", "hinted"])
    (lru,), (hinted,) = found.of("lru"), found.of("hinted")
    assert lru.report.cached_tokens < hinted.report.cached_tokens <= found.optima[0].cached_tokens
