# SPDX-License-Identifier: Apache-2.0
"""Pages in a Mooncake store: nothing raises, no page is wrong, whatever happens to its servers."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvcore
from conftest import require
from hanging import hang
from interrupted_starts import MOMENTS, interrupt_starts, threads_named
from kvcore.stores import BlockStore, MooncakeStore
from kvcore.stores.mooncake_client import MooncakeClient
from kvcore.stores.specs import MooncakeTier, parse_tier
from mooncake_server import MooncakeServer, network_of_its_own
from programs import printed
from stored_pages import random_page, read_pages
from together import run_together
from waiting import wait_until

require("mooncake")

# The tests share one network, and each uses the same ports.
pytestmark = pytest.mark.xdist_group("mooncake")

KEYS = [bytes([i]) * 32 for i in range(20)]
SIZE = 5000


@pytest.fixture(scope="module", autouse=True)
def network() -> Iterator[None]:
    with network_of_its_own():
        yield


@pytest.fixture(scope="module")
def lasting() -> Iterator[MooncakeServer]:
    """A server that no test stops."""
    with MooncakeServer() as server:
        yield server


Open = Callable[..., MooncakeStore]


@pytest.fixture
def open_store() -> Iterator[Open]:
    """A function that opens stores; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def open_one(tier: str = MooncakeServer.url, **options: Any) -> MooncakeStore:
            return stack.enter_context(contextlib.closing(MooncakeStore(tier, **options)))

        yield open_one


@pytest.fixture
def store(lasting: MooncakeServer, open_store: Open, request: Any) -> MooncakeStore:
    """A store with a unique prefix."""
    return open_store(f"{lasting.url}?prefix={request.node.name[:50]}&timeout=20")


def raw(store: MooncakeStore) -> Callable[..., Any]:
    """A function that calls the engine itself."""
    client = store._started()

    def call(verb: str, *arguments: Any) -> Any:
        return client.call(verb, *arguments, ends=time.monotonic() + 20)

    return call


def put_raw(store: MooncakeStore, key: bytes, value: bytes) -> None:
    """Replace the value of a key."""
    (name,) = store._texts([key])
    call = raw(store)
    call("remove", [name])
    with store._arena.taken(len(value), time.monotonic() + 20) as begin:
        store._arena.view(begin, len(value))[:] = value
        assert call("put", [name], [[(begin, len(value))]]) == [0]


def test_what_is_stored_is_served_up_to_the_first_hole(store: MooncakeStore) -> None:
    assert isinstance(store, BlockStore)
    pages = [random_page(i, 1 + i * 9973) for i in range(10)]
    assert store.put_from(KEYS[:10], pages).result() == 10
    assert store.contains([*KEYS[8:12], KEYS[0]]) == [True, True, False, False, True]
    to = [np.zeros_like(each) for each in pages]
    assert store.get_into(KEYS[:10], to).result() == 10
    assert all(np.array_equal(*each) for each in zip(pages, to, strict=True))
    order = [2, 15, 3]
    to = [np.zeros(1 + i * 9973, np.uint8) for i in order]
    assert store.get_into([KEYS[i] for i in order], to).result() == 1
    assert store.remove([KEYS[0], KEYS[15], KEYS[1]]) == 2
    assert store.contains(KEYS[:3]) == [False, False, True]
    health = store.health()
    assert (health.hits, health.misses, health.errors) == (11, 2, 0)
    assert health.bytes_in == sum(map(len, pages))
    assert store.put_from([], []).result() == store.get_into([], []).result() == 0
    assert store.contains([]) == []
    assert store.remove([]) == 0
    assert store.capacity() == kvcore.stores.StoreCapacity(None, 0, 0)


def test_the_first_value_of_a_name_stays(store: MooncakeStore) -> None:
    store.put_from(KEYS[:1], [random_page(1)])
    assert store.put_from(KEYS[:1], [random_page(2)]).result() == 1
    assert np.array_equal(read_pages(store, KEYS[:1])[1][0], random_page(1))


