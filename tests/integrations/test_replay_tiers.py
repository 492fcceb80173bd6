# SPDX-License-Identifier: Apache-2.0
"""Replays with a host tier and a disk below the device: the tier of each hit, and evictions."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvcore import KVCacheParams
from kvcore.apps.replay.tiers import temporary_disk
from kvcore.groups import FullAttention, SlidingWindow
from kvcore.replay import (
    ChatSettings,
    EngineSettings,
    PoolSettings,
    ReplayReport,
    TierReport,
    Workload,
    chat_workload,
    compare,
    read_trace,
    replay_admission,
    replay_online,
)
from trace_files import BLOCK, random_rows, row, write_trace

CHATS = ChatSettings(conversations=40, system_prompts=3, system_tokens=(50, 90))
TIMES = ("seconds", "_us_")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary directories."""
    found = tmp_path / "temporary"
    found.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(found))
    return found


def tiers_of(report: ReplayReport) -> TierReport:
    assert report.tiers is not None
    return report.tiers


def untimed(report: ReplayReport) -> dict[str, Any]:
    found = asdict(report) | asdict(tiers_of(report))
    return {k: v for k, v in found.items() if k != "tiers" and not any(t in k for t in TIMES)}


def test_hits_of_a_trace_made_by_hand(tmp_path: Path) -> None:
    # Each prompt has two whole pages and a token to run: the pool of three pages holds one prompt.
    a, b, c = (row([i, i + 1, i + 2], length=2 * BLOCK + 1) for i in (0, 10, 20))
    served = [
        a,
        a,  # on the device
        b,
        a,  # in the host tier, which holds two of them
        c,  # replaces b in the host tier
        b,  # on disk
    ]
    workload = read_trace(write_trace(tmp_path, *served, row([30] * 4)))
    pool = PoolSettings(page_size=BLOCK, pages=3, host_pages=4, disk_pages=6)
    report = replay_admission(workload, pool)
    found = tiers_of(report)
    assert (found.device_tokens, found.host_tokens, found.disk_tokens) == (1024, 1024, 1024)
    assert found.computed_tokens == 6 * 1025 - 3 * 1024
    assert found.prompt_tokens == report.prompt_tokens == 6 * 1025 + 4 * 512  # the last is refused
    assert found.device_share == 1024 / found.prompt_tokens
    assert found.host_written_pages == found.disk_written_pages == 6
    assert found.disk_errors == 0
    assert report.cached_tokens == 3 * 1024
    # Without the disk, and without any lower tier.
    shallow = tiers_of(
        replay_admission(workload, PoolSettings(page_size=BLOCK, pages=3, host_pages=4))
    )
    assert (shallow.device_tokens, shallow.host_tokens, shallow.disk_tokens) == (1024, 1024, 0)
    alone = replay_admission(workload, PoolSettings(page_size=BLOCK, pages=3))
    assert (alone.cached_tokens, alone.tiers) == (1024, None)


def random_trace(folder: Path, seed: int) -> Workload:
    rows = random_rows(seed, requests=120, depth=6, fan_out=2)
    return read_trace(write_trace(folder, *rows))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("disk_pages", [0, 15, 1000])
def test_every_prompt_token_is_somewhere(
    tmp_path: Path, online: bool, disk_pages: int, replicas: int
) -> None:
    workload = random_trace(tmp_path, 3)
    pool = PoolSettings(
        page_size=256, pages=11, replicas=replicas, host_pages=12, disk_pages=disk_pages
    )
    report = (
        replay_online(workload, pool, EngineSettings(concurrency=8))
        if online
        else replay_admission(workload, pool)
    )
    found = tiers_of(report)
    assert (found.host_pages, found.disk_pages) == (12, disk_pages)
    counts = (found.device_tokens, found.host_tokens, found.disk_tokens)
    assert min(counts) >= 0
    assert sum(counts) == report.cached_tokens
    assert sum(counts) + found.computed_tokens == report.served_prompt_tokens
    assert found.host_tokens % 256 == found.disk_tokens % 256 == 0
    assert (found.disk_tokens > 0) == (disk_pages > 0)
    assert report.leaked_pages == found.disk_errors == 0


