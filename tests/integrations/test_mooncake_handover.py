# SPDX-License-Identifier: Apache-2.0
"""Processes that share a Mooncake store: one computes pages, another loads the same bytes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import require
from handover import PAGES, expect_the_same_bytes, serve
from kvcore.stores import MooncakeStore
from kvcore.stores.tiers.adapters import RecordAdapter
from mooncake_server import MooncakeServer, network_of_its_own
from small_model import GROUPS, HIT, PROMPT, small_manager

require("mooncake")

pytestmark = pytest.mark.xdist_group("mooncake")


@pytest.fixture(scope="module", autouse=True)
def network() -> Iterator[None]:
    with network_of_its_own():
        yield


@pytest.fixture
def server() -> Iterator[MooncakeServer]:
    with MooncakeServer() as started:
        yield started


@pytest.mark.parametrize("kind", GROUPS)
def test_another_process_finds_the_same_bytes(
    kind: str, server: MooncakeServer, tmp_path: Path
) -> None:
    expect_the_same_bytes(kind, server.url, tmp_path)


def test_servers_that_are_killed_are_a_miss(server: MooncakeServer) -> None:
    url = f"{server.url}?timeout=2"
    with small_manager("flat", "host:64KiB", url) as manager:
        _, computed = serve(manager)
        server.close()
        assert serve(manager, PROMPT[::-1])[0] == 0  # nothing raises
    with small_manager("flat", "host:64KiB", url) as manager:
        assert serve(manager) == (0, computed)
        assert manager.tier_metrics["mooncake"].errors > 0
    server.begin()  # with empty memory
    with small_manager("flat", "host:64KiB", url) as manager:
        assert serve(manager) == (0, computed)
    with small_manager("flat", "host:64KiB", url) as manager:
        assert serve(manager) == (HIT, computed)


def test_a_master_that_hangs_stalls_once(server: MooncakeServer) -> None:
    url = f"{server.url}?timeout=0.5"
    with small_manager("flat", "host:64KiB", url) as manager:
        _, computed = serve(manager)
    with small_manager("flat", "host:64KiB", url) as manager:
        server.master.hang()
        began = time.monotonic()
        assert serve(manager) == (0, computed)
        assert serve(manager, PROMPT[::-1])[0] == 0
        spent = time.monotonic() - began
        metrics = manager.tier_metrics["mooncake"]
        assert (metrics.timeouts, metrics.breaker) == (1, "open")
        server.master.go_on()
    assert spent < 0.5 + 1.5  # the model takes a part of it


def test_models_tenants_and_salts_meet_nowhere(server: MooncakeServer) -> None:
    url = f"{server.url}?timeout=20"
    with small_manager("flat", "host:64KiB", url) as manager:
        assert serve(manager, cache_salt="a")[0] == 0
    for salt, found in (("b", 0), (None, 0), ("a", HIT)):
        with small_manager("flat", "host:64KiB", url) as manager:
            assert serve(manager, cache_salt=salt)[0] == found
    with small_manager("flat", "host:64KiB", f"{url}&prefix=other") as manager:
        assert serve(manager, cache_salt="a")[0] == 0
    with small_manager("flat", "host:64KiB", url, fingerprint="other weights") as manager:
        assert serve(manager, cache_salt="a")[0] == 0


def test_what_others_remove_meanwhile_is_never_served_wrong(server: MooncakeServer) -> None:
    """The engine frees the memory of a value during a read."""
    url = f"{server.url}?timeout=20"
    stop = threading.Event()

    def reset() -> None:
        with contextlib.closing(MooncakeStore(url)) as store:
            while not stop.wait(0.01):
                store.clear()

    with small_manager("flat", "host:64KiB", url) as manager:
        _, computed = serve(manager)
    thread = threading.Thread(target=reset)
    thread.start()
    try:
        for _ in range(5):
            with small_manager("flat", "host:64KiB", url) as manager:
                assert serve(manager)[1] == computed
    finally:
        stop.set()
        thread.join()


def test_the_manager_reads_into_memory_of_the_store(server: MooncakeServer) -> None:
    url = f"{server.url}?timeout=20"
    with small_manager("flat", "host:64KiB", url) as manager:
        serve(manager)
    with small_manager("flat", "host:64KiB", url) as manager:
        assert serve(manager)[0] == HIT
        assert manager.tier_metrics["mooncake"].hits == PAGES
        assert manager._tiers is not None
        (adapter,) = manager._tiers._stores
        assert isinstance(adapter, RecordAdapter)
        assert isinstance(adapter.store, MooncakeStore)
        free = adapter._memory._free
        assert free
        assert all(adapter.store._arena.find(each.data) is not None for each in free)