def test_prefixes_and_tenants_meet_nowhere(lasting: MooncakeServer, open_store: Open) -> None:
    urls = [f"{lasting.url}?{each}" for each in ("prefix=one", "prefix=two.x")]
    one, two = map(open_store, urls)
    one.put_from(KEYS[:2], [random_page(1), random_page(2)])
    assert two.contains(KEYS[:2]) == [False, False]
    two.put_from(KEYS[:3], [random_page(3)] * 3)
    assert two.clear() == 3
    assert one.contains(KEYS[:3]) == [True, True, False]
    assert open_store(urls[0]).clear() == 2


def test_parts_of_pages_are_one_value(store: MooncakeStore) -> None:
    parts = [random_page(i, 100 * i + 1) for i in range(4)]
    assert store.put_from(KEYS[:1], [[None, parts[1], None, parts[3]]]).result() == 1
    exactly = [None, np.zeros_like(parts[1]), None, np.zeros_like(parts[3])]
    assert store.get_into(KEYS[:1], [exactly]).result() == 1
    some = [None, None, None, np.zeros_like(parts[3])]
    assert store.get_into(KEYS[:1], [some]).result() == 1
    assert np.array_equal(some[3], parts[3])
    assert np.array_equal(exactly[1], parts[1])
    for lacking in (
        [np.zeros_like(parts[0])],
        [None, np.zeros_like(parts[1]), np.zeros(1, np.uint8)],
        [None] * 5 + [np.zeros(1, np.uint8)],
    ):
        assert store.get_into(KEYS[:1], [lacking]).result() == 0
    assert store.put_from(KEYS[:1], [parts]).result() == 1  # it holds more
    both = [np.zeros_like(each) for each in parts]
    assert store.get_into(KEYS[:1], [both]).result() == 1
    assert all(np.array_equal(*each) for each in zip(parts, both, strict=True))


def test_values_that_others_have_spoilt_are_misses(store: MooncakeStore) -> None:
    store.put_from(KEYS[:3], [random_page(i) for i in range(3)])
    for bad in (b"x", b"KVP1\xff\xff\xff\xff", b"KVP1\1\0\0\0" + bytes(8), bytes(SIZE + 16)):
        put_raw(store, KEYS[1], bad)
        assert read_pages(store, KEYS[:3])[0] == 1
        assert store.contains(KEYS[:3]) == [True, False, True]
    assert store.health().corrupt == 4
    assert store.health().errors == 0


def test_a_batch_may_be_larger_than_the_memory_between(
    lasting: MooncakeServer, open_store: Open
) -> None:
    store = open_store(f"{lasting.url}?prefix=small&buffer=1MiB&timeout=20")
    pages = [random_page(i, 200 << 10) for i in range(12)]
    assert store.put_from(KEYS[:12], pages).result() == 12
    served, to = read_pages(store, KEYS[:12], 200 << 10)
    assert served == 12
    assert all(np.array_equal(*each) for each in zip(pages, to, strict=True))
    with pytest.raises(ValueError, match="give the tier a buffer of"):
        store.put_from(KEYS[:1], [random_page(1, 600 << 10)])
    assert store.put_from(KEYS[:1], [random_page(1, 500 << 10)]).result() == 1


def test_pages_in_memory_of_the_store_are_not_copied(
    lasting: MooncakeServer, open_store: Open
) -> None:
    store = open_store(f"{lasting.url}?prefix=lent&buffer=1MiB&timeout=20")
    mine: list[Any] = [store.new_buffer(100_000) for _ in range(5)]
    assert all(each is not None for each in mine)
    assert store.new_buffer(100_000) is None  # half is for pages of other requests
    for i, each in enumerate(mine):
        each[:] = random_page(i, 100_000)
    assert store.put_from(KEYS[:5], mine).result() == 5
    for each in mine:
        each[:] = 0
    assert store.get_into(KEYS[:5], mine).result() == 5
    assert all(np.array_equal(each, random_page(i, 100_000)) for i, each in enumerate(mine))
    # Parts of the buffers, and a buffer for several pages of a batch.
    parts = [mine[0][:50], mine[0][:60], mine[0], mine[0][1:]]
    assert store.put_from(KEYS[5:9], parts).result() == 4
    to = [np.zeros(len(each), np.uint8) for each in parts]
    assert store.get_into(KEYS[5:9], to).result() == 4
    assert all(np.array_equal(*each) for each in zip(parts, to, strict=True))
    kept = mine[0][5:10]
    mine.clear()
    del each
    again = [store.new_buffer(100_000) for _ in range(5)]
    assert sum(one is not None for one in again) == 4  # a view keeps its memory
    assert np.array_equal(kept, random_page(0, 100_000)[5:10])


