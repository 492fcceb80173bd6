# SPDX-License-Identifier: Apache-2.0
"""The decision of a comparison: the least memory, the best policy, and tiers for memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvcore.apps.replay.noise import least_lead
from kvcore.replay import (
    Comparison,
    EngineSettings,
    PoolError,
    PoolSettings,
    Workload,
    chat_workload,
    compare,
    read_trace,
    replay_admission,
)
from kvcore.support.byte_sizes import format_size
from trace_files import BLOCK, random_rows, row, write_trace

GIB = 1 << 30


@pytest.fixture(scope="module")
def chats() -> Workload:
    return chat_workload(seed=1, limit=150)


def pools(*pages: int, page_bytes: int = 0, tiers: tuple[int, ...] = (0,)) -> list[PoolSettings]:
    return [
        PoolSettings(pages=each, page_bytes=page_bytes, host_pages=host)
        for each in pages
        for host in tiers
    ]


def rates(comparison: Comparison, curve: str) -> list[float]:
    return [run.report.token_hit_rate for run in comparison.of(curve)]


def test_the_least_size_is_a_replayed_size_with_95_percent(chats: Workload) -> None:
    found = compare(chats, pools(300, 1_000, 3_000, 10_000, 30_000), ["lru"])
    decision = found.decision
    unlimited = replay_admission(chats, PoolSettings(pages=200_000))
    assert unlimited.evicted_pages == 0
    assert decision.best_hit_rate == unlimited.token_hit_rate
    assert decision.best_of == "no evictions"
    enough = [rate >= 0.95 * decision.best_hit_rate for rate in rates(found, "lru")]
    place = enough.index(True)
    assert 0 < place < 4
    assert all(enough[place:])
    assert decision.pages == found.pages[place]
    assert decision.hit_rate == rates(found, "lru")[place]
    assert (decision.below_pages, decision.below_hit_rate) == (
        found.pages[place - 1],
        rates(found, "lru")[place - 1],
    )
    assert f"from {decision.pages:,} pages on, with lru" in decision.text
    assert f"{decision.below_pages:,} pages find {decision.below_hit_rate:.2%}" in decision.text
    assert (decision.best_policy, decision.tied, decision.tier) == (None, (), None)
    assert "policy" not in decision.text


def test_memory_is_named_if_the_bytes_of_a_page_are_known(chats: Workload) -> None:
    found = compare(chats, pools(10_000, 30_000, page_bytes=GIB), ["lru"])
    assert "from 9.77 TiB on" in found.decision.text
    assert found.decision.to_dict()["memory_gib"] == 10_000
    assert found.memory == (10_000 * GIB, 30_000 * GIB)
    told = json.loads(json.dumps(found.to_dict()))
    assert [each["memory_gib"] for each in told["results"]] == [10_000, 30_000]
    assert [each["memory_gib"] for each in told["optimum"]] == [10_000, 30_000]
    assert told["decision"]["text"] == found.decision.text


def test_nothing_is_claimed_beyond_the_replayed_sizes(chats: Workload) -> None:
    short = compare(chats, pools(150, 300), ["lru", "fifo"]).decision
    assert short.pages is None
    assert short.text.startswith("No replayed size finds 95% of the best hit rate")
    large = compare(chats, pools(30_000), ["lru"]).decision
    assert "no smaller size was replayed" in large.text
    assert large.below_pages is None


def test_online_the_best_is_that_of_the_replays(chats: Workload) -> None:
    found = compare(chats, pools(2_000, 30_000), ["lru"], engine=EngineSettings())
    decision = found.decision
    assert decision.best_of == "these replays"
    assert decision.best_hit_rate == max(rates(found, "lru"))
    assert "of the best hit rate of these replays" in decision.text
    assert found.most_cached_tokens is None


def test_a_policy_is_best_only_by_more_than_the_noise(tmp_path: Path) -> None:
    # A block that returns after three others: lfu keeps it after its second use, lru does not.
    rows = [row([0, 1])]
    for i in range(2, 1600, 4):
        rows += [row([0, i]), *(row([i + n]) for n in (1, 2, 3))]
    workload = read_trace(write_trace(tmp_path, *rows))
    sizes = [PoolSettings(page_size=BLOCK, pages=3)]
    decision = compare(workload, sizes, ["lru", "lfu"]).decision
    assert decision.best_policy == "lfu"
    assert decision.lead is not None
    assert decision.lead > 0
    assert "lfu is best by more than the noise" in decision.text
    # Without priorities, priority is lru: policies with the same hits are one policy.
    same = compare(workload, sizes, ["lru", "priority"]).decision
    assert same.best_policy is None
    assert "no policy is best by more than the noise: lru, priority" in same.text
    both = compare(workload, sizes, ["lfu", "lru", "priority"]).decision
    assert both.best_policy == "lfu"


def test_the_decision_is_the_same_each_time(tmp_path: Path) -> None:
    workload = read_trace(write_trace(tmp_path, *random_rows(3, requests=90, depth=6, fan_out=2)))
    sizes = [PoolSettings(page_size=128, pages=each) for each in (30, 60)]
    first, second = (compare(workload, sizes, ["lru", "arc", "lfu"]).decision for _ in range(2))
    assert first == second


@pytest.mark.parametrize("requests", [1, 7, 50, 999])
def test_noise_grows_with_the_spread_over_the_trace(requests: int) -> None:
    prompts = np.full(requests, 100)
    even = [50] * requests
    assert least_lead(even, even, prompts) == 0
    assert least_lead([60] * requests, even, prompts) == pytest.approx(0.1)
    if requests > 50:
        # The same mean lead, all of it in one request.
        odd = [50] * (requests - 1) + [50 + 10 * requests]
        assert least_lead(odd, even, prompts) == 0
    assert least_lead([-1] * requests, even, prompts) == -0.5


def test_tiers_are_compared_with_device_memory(chats: Workload) -> None:
    sizes = pools(300, 1_000, 3_000, page_bytes=GIB, tiers=(0, 3_000, 10_000))
    found = compare(chats, sizes, ["lru", "arc"])
    assert found.curves[:3] == ("lru device only", "lru 2.93 TiB host", "lru 9.77 TiB host")
    assert len(found.runs) == 18
    assert [each.host_pages for each in found.tiers] == [0, 3_000, 10_000]
    tier = found.decision.tier
    assert tier is not None
    assert tier["device_pages"] < tier["instead_of_pages"]
    assert (tier["instead_of_host_pages"], tier["instead_of_disk_pages"]) == (0, 0)
    kind = [each.host_pages for each in found.tiers].index(tier["host_pages"])
    curve = f"{tier['policy']} {found.tiers[kind].name(GIB)}"
    at = found.pages.index(tier["device_pages"])
    assert tier["hit_rate"] == rates(found, curve)[at] >= 0.99 * tier["instead_of_hit_rate"]
    base = rates(found, f"{tier['policy']} device only")
    assert tier["instead_of_hit_rate"] == base[found.pages.index(tier["instead_of_pages"])]
    assert "TiB find as much as" in found.decision.text
    # The device of the first curves is as it is without tiers.
    alone = compare(chats, pools(300, 1_000, 3_000), ["lru", "arc"])
    for policy in ("lru", "arc"):
        assert rates(found, f"{policy} device only") == rates(alone, policy)
    assert found.optima == alone.optima


def test_a_replaced_device_is_told_with_its_own_tiers(chats: Workload) -> None:
    sizes = pools(300, 1_000, 3_000, page_bytes=GIB, tiers=(500, 10_000))
    found = compare(chats, sizes, ["lru"])
    tier = found.decision.tier
    assert tier is not None
    assert (tier["host_pages"], tier["instead_of_host_pages"]) == (10_000, 500)
    assert tier["instead_of_disk_pages"] == 0
    base = rates(found, f"lru {found.tiers[0].name(GIB)}")
    assert tier["instead_of_hit_rate"] == base[found.pages.index(tier["instead_of_pages"])]
    instead = format_size(tier["instead_of_pages"] * GIB)
    assert f"as much as {instead} of device memory and a host tier of 500 GiB: " in (
        found.decision.text
    )


def test_tiers_need_the_same_pages(chats: Workload) -> None:
    sizes = [PoolSettings(pages=300), PoolSettings(pages=400, host_pages=9)]
    with pytest.raises(PoolError, match="expected the same pages for all tiers"):
        compare(chats, sizes, ["lru"])


def test_hits_of_each_request_add_up(chats: Workload) -> None:
    for report in (
        replay_admission(chats, PoolSettings(pages=400)),
        compare(chats, pools(400), ["arc"], engine=EngineSettings()).runs[0].report,
    ):
        found = np.array(report.request_hits)
        assert len(found) == len(chats)
        assert found[found >= 0].sum() == report.cached_tokens
        assert (found < 0).sum() == report.refused
        assert report.hit_tokens.mean == pytest.approx(report.cached_tokens / report.requests)
        assert 0 <= report.hit_tokens.p50 <= report.hit_tokens.p95
