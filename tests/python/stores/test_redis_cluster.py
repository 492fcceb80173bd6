# SPDX-License-Identifier: Apache-2.0
"""Pages in a Redis Cluster: each page is on the node of its slot, also after the slot moves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import require
from kvcore.stores import RedisStore
from kvcore.stores.redis_nodes import _slots_of
from redis_cluster import RedisCluster
from stored_pages import random_page, read_pages
from together import run_together

require("redis")

pytestmark = pytest.mark.xdist_group("redis cluster")  # the cluster starts once

KEYS = [bytes([i]) * 32 for i in range(40)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


@pytest.fixture
def store(cluster: RedisCluster, request: Any) -> Iterator[RedisStore]:
    """Return a store with its own names."""
    url = f"{cluster.url}?prefix={request.node.name[:60]}&timeout=10"
    with contextlib.closing(RedisStore(url)) as opened:
        yield opened


def test_pages_lie_on_all_nodes(cluster: RedisCluster, store: RedisStore) -> None:
    assert store.put_from(KEYS, [random_page(i) for i in range(40)]).result() == 40
    here = [sum(name.startswith(store._prefix) for name in names) for names in cluster.names()]
    assert sum(here) == 40
    assert min(here) > 0
    served, to = read_pages(store, KEYS)
    assert served == 40
    assert all(np.array_equal(to[i], random_page(i)) for i in range(40))
    assert store.contains(KEYS[:3]) == [True] * 3
    assert store.remove([KEYS[7], KEYS[20]]) == 2
    assert read_pages(store, KEYS)[0] == 7
    assert store.capacity().pages >= 38
    assert store.clear() == 38
    assert store.contains(KEYS) == [False] * 40
    assert store.health().errors == 0


def test_the_slots_are_those_of_the_server(cluster: RedisCluster, store: RedisStore) -> None:
    store.put_from(KEYS[:1], [random_page(0)])
    client = cluster.servers[0].client()
    for name in (b"123456789", b"kvcore:" + b"ab" * 32, store._names(KEYS[:1])[0]):
        slot = client.execute_command("CLUSTER", "KEYSLOT", name)
        assert store._nodes._slots is not None
        assert store._nodes.address_of(name) == store._nodes._slots[slot]


def test_a_slot_that_moves_is_found_again(cluster: RedisCluster, store: RedisStore) -> None:
    store.put_from(KEYS, [random_page(i) for i in range(40)])
    (name,) = store._names(KEYS[:1])
    clients = [server.client() for server in cluster.servers]
    slot = clients[0].execute_command("CLUSTER", "KEYSLOT", name)
    here = next(i for i, names in enumerate(cluster.names()) if name in names)
    there = (here + 1) % 3
    # While the slot moves, the old node redirects requests for names that have moved.
    clients[there].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.ids[here])
    clients[here].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.ids[there])
    port = cluster.servers[there].port
    clients[here].execute_command("MIGRATE", "127.0.0.1", port, name, 0, 5000)
    assert read_pages(store, KEYS[:1])[0] == 0  # a miss
    errors = store.health().errors
    for client in clients:
        client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", cluster.ids[there])
    served, to = read_pages(store, KEYS)
    assert served == 40
    assert np.array_equal(to[0], random_page(0))
    store.remove(KEYS[:1])
    assert store.put_from(KEYS[:1], [random_page(0)]).result() == 1
    assert store.health().errors == errors <= 1


def test_threads(store: RedisStore) -> None:
    def work(number: int) -> None:
        draw = np.random.default_rng(number)
        for _ in range(40):
            some = [KEYS[i] for i in sorted({*draw.integers(0, 40, 8).tolist()})]
            store.put_from(some, [random_page(key[0]) for key in some])
            served, to = read_pages(store, some)
            assert all(np.array_equal(to[i], random_page(some[i][0])) for i in range(served))
            store.remove(some[:2])

    run_together(work)
    assert store.health().errors == 0
    assert store.health().hits > 0


@pytest.mark.slow
def test_a_replica_takes_the_place_of_a_node_that_dies(tmp_path: Path) -> None:
    with RedisCluster(tmp_path, has_replica=True) as cluster:
        url = f"{cluster.url}?timeout=2"
        with contextlib.closing(RedisStore(url, breaker_seconds=0.1)) as store:
            store.put_from(KEYS, [random_page(i) for i in range(40)])
            cluster.servers[0].client().wait(1, 5000)
            cluster.servers[0].kill()
            served = read_pages(store, KEYS)[0]
            assert served < 40
            cluster.wait(lambda: read_pages(store, KEYS)[0] == 40)
            assert store.health().breaker == "closed"
            # The node of the store's URL is also killed: the store has the addresses of the others.
            cluster.servers[1].kill()
            cluster.wait(lambda: sum(store.contains(KEYS)) > 0 or read_pages(store, KEYS)[0] == 0)


@pytest.mark.parametrize(
    "reply",
    [
        [],
        [[0, 16382, [b"h", 1]]],
        [[0, 16384, [b"h", 1]]],
        [[5, 4, [b"h", 1]]],
        [[0, 16383]],
        [[0, 16383, [b"h"]]],
        [7],
    ],
)
def test_a_reply_that_names_not_all_slots_is_a_failure(reply: list[Any]) -> None:
    with pytest.raises(OSError, match=r"slots|SLOTS"):
        _slots_of(reply, "asked")


def test_a_node_without_a_name_is_where_it_was_asked() -> None:
    slots = _slots_of([[0, 99, [b"", 7]], [100, 16383, [None, 8, b"id"], [b"x", 9]]], "asked")
    assert slots[99] == ("asked", 7)
    assert slots[100] == ("asked", 8)