def test_threads(store: MooncakeStore) -> None:
    def work(number: int) -> None:
        draw = np.random.default_rng(number)
        for _ in range(30):
            some = [KEYS[i] for i in sorted({*draw.integers(0, 20, 6).tolist()})]
            store.put_from(some, [random_page(key[0]) for key in some])
            served, to = read_pages(store, some)
            for key, found in zip(some[:served], to, strict=False):
                assert np.array_equal(found, random_page(key[0]))

    run_together(work)
    assert store.health().errors == store.health().timeouts == 0
    assert store.health().hits > 0


def test_a_closed_store_and_wrong_arguments(lasting: MooncakeServer, open_store: Open) -> None:
    store = open_store()
    for bad in (b"short", "x" * 32):
        with pytest.raises(ValueError, match="must be 32 bytes"):
            store.contains([bad])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="give one for each"):
        store.put_from(KEYS[:2], [random_page(1)])
    with pytest.raises(ValueError, match="read-only"):
        store.get_into(KEYS[:1], [b"abc"])
    client = store._started()
    store.close()
    store.close()
    assert client._process.poll() is not None
    for call in (store.health, store.clear, store.capacity, lambda: store.new_buffer(1)):
        with pytest.raises(kvcore.KVCacheError, match="closed"):
            call()
    with pytest.raises(ValueError, match="mooncake://"):
        MooncakeStore("redis://127.0.0.1:1")


FORK = """
    import os
    import kvcore
    from kvcore.stores import MooncakeStore
    store = MooncakeStore(sys.argv[1])
    store.put_from([bytes(32)], [b"a page"])
    child = os.fork()
    if child == 0:
        try:
            store.contains([bytes(32)])
        except kvcore.KVCacheError:
            os._exit(7)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(int(store.contains([bytes(32)])[0]))
    store.close()
"""


def test_a_child_of_fork_has_to_open_its_own(lasting: MooncakeServer) -> None:
    assert printed(FORK, f"{lasting.url}?prefix=forked&timeout=20", seed=1) == [7, 1]


def test_the_client_dies_and_comes_back(store: MooncakeStore) -> None:
    store.put_from(KEYS[:1], [random_page(0)])
    store._started()._process.kill()
    store._started()._process.wait()
    wait_until(lambda: read_pages(store, KEYS[:1])[0] > 0)
    assert store.health().errors <= 2


