# SPDX-License-Identifier: Apache-2.0
"""Servers that answer too slowly in small pieces, or whose replies break the protocol."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvcore.stores import RedisStore
from kvcore.stores.resp import RespConnection, command

KEYS = [bytes([i]) * 32 for i in range(3)]
CALLS: dict[str, tuple[Callable[[RedisStore], object], object]] = {
    "contains": (lambda store: store.contains(KEYS[:1]), [False]),
    "get": (lambda store: store.get_into(KEYS[:1], [bytearray(9)]).result(), 0),
    "put": (lambda store: store.put_from(KEYS[:1], [b"a page"]).result(), 0),
    "remove": (lambda store: store.remove(KEYS[:1]), 0),
    "clear": (lambda store: store.clear(), 0),
    "capacity": (lambda store: store.capacity().pages, 0),
}


class FakeServer:
    """Answers each received piece with the next reply after some time; repeats the last reply."""

    def __init__(self, replies: list[bytes], seconds: float = 0.0) -> None:
        self._replies, self._seconds = replies, seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        replies = itertools.chain(self._replies, itertools.repeat(self._replies[-1]))
        with contextlib.suppress(OSError), client:
            while client.recv(1 << 16):
                time.sleep(self._seconds)
                reply = next(replies)
                client.sendall(reply[:1])  # sends the reply in pieces
                client.sendall(reply[1:])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


@pytest.fixture
def fake() -> Iterator[Callable[..., int]]:
    with contextlib.ExitStack() as stack:

        def start(*replies: bytes, seconds: float = 0.0) -> int:
            server = stack.enter_context(contextlib.closing(FakeServer([*replies], seconds)))
            return int(server.port)

        yield start


def test_one_time_is_for_all_that_a_call_does(fake: Callable[..., int]) -> None:
    """Connecting, the password, the database and the reply are each a bit late."""
    port = fake(b"+OK\r\n", seconds=0.2)
    url = f"redis://user:secret@127.0.0.1:{port}/3?timeout=0.3"
    with contextlib.closing(RedisStore(url)) as store:
        began = time.monotonic()
        assert store.contains(KEYS) == [False] * 3
        assert time.monotonic() - began < 0.55
        assert (store.health().timeouts, store.health().breaker) == (1, "open")


GARBAGE = [
    *(b"$abc\r\n", b":x\r\n", b"+OK\r\n", b"$-7\r\n", b"*1\r\n:1\r\n", b"*-1\r\n", b"?\r\n"),
    *(b"$5\r\nabcdefg\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b":" + b"9" * 40 + b"\r\n"),
    *(b"*2\r\n:1\r\n:2\r\n", b"*2\r\n$1\r\n0\r\n*1\r\n:1\r\n", b"-ERR no\r\n", b"\r\n"),
    b"$1\r\nx\r\n",
]


@pytest.mark.parametrize("reply", GARBAGE)
def test_no_reply_raises(fake: Callable[..., int], reply: bytes) -> None:
    url = f"redis://127.0.0.1:{fake(reply)}?timeout=0.15"
    for name, (call, nothing) in CALLS.items():
        with contextlib.closing(RedisStore(url)) as store:
            answer = call(store)
            is_right = name == "put" and reply in (b"+OK\r\n", b"$1\r\nx\r\n")
            assert answer == (1 if is_right else nothing)


def test_a_search_for_names_that_does_not_end(fake: Callable[..., int]) -> None:
    port = fake(b":3\r\n", b"*2\r\n$1\r\n7\r\n*0\r\n")
    with contextlib.closing(RedisStore(f"redis://127.0.0.1:{port}?timeout=5")) as store:
        assert store.clear() == 0
        assert store.health().errors == 1


@pytest.mark.parametrize("depth", [9, 2_000, 200_000])
def test_arrays_in_arrays_are_no_reply(fake: Callable[..., int], depth: int) -> None:
    port = fake(b"*1\r\n" * depth + b"*0\r\n")
    connection = RespConnection("127.0.0.1", port, time.monotonic() + 60)
    with contextlib.closing(connection):
        connection.send([command(b"CLUSTER", b"SLOTS")])
        with pytest.raises(OSError, match="arrays in arrays 8 deep"):
            connection.read_list()


def test_a_text_that_no_memory_holds_is_no_reply(fake: Callable[..., int]) -> None:
    port = fake(b"$999999999999999999\r\nx")
    connection = RespConnection("127.0.0.1", port, time.monotonic() + 60)
    with contextlib.closing(connection):
        connection.send([command(b"INFO")])
        with pytest.raises(OSError, match="must be at most 1048576"):
            connection.read_simple()
