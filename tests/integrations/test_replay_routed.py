# SPDX-License-Identifier: Apache-2.0
"""Prompts that a router sends to many workers."""

import json
from pathlib import Path

import pytest

from cli_runs import refused, shown, told
from kvcore.replay import (
    EngineSettings,
    PoolError,
    PoolSettings,
    chat_workload,
    read_trace,
    replay_admission,
    replay_routed,
)
from kvcore.routing import POLICIES


@pytest.mark.parametrize("route", POLICIES)
def test_one_worker_finds_what_admission_finds(route: str) -> None:
    workload = chat_workload(limit=200)
    pool = PoolSettings(pages=2_000)
    plain, routed = replay_admission(workload, pool), replay_routed(workload, pool, route)
    assert routed.cached_tokens == plain.cached_tokens
    assert routed.token_hit_rate == plain.token_hit_rate
    assert (routed.requests, routed.refused) == (plain.requests, plain.refused)
    assert routed.imbalance == 1.0
    assert routed.idle_replicas == 0


@pytest.mark.parametrize("route", POLICIES)
def test_tokens_are_cached_or_computed(route: str) -> None:
    found = replay_routed(chat_workload(limit=150), PoolSettings(pages=2_000, replicas=5), route)
    assert found.refused == 0
    assert found.cached_tokens + found.computed_tokens == found.prompt_tokens
    assert found.imbalance >= 1.0


def _trace(tmp_path: Path, prompts: list[list[int]]) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 0,
            "input_length": 512 * len(ids),
            "output_length": 1_000,
            "hash_ids": ids,
        }
        for ids in prompts
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_what_policies_do(tmp_path: Path) -> None:
    """Four equal prompts at the same time: one worker for all, or one worker for each."""
    workload = read_trace(_trace(tmp_path, [[1, 2, 3]] * 4))
    pool = PoolSettings(page_size=512, pages=100, replicas=4)
    prefix = replay_routed(workload, pool, "prefix")
    assert (prefix.idle_replicas, prefix.imbalance) == (3, 4.0)
    assert prefix.cached_tokens > 0
    for route in ("round-robin", "least-loaded"):
        spread = replay_routed(workload, pool, route)
        assert (spread.idle_replicas, spread.imbalance, spread.cached_tokens) == (0, 1.0, 0)


def test_load_ends_with_the_output(tmp_path: Path) -> None:
    """A slow engine keeps the first request as load; a fast one has ended it."""
    path = _trace(tmp_path, [[1, 2], [1, 2]])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["timestamp"] = 10_000
    path.write_text("\n".join(map(json.dumps, rows)))
    workload = read_trace(path)
    pool = PoolSettings(page_size=512, pages=10, replicas=2)
    slow = replay_routed(workload, pool, "prefix+load", EngineSettings(decode_rate=10.0))
    fast = replay_routed(workload, pool, "prefix+load", EngineSettings(decode_rate=1e6))
    assert slow.cached_tokens == 0
    assert fast.cached_tokens > 0


def test_the_router_learns_of_evictions(tmp_path: Path) -> None:
    """The repeated prompt was evicted, so it has no hit on the replica that served it."""
    workload = read_trace(_trace(tmp_path, [[1, 2], [3, 4], [5, 6], [1, 2]]))
    found = replay_routed(workload, PoolSettings(page_size=512, pages=2, replicas=2), "prefix")
    assert found.cached_tokens == 0


def test_requests_larger_than_a_pool_are_no_load(tmp_path: Path) -> None:
    workload = read_trace(_trace(tmp_path, [[1, 2, 3], [4], [5, 6, 7]]))
    found = replay_routed(workload, PoolSettings(page_size=512, pages=2, replicas=2), "prefix")
    assert (found.requests, found.refused) == (1, 2)
    only = read_trace(_trace(tmp_path, [[1, 2, 3]]))
    none = replay_routed(only, PoolSettings(page_size=512, pages=2, replicas=2), "prefix")
    assert (none.requests, none.imbalance, none.idle_replicas) == (0, 1.0, 2)


def test_bad_input() -> None:
    workload = chat_workload(limit=2)
    with pytest.raises(ValueError, match="route is 'random', must be one of prefix,"):
        replay_routed(workload, PoolSettings(), "random")
    with pytest.raises(PoolError, match="there are 4097 replicas; expected at most 4096"):
        replay_routed(workload, PoolSettings(replicas=4097), "prefix")
    with pytest.raises(PoolError, match="no tiers"):
        replay_routed(workload, PoolSettings(host_pages=10), "prefix")


_FEW = ("replay", "--limit", "60", "--pages", "2000")


def test_command_compares_policies(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, *_FEW, "--replicas", "3", "--route", "prefix,round-robin")
    assert found["mode"] == "routing"
    assert [each["route"] for each in found["results"]] == ["prefix", "round-robin"]
    assert "prefix+load" in shown(capsys, *_FEW, "--replicas", "3", "--route", "prefix+load")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--route", "fastest"), "'fastest'"),
        (("--route", "prefix,prefix"), "each value once"),
        (("--policy", "lru,lfu", "--route", "prefix"), "one policy"),
        (("--route", "prefix", "--mode", "online"), "admission"),
        (("--route", "prefix", "--host-pages", "10"), "without --groups, tiers"),
        (("--route", "prefix", "--replicas", "4097"), "at most 4096"),
    ],
)
def test_command_refuses(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], why: str
) -> None:
    assert why in refused(capsys, *_FEW, *arguments)


def test_explained_misses_of_each_route_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    routed = ["replay", "--limit", "300", "--pages", "150", "--replicas", "4", "--explain"]
    routed += ["--route", "prefix,round-robin"]
    answer = told(capsys, *routed)
    for each in answer["results"]:
        misses = each["misses"]
        assert misses["admissions"] == each["requests"]
        assert misses["cached_tokens"] == each["cached_tokens"]
        assert misses["prompt_tokens"] - misses["cached_tokens"] == each["computed_tokens"]
        assert misses["evicted"] > 0
    out = shown(capsys, *routed)
    assert "tokens not cached, by reason" in out
    assert f"{answer['results'][0]['misses']['evicted']:,}" in out
    without = told(capsys, *[each for each in routed if each != "--explain"])
    assert [each["misses"] for each in without["results"]] == [None, None]
