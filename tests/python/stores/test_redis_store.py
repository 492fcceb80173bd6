# SPDX-License-Identifier: Apache-2.0
"""Pages in a server that others also use, and that fails: no call raises, and no page is wrong."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcore
from conftest import require, require_program
from kvcore.stores import BlockStore, RedisStore
from programs import printed
from redis_server import RedisServer, free_port
from stored_pages import random_page, read_pages
from together import run_together

require("redis")

KEYS = [bytes([i]) * 32 for i in range(20)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as started:
        yield started


@pytest.fixture
def open_store() -> Iterator[Callable[..., RedisStore]]:
    """Return a function that opens stores, and close them after the test."""
    with contextlib.ExitStack() as stack:

        def open_one(tier: str, **options: Any) -> RedisStore:
            return stack.enter_context(contextlib.closing(RedisStore(tier, **options)))

        yield open_one


Open = Callable[..., RedisStore]


def test_what_is_stored_is_served_up_to_the_first_hole(
    server: RedisServer, open_store: Open
) -> None:
    store = open_store(server.url)
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
    assert store.capacity().pages == 8
    assert store.put_from([], []).result() == store.get_into([], []).result() == 0
    assert store.contains([]) == []
    assert store.remove([]) == 0
    store.close()


def test_names_reveal_the_key_alone_and_the_first_value_stays(
    server: RedisServer, open_store: Open
) -> None:
    one, other = open_store(server.url), open_store(server.url)
    one.put_from(KEYS[:1], [random_page(1)])
    other.put_from(KEYS[:1], [random_page(2)])
    assert np.array_equal(read_pages(other, KEYS[:1])[1][0], random_page(1))
    client = server.client()
    assert client.keys() == [b"kvcore:" + KEYS[0].hex().encode()]
    assert client.ttl(client.keys()[0]) == -1
    # Stores with another prefix share no page, and clear only their own pages.
    apart = open_store(f"{server.url}?prefix=mine&ttl=60")
    assert apart.contains(KEYS[:1]) == [False]
    apart.put_from(KEYS[:3], [random_page(i) for i in range(3)])
    assert 50 < client.ttl(b"mine:" + KEYS[1].hex().encode()) <= 60
    client.set("kvcore-of-somebody-else", "x")
    assert apart.clear() == 3
    assert one.contains(KEYS[:1]) == [True]
    assert one.clear() == 1
    assert client.keys() == [b"kvcore-of-somebody-else"]


def test_a_user_who_may_not_count_names_may_clear(server: RedisServer, open_store: Open) -> None:
    rights = [f"+{each}" for each in ("get", "set", "exists", "unlink", "scan")]
    server.client().acl_setuser("few", True, passwords=["+pw"], keys=["*"], commands=rights)
    store = open_store(f"redis://few:pw@127.0.0.1:{server.port}")
    store.put_from(KEYS[:3], [random_page(i) for i in range(3)])
    assert store.clear() == 3
    assert server.client().dbsize() == 0


def test_parts_of_pages_are_one_value(server: RedisServer, open_store: Open) -> None:
    store = open_store(server.url)
    parts = [random_page(i, 100 * i + 1) for i in range(4)]
    assert store.put_from(KEYS[:1], [[None, parts[1], None, parts[3]]]).result() == 1
    to = [None, None, None, np.zeros_like(parts[3])]
    assert store.get_into(KEYS[:1], [to]).result() == 1
    assert np.array_equal(to[3], parts[3])
    for lacking in (
        [np.zeros_like(parts[0])],
        [None, np.zeros_like(parts[1]), np.zeros(1, np.uint8)],
        [None] * 5 + [np.zeros(1, np.uint8)],
    ):
        assert store.get_into(KEYS[:1], [lacking]).result() == 0
    assert store.put_from(KEYS[:1], [parts]).result() == 1  # the stored page has more parts
    both = [np.zeros_like(each) for each in parts]
    assert store.get_into(KEYS[:1], [both]).result() == 1
    assert all(np.array_equal(*each) for each in zip(parts, both, strict=True))


def test_values_that_others_have_spoilt_are_misses(server: RedisServer, open_store: Open) -> None:
    store, client = open_store(server.url), server.client()
    store.put_from(KEYS[:3], [random_page(i) for i in range(3)])
    name = b"kvcore:" + KEYS[1].hex().encode()
    value = client.get(name)
    for bad in (
        b"",
        b"x",
        value[:7],
        value[:20],
        value[:-1],
        value + b"x",
        b"KVP1\xff\xff\xff\xff",
    ):
        client.set(name, bad)
        assert read_pages(store, KEYS[:3])[0] == 1
        assert client.get(name) is None
        # The connection still works.
        assert np.array_equal(read_pages(store, KEYS[2:3])[1][0], random_page(2))
    assert store.health().corrupt == 7
    client.rpush(name, "a list")
    assert read_pages(store, KEYS[:3])[0] == 0
    assert store.health().errors == 1
    assert read_pages(store, KEYS[:1])[0] == 1


def test_a_server_that_is_gone_is_a_miss_until_it_is_back(
    server: RedisServer, caplog: pytest.LogCaptureFixture, open_store: Open
) -> None:
    store = open_store(server.url, breaker_seconds=0.2)
    store.put_from(KEYS[:1], [random_page(0)])
    server.kill()
    for _ in range(5):
        assert store.contains(KEYS[:2]) == [False, False]
        assert read_pages(store, KEYS[:2])[0] == 0
        assert store.put_from(KEYS[:1], [random_page(0)]).result() == 0
        assert store.remove(KEYS[:1]) == store.clear() == store.capacity().pages == 0
    assert store.health().breaker == "open"
    assert store.health().errors == 5  # after five errors the store makes no more calls
    assert len(caplog.records) == 1
    assert f"127.0.0.1:{server.port}" in caplog.text
    server.start()
    time.sleep(0.25)
    assert store.health().breaker == "half-open"
    assert store.put_from(KEYS[:1], [random_page(0)]).result() == 1
    assert store.health().breaker == "closed"
    assert read_pages(store, KEYS[:1])[0] == 1


def test_a_restarted_server_is_not_an_error(server: RedisServer, open_store: Open) -> None:
    """The store reconnects idle connections."""
    store = open_store(server.url)

    def ask(_: int) -> None:
        store.contains(KEYS)

    run_together(ask)
    server.kill()
    server.start()
    assert store.put_from(KEYS[:1], [random_page(0)]).result() == 1
    assert store.health().errors == 0


def test_a_server_that_hangs_costs_one_time_out(server: RedisServer, open_store: Open) -> None:
    store = open_store(f"{server.url}?timeout=0.3", breaker_seconds=0.5)
    store.put_from(KEYS[:8], [random_page(i) for i in range(8)])
    server.hang()
    began = time.monotonic()
    assert read_pages(store, KEYS[:8])[0] == 0
    for _ in range(10):
        assert store.contains(KEYS) == [False] * len(KEYS)
    assert time.monotonic() - began < 0.3 + 0.5
    health = store.health()
    assert (health.breaker, health.timeouts, health.errors) == ("open", 1, 0)
    server.go_on()
    time.sleep(0.55)
    assert read_pages(store, KEYS[:8])[0] == 8


def test_a_new_connection_to_a_server_that_hangs_times_out(
    server: RedisServer, open_store: Open
) -> None:
    server.hang()
    store = open_store(f"{server.url}?timeout=0.2")
    began = time.monotonic()
    assert store.contains(KEYS[:1]) == [False]
    assert time.monotonic() - began < 1
    assert store.health().timeouts == 1


def test_a_slow_batch_ends_as_a_whole(tmp_path: Path, open_store: Open) -> None:
    """The time-out is for the whole batch, not for each piece that arrives."""
    with RedisServer(tmp_path) as server, Trickle(server.port, seconds=0.05) as slow:
        store = open_store(f"redis://127.0.0.1:{slow.port}?timeout=0.3")
        open_store(server.url).put_from(KEYS[:1], [random_page(0, 1 << 20)])
        began = time.monotonic()
        assert read_pages(store, KEYS[:1], 1 << 20)[0] == 0
        assert time.monotonic() - began < 1
        assert store.health().timeouts == 1


def test_a_full_server_does_not_store(tmp_path: Path, open_store: Open) -> None:
    with RedisServer(tmp_path, "--maxmemory", "3mb") as server:  # the server uses 1 MB itself
        store = open_store(server.url)
        stored = store.put_from(KEYS, [random_page(i, 400_000) for i in range(20)]).result()
        assert 0 < stored < 20
        assert store.health().errors == 20 - stored
        assert store.health().breaker == "closed"
        there = store.contains(KEYS)
        assert sum(there) == stored
        assert store.capacity().bytes == 3 << 20
        assert read_pages(store, KEYS[:1], 400_000)[0] == 1


def test_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_store: Open) -> None:
    with RedisServer(tmp_path, "--requirepass", "se/cret") as server:
        for url in (server.url, f"redis://:wrong@127.0.0.1:{server.port}"):
            store = open_store(url)
            assert store.put_from(KEYS[:1], [random_page(0)]).result() == 0
            assert store.health().errors == 1
        right = open_store(f"redis://:se%2Fcret@127.0.0.1:{server.port}/1")
        assert right.put_from(KEYS[:1], [random_page(0)]).result() == 1
        assert "cret" not in repr(right)
        monkeypatch.setenv("KVCORE_REDIS_PASSWORD", "se/cret")
        assert open_store(f"{server.url}/1").contains(KEYS[:1]) == [True]
        assert open_store(server.url).contains(KEYS[:1]) == [False]  # another database


def test_tls(tmp_path: Path, open_store: Open) -> None:
    openssl = require_program("openssl")
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", key, "-out", certificate, "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(key))
    tls_port = free_port()
    options = ("--tls-port", str(tls_port), "--tls-auth-clients", "no", *files)
    with RedisServer(tmp_path, *options):
        url = f"rediss://127.0.0.1:{tls_port}"
        store = open_store(f"{url}?ca_certs={certificate}")
        pages = [random_page(i, 300_000) for i in range(5)]
        assert store.put_from(KEYS[:5], pages).result() == 5
        served, found = read_pages(store, KEYS[:5], 300_000)
        assert served == 5
        assert all(np.array_equal(*each) for each in zip(pages, found, strict=True))
        unknown = open_store(url)  # its certificate is not trusted
        assert unknown.contains(KEYS[:1]) == [False]
        assert unknown.health().errors == 1


def test_threads_on_one_store(server: RedisServer, open_store: Open) -> None:
    store = open_store(server.url)

    def work(seed: int) -> None:
        order = random.Random(seed)
        for _ in range(60):
            i = order.randrange(18)
            if order.random() < 0.4:
                store.put_from(KEYS[i : i + 2], [random_page(i), random_page(i + 1)])
            elif order.random() < 0.2:
                store.remove(KEYS[i : i + 1])
            served, found = read_pages(store, KEYS[i : i + 2])
            for k in range(served):
                assert np.array_equal(found[k], random_page(i + k))

    run_together(work)
    assert store.health().errors == 0
    store.close()
    assert not store._nodes._idle


FORK = """
    import os
    import kvcore
    from kvcore.stores import RedisStore
    store = RedisStore(sys.argv[1])
    keys = [bytes(32)]
    store.put_from(keys, [b"a page"])
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (store.health, lambda: store.contains(keys), lambda: store.remove(keys)):
            try:
                call()
            except kvcore.KVCacheError as error:
                refused += "fork" in str(error)
        store.close()
        os._exit(refused)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), store.contains(keys)[0] + 0)
    store.close()