def test_an_interrupt_ends_the_process_that_uses_the_memory(
    store: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_from(KEYS[:1], [random_page(0)])
    client = store._started()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "_wait_for", interrupt)
    with pytest.raises(KeyboardInterrupt):
        read_pages(store, KEYS[:1])
    assert client._process.poll() is not None
    assert store._arena._free == [(0, store._arena.size)]
    assert read_pages(store, KEYS[:1])[0] == 1


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_while_the_client_begins_ends_its_process(
    store: MooncakeStore,
    lasting: MooncakeServer,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    popen, before = subprocess.Popen, threads_named("kvcore mooncake")

    def begin(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(*args, **options))
        return processes[-1]

    tier = parse_tier(lasting.url)
    assert isinstance(tier, MooncakeTier)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", begin)
        interrupt_starts(patch, "kvcore mooncake", moment, lambda: True)
        with pytest.raises(KeyboardInterrupt):
            MooncakeClient(tier, store._arena)
    assert [each.poll() is not None for each in processes] == [True]
    wait_until(lambda: threads_named("kvcore mooncake") == before)


def test_a_client_that_hangs_costs_one_time_out(lasting: MooncakeServer, open_store: Open) -> None:
    store = open_store(f"{lasting.url}?prefix=hung&timeout=0.5", breaker_seconds=2.0)
    store.put_from(KEYS[:4], [random_page(i) for i in range(4)])
    hang(store._started()._process.pid)
    began = time.monotonic()
    for _ in range(5):
        assert read_pages(store, KEYS[:4])[0] == 0
    assert time.monotonic() - began < 0.5 + 0.5
    assert (store.health().timeouts, store.health().breaker) == (1, "open")
    wait_until(lambda: read_pages(store, KEYS[:4])[0] > 0)
    assert store.health().breaker == "closed"


def test_a_reply_that_comes_when_its_call_was_given_up_is_dropped(store: MooncakeStore) -> None:
    """The reading thread holds the reply while another thread fails all calls."""
    assert raw(store)("exist", ["nothing"]) == [0]
    client = store._started()
    number, reply = client._expect()
    with client._lock:
        client._connection.send((number, "exist", ["nothing"]))
        time.sleep(0.5)  # now it waits for the lock
        client._waiting.clear()
    client.kill()
    wait_until(lambda: client._connection.closed)  # the last step of that thread
    assert reply.empty()


@pytest.fixture
def server(lasting: MooncakeServer) -> Iterator[MooncakeServer]:
    """A server that the test may kill; a new server starts."""
    lasting.close()
    with MooncakeServer() as mine:
        yield mine
    lasting.begin()


def test_nobody_is_there(server: MooncakeServer, open_store: Open) -> None:
    server.close()
    began = time.monotonic()
    store = open_store()
    for _ in range(3):
        assert store.contains(KEYS[:2]) == [False, False]
        assert store.put_from(KEYS[:1], [random_page(0)]).result() == 0
    assert time.monotonic() - began < 1
    health = store.health()
    assert (health.breaker, health.errors, health.timeouts) == ("open", 5, 0)


def test_a_master_that_hangs_does_not_stop_the_program(
    server: MooncakeServer, open_store: Open
) -> None:
    server.master.hang()
    ticks = 0
    began = time.monotonic()

    def tick() -> None:
        nonlocal ticks
        while time.monotonic() < began + 2:
            time.sleep(0.01)
            ticks += 1

    run_together(lambda i: tick() if i == 1 else open_store().close() if i == 0 else None)
    assert ticks > 100
    server.master.go_on()


@pytest.mark.parametrize("blow", ["kill", "hang"])
@pytest.mark.parametrize("who", ["master", "holder"])
def test_a_server_fails_and_comes_back(
    server: MooncakeServer, open_store: Open, who: str, blow: str
) -> None:
    store = open_store(f"{server.url}?timeout=0.5", breaker_seconds=0.5)
    assert store.put_from(KEYS[:8], [random_page(i) for i in range(8)]).result() == 8
    victim = getattr(server, who)
    getattr(victim, blow)()
    began = time.monotonic()
    for _ in range(10):
        served, to = read_pages(store, KEYS[:8])
        assert all(np.array_equal(to[i], random_page(i)) for i in range(served))
    assert time.monotonic() - began < 3 * 0.5 + 1  # a time-out, and one for each retry
    health = store.health()
    assert health.timeouts + health.errors > 0
    victim.go_on() if blow == "hang" else victim.start()
    ends = time.monotonic() + 60
    number = 100
    while True:  # a half-written value of a killed writer stays for a while
        number += 1
        key, value = bytes([number]) * 32, random_page(number)
        if store.put_from([key], [value]).result() and read_pages(store, [key])[0]:
            break
        assert time.monotonic() < ends
        time.sleep(0.2)
    assert store.health().breaker == "closed"


def test_a_full_store_keeps_serving(server: MooncakeServer, open_store: Open) -> None:
    store = open_store(f"{server.url}?timeout=20")
    size = 1 << 20
    stored = [
        store.put_from([bytes([i, j]) * 16], [random_page(i, size)]).result()
        for i in range(12)
        for j in range(10)
    ]
    assert sum(stored) < 120  # of 64 MB; the server chooses what to evict
    found = store.contains([bytes([i, j]) * 16 for i in range(12) for j in range(10)])
    assert 0 < sum(found) <= 64
    i, j = divmod(found.index(True), 10)
    served, to = read_pages(store, [bytes([i, j]) * 16], size)
    assert served == 1
    assert np.array_equal(to[0], random_page(i, size))
    assert store.health().breaker == "closed"
