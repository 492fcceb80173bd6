# SPDX-License-Identifier: Apache-2.0
"""Sessions with sub-agents: their order in an online replay, and in kvcore's form."""

from __future__ import annotations

import heapq
import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvcore.apps.replay.arrivals import ArrivalQueue
from kvcore.apps.traces.canonical import write_trace
from kvcore.apps.traces.read import load_trace
from kvcore.apps.traces.read_options import ReadOptions
from kvcore.replay import EngineSettings, PoolSettings, Workload, read_trace, replay_online

ANSWER = 7.0  # seconds of every answer
Entry = dict[str, Any]


def request(think: float, number: int) -> Entry:
    """Return a request with a length of its own, by which the workload names it."""
    return {"t": 0.0, "in": number, "out": 1, "hash_ids": [number], "think_time": think}


def agent(*entries: Entry) -> Entry:
    return {"type": "subagent", "t": 0.0, "requests": list(entries)}


def document(*entries: Entry) -> Entry:
    return {"id": "x", "block_size": 1 << 20, "requests": list(entries)}


def random_entries(rng: random.Random, count: list[int], depth: int) -> list[Entry]:
    """Draw requests and nested sub-agents; a session begins with a request."""
    entries = []
    for at in range(rng.randint(1, 5)):
        if depth < 3 and (at or depth) and rng.random() < 0.5:
            entries.append(agent(*random_entries(rng, count, depth + 1)))
        else:
            count[0] += 1
            entries.append(request(rng.choice([0.0, 1.5, 30.0]), count[0]))
    return entries


def begins(entries: list[Entry], ready: float, found: dict[int, float]) -> float:
    """Write down when each request begins, by its length; return the time of the last answer.

    An engine without limits answers every request after `ANSWER` seconds.
    """
    ended = ready
    for entry in entries:
        if entry.get("type") == "subagent":
            ended = max(ended, begins(entry["requests"], ready, found))
        else:
            found[entry["in"]] = ended + entry["think_time"]
            ready = ended = found[entry["in"]] + ANSWER
    return ended


def simulated(workload: Workload) -> dict[int, float]:
    """Answer every request after `ANSWER` seconds; return the arrivals by length."""
    queue = ArrivalQueue(
        workload.arrivals, workload.next_turns, workload.think_times, workload.waits
    )
    answers: list[tuple[float, int]] = []
    found = {}
    while len(queue) or answers:
        if answers and answers[0][0] <= queue.next_time:
            now, index = heapq.heappop(answers)
            queue.answered(index, now)
        else:
            now, index = queue.pop()
            found[int(workload.prompt_lengths[index])] = now
            heapq.heappush(answers, (now + ANSWER, index))
    return found


def read(folder: Path, *entries: Entry) -> Workload:
    path = folder / "session.json"
    path.write_text(json.dumps(document(*entries)), encoding="utf-8")
    return read_trace(path)


def test_a_parent_waits_for_its_sub_agents(tmp_path: Path) -> None:
    both = agent(request(1, 2), request(0, 3)), agent(request(5, 4))
    workload = read(tmp_path, request(0, 1), *both, request(2, 5))
    # 1 ends at 7; 2 begins at 8 and 3 at 15, which ends at 22; 4 begins at 12 and ends at 19.
    assert simulated(workload) == {1: 0, 2: 8, 3: 15, 4: 12, 5: 24}
    order = [int(workload.prompt_lengths[i]) for i in range(5)]
    pairs = {(order[a], order[b]) for a, b in workload.waits.tolist()}
    assert pairs == {(2, 1), (4, 1), (5, 3), (5, 4)}
    assert "2 sub-agents: begins after the answer" in " ".join(workload.assumptions)


@pytest.mark.parametrize("seed", range(40))
def test_nested_sub_agents_begin_and_end_with_their_parents(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    entries = random_entries(rng, [0], 0)
    if entries[0].get("type") == "subagent":
        entries.insert(0, request(0, 1000))
    expected: dict[int, float] = {}
    begins(entries, -entries[0]["think_time"], expected)
    assert simulated(read(tmp_path, *entries)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_the_form_of_kvcore_keeps_the_waits(tmp_path: Path, seed: int) -> None:
    entries = [request(0, 1000), *random_entries(random.Random(seed), [0], 1)]
    read(tmp_path, *entries)
    trace = load_trace(str(tmp_path / "session.json"), ReadOptions())
    write_trace(trace, tmp_path / "out.jsonl")
    again = read_trace(tmp_path / "out.jsonl")
    assert sorted(again.waits.tolist()) == sorted(trace.workload().waits.tolist())
    assert simulated(again) == simulated(trace.workload())


def test_an_engine_serves_sub_agents(tmp_path: Path) -> None:
    entries = [request(0, 1000), *random_entries(random.Random(3), [0], 1)]
    workload = read(tmp_path, *entries)
    assert len(workload.waits) > 0
    report = replay_online(workload, PoolSettings(pages=40), EngineSettings(concurrency=2))
    assert report.requests + report.refused == len(workload)
    assert report.refused > 0  # a refused request is answered at once


def test_without_think_times_requests_keep_their_times(tmp_path: Path) -> None:
    rows = [{"t": float(n), "in": n + 1, "out": 1, "hash_ids": [n]} for n in range(4)]
    workload = read(tmp_path, rows[0], agent(rows[1], rows[2]), rows[3])
    assert simulated(workload) == {1: 0, 2: 1, 3: 2, 4: 3}
    first = read(tmp_path, agent(request(3, 9) | {"t": 4.0}), request(1, 8))
    assert simulated(first) == {9: 4, 8: 12}


def test_a_sub_agent_may_be_empty(tmp_path: Path) -> None:
    first = read(tmp_path, agent(), request(3, 1), agent(agent()), request(1, 2))
    assert simulated(first) == {1: 0, 2: 8}
    assert len(first.waits) == 0


def test_a_limit_may_cut_a_sub_agent(tmp_path: Path) -> None:
    entries = [request(0, 1), agent(request(1, 2), request(0, 3)), request(2, 4)]
    read(tmp_path, *entries)
    for limit in (1, 2, 3, 4):
        workload = read_trace(tmp_path / "session.json", limit=limit)
        assert len(simulated(workload)) == limit == len(workload)