@pytest.mark.parametrize("replicas", [1, 3])
def test_what_no_tier_forgets_is_all_found(replicas: int) -> None:
    workload = chat_workload(seed=5, limit=60, settings=CHATS)
    # A prompt passes through the host tier, so this tier must hold the longest prompt.
    longest = -(-int(workload.prompt_lengths.max()) // 8)
    pool = PoolSettings(
        page_size=8, pages=longest, replicas=replicas, host_pages=longest, disk_pages=100_000
    )
    deep = replay_admission(workload, pool)
    everything = replay_admission(workload, PoolSettings(page_size=8, pages=100_000))
    assert deep.cached_pages == everything.cached_pages
    assert tiers_of(deep).disk_tokens > 0
    assert tiers_of(deep).flush_seconds > 0


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_admission_finds_the_same_each_time(tmp_path: Path, policy: str) -> None:
    workload = random_trace(tmp_path, 4)
    pool = PoolSettings(page_size=128, pages=24, policy=policy, host_pages=30, disk_pages=60)
    first, *others = (untimed(replay_admission(workload, pool)) for _ in range(4))
    assert first["disk_tokens"] > 0
    assert first["disk_written_pages"] > 60  # some were evicted
    assert others == [first] * 3


def test_tiers_change_nothing_on_the_device(tmp_path: Path) -> None:
    workload = random_trace(tmp_path, 5)
    pool = PoolSettings(page_size=512, pages=9)
    deep = replay_admission(
        workload, PoolSettings(page_size=512, pages=9, host_pages=6, disk_pages=40)
    )
    alone = replay_admission(workload, pool)
    assert deep.evicted_pages == alone.evicted_pages
    assert deep.cached_tokens > alone.cached_tokens


def test_the_directory_is_there_during_a_replay_alone(folder: Path, tmp_path: Path) -> None:
    pool = PoolSettings(page_size=BLOCK, pages=10, host_pages=10, disk_pages=10)
    workload = read_trace(write_trace(tmp_path, *[row([0])] * 200))
    seen: list[int] = []

    def look(_: int) -> None:
        (own,) = folder.iterdir()
        seen.append(sum(each.name.startswith("segment") for each in own.iterdir()))

    replay_admission(workload, pool, on_progress=look)
    assert seen[-1] == 1
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ValueError])
@pytest.mark.parametrize("replay", [replay_admission, replay_online])
def test_the_directory_is_removed_after_an_error(
    folder: Path, tmp_path: Path, error: type[BaseException], replay: Any
) -> None:
    def fail(done: int) -> None:
        if done:
            raise error

    workload = read_trace(write_trace(tmp_path, *[row([i]) for i in range(200)]))
    pool = PoolSettings(page_size=BLOCK, pages=10, host_pages=10, disk_pages=10)
    with pytest.raises(error):
        replay(workload, pool, on_progress=fail)
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("page_bytes", [2, 1024, 4096, 5000])
@pytest.mark.parametrize("pages", [1, 7, 20_000])
def test_a_disk_holds_as_many_pages_as_it_is_told(page_bytes: int, pages: int) -> None:
    with temporary_disk(pages, page_bytes) as store:
        assert store.stats()["capacity"] == pages


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"disk_pages": 5}, "expected at least one page of a host tier"),
        ({"host_pages": -1}, "host_pages is -1"),
        ({"host_pages": 1, "disk_pages": -1}, "disk_pages is -1"),
        ({"host_pages": 2**31 - 1, "page_size": 2**31 - 1}, "must be 1 to 2"),
    ],
)
def test_tiers_that_cannot_be_are_refused(folder: Path, options: dict[str, Any], told: str) -> None:
    workload = chat_workload(limit=1)
    with pytest.raises(ValueError, match=told):
        replay_admission(workload, PoolSettings(**{"pages": 4, **options}))
    assert not [*folder.iterdir()]


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path, folder: Path) -> None:
    folder.rmdir()
    pool = PoolSettings(host_pages=1, disk_pages=1)
    with pytest.raises(ValueError, match="No such file or directory"):
        replay_admission(chat_workload(limit=1), pool)


def test_a_comparison_with_the_flat_cache_has_no_tiers() -> None:
    groups = [FullAttention([1]), SlidingWindow([0], window=9)]
    model = KVCacheParams("float16", 1, 8, num_layers=2, page_size=8, groups=groups)
    pool = PoolSettings(page_size=8, pages=50, host_pages=5)
    workload = chat_workload(limit=1)
    with pytest.raises(ValueError, match="and not both"):
        compare(workload, [pool], ["lru"], model=model)
    with pytest.raises(ValueError, match="the groups of a model has no disk"):
        replay_admission(workload, replace(pool, model=model, disk_pages=3))


def test_several_pools_are_compared_with_the_same_tiers(tmp_path: Path) -> None:
    workload = random_trace(tmp_path, 6)
    pools = [
        PoolSettings(page_size=512, pages=pages, host_pages=12, disk_pages=30) for pages in (8, 20)
    ]
    found = compare(workload, pools, ["lru", "lfu"])
    assert (found.host_pages, found.disk_pages) == (12, 30)
    assert found.optimum_name == "device optimum"
    for policy in ("lru", "lfu"):
        for run, pool in zip(found.of(policy), pools, strict=True):
            alone = replay_admission(workload, pool.with_policy(policy))
            assert untimed(run.report) == untimed(alone)