"""


def test_a_fork_is_refused_and_harms_nobody(server: RedisServer) -> None:
    assert printed(FORK, server.url, seed=1) == [3, 1]


def test_closed_stores_are_refused(server: RedisServer, open_store: Open) -> None:
    store = open_store(server.url)
    store.contains(KEYS)
    store.close()
    store.close()
    for call in (store.health, lambda: store.contains(KEYS), lambda: store.remove(KEYS)):
        with pytest.raises(kvcore.KVCacheError, match="is closed"):
            call()


def test_wrong_arguments_change_nothing(server: RedisServer, open_store: Open) -> None:
    store = open_store(server.url)
    for keys, buffers, text in (
        ([b"short"], [random_page(0)], "must be 32 bytes"),
        (KEYS[:2], [random_page(0)], "2 keys, but 1 buffers"),
        (KEYS[:1], [[None]], "a page of 0 parts"),
        (KEYS[:1], [[random_page(0)] * 65], "a page of 65 parts"),
    ):
        with pytest.raises(ValueError, match=text):
            store.put_from(keys, buffers)
    with pytest.raises(ValueError, match="read-only"):
        store.get_into(KEYS[:1], [bytes(9)])
    with pytest.raises(TypeError):
        store.put_from(KEYS[:1], [9])
    with pytest.raises(ValueError, match="must be a Redis tier such as 'redis://"):
        RedisStore("disk:/tmp:1GiB")
    assert server.client().dbsize() == 0


# ---- helpers ----------------------------------------
class Trickle:
    """Forwards the server's replies, a little at a time."""

    def __init__(self, port: int, seconds: float) -> None:
        self._seconds, self._target = seconds, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._target))
        with client, server:
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(4096)
                    if not data:
                        return
                    if ready is server:
                        time.sleep(self._seconds if len(data) > 1000 else 0)
                    try:
                        (client if ready is server else server).sendall(data)
                    except OSError:
                        return

    def __enter__(self) -> Any:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(5)
        self._listener.close()
