# SPDX-License-Identifier: Apache-2.0
"""Processes that share a Redis server: one computes pages, another loads the same bytes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from handover import PAGES, expect_the_same_bytes, serve
from kvcore.stores import RedisStore
from redis_server import RedisServer
from small_model import GROUPS, HIT, PROMPT, small_manager


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as started:
        yield started


@pytest.mark.parametrize("kind", GROUPS)
def test_another_process_finds_the_same_bytes(
    kind: str, server: RedisServer, tmp_path: Path
) -> None:
    expect_the_same_bytes(kind, server.url, tmp_path)


@pytest.mark.parametrize("kind", GROUPS)
def test_a_server_that_is_killed_is_a_miss(kind: str, server: RedisServer) -> None:
    with small_manager(kind, "host:64KiB", server.url) as manager:
        _, computed = serve(manager)
    server.kill()
    with small_manager(kind, "host:64KiB", server.url) as manager:
        assert serve(manager) == (0, computed)
        assert manager.tier_metrics["redis"].errors > 0
    server.start()  # with empty memory
    with small_manager(kind, "host:64KiB", server.url) as manager:
        assert serve(manager) == (0, computed)
    with small_manager(kind, "host:64KiB", server.url) as manager:
        assert serve(manager) == (HIT, computed)


def test_a_server_that_hangs_stalls_once(server: RedisServer) -> None:
    url = f"{server.url}?timeout=0.3"
    with small_manager("flat", "host:64KiB", url) as manager:
        _, computed = serve(manager)
    with small_manager("flat", "host:64KiB", url) as manager:
        server.hang()
        began = time.monotonic()
        assert serve(manager) == (0, computed)
        assert serve(manager, PROMPT[::-1])[0] == 0
        spent = time.monotonic() - began
        metrics = manager.tier_metrics["redis"]
        assert (metrics.timeouts, metrics.breaker) == (1, "open")
        server.go_on()
    assert spent < 0.3 + 1.5  # the model takes a part of it


def test_spoilt_values_are_misses_and_go(server: RedisServer) -> None:
    with small_manager("flat", "host:64KiB", server.url) as manager:
        _, computed = serve(manager)
    client = server.client()
    names = sorted(client.keys())
    values = {name: client.get(name) for name in names}
    for spoil in (
        lambda value: value[:200] + bytes([value[200] ^ 1]) + value[201:],
        lambda value: value[:-8] + bytes(8),
        lambda value: value[: len(value) // 2],
        lambda _: values[names[0]],  # of another page
        lambda _: b"",
    ):
        for name in names[1:]:
            client.set(name, spoil(values[name]))
        with small_manager("flat", "host:64KiB", server.url) as manager:
            found, answer = serve(manager)
            assert answer == computed
            assert found < HIT
            assert manager.tier_metrics["redis"].corrupt == 1
        for _ in names:  # each time the first is removed and computed again
            with small_manager("flat", "host:64KiB", server.url) as manager:
                found, answer = serve(manager)
            assert answer == computed
        assert found == HIT


def test_models_tenants_and_salts_meet_nowhere(server: RedisServer) -> None:
    with small_manager("flat", "host:64KiB", server.url) as manager:
        assert serve(manager, cache_salt="a")[0] == 0
    for salt, found in (("b", 0), (None, 0), ("a", HIT)):
        with small_manager("flat", "host:64KiB", server.url) as manager:
            assert serve(manager, cache_salt=salt)[0] == found
    with small_manager("flat", "host:64KiB", f"{server.url}?prefix=other") as manager:
        assert serve(manager, cache_salt="a")[0] == 0
    with small_manager("flat", "host:64KiB", server.url, fingerprint="other weights") as manager:
        assert serve(manager, cache_salt="a")[0] == 0
    spoken = repr(PROMPT)[1:20].encode()
    assert all(spoken not in name for name in server.client().scan_iter())


def test_disk_and_redis_below_each_other(server: RedisServer, tmp_path: Path) -> None:
    disk = f"disk:{tmp_path / 'disk'}:4MiB"
    with small_manager("flat", "host:64KiB", server.url) as manager:
        _, computed = serve(manager)
    with small_manager("flat", "host:64KiB", disk, server.url) as manager:
        assert serve(manager) == (HIT, computed)
        assert manager.tier_metrics["redis"].hits == PAGES
    server.kill()
    with small_manager("flat", "host:64KiB", disk, server.url) as manager:
        assert serve(manager) == (HIT, computed)  # the disk has it now
        assert manager.tier_metrics["disk"].hits == PAGES


def test_a_reset_leaves_what_the_server_has(server: RedisServer) -> None:
    """The pages of a server also belong to other processes."""
    with small_manager("flat", "host:64KiB", server.url) as manager:
        serve(manager)
        manager.flush()
        stored = server.client().dbsize()
        assert stored >= PAGES
        assert manager.reset_prefix_cache()
        assert server.client().dbsize() == stored
        assert serve(manager)[0] == HIT
    with contextlib.closing(RedisStore(server.url)) as store:
        store.clear()
    assert server.client().dbsize() == 0
