# SPDX-License-Identifier: Apache-2.0
"""Speak version 2 of the Redis protocol on one connection to a server.

Replies are read directly into the caller's memory, and one deadline applies to a whole call. Other
clients create an object for each reply, which costs as much as the network, and apply a separate
time-out to each step.
https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl

__all__ = ["RespConnection", "RespError", "command"]

_SCRATCH_BYTES = 64 << 10
_LINE_BYTES = 512  # bytes per read of a line; few, as the rest is copied twice
_MOST_DEPTH = 8  # of nested arrays; the reply with a cluster's nodes has 4
_MOST_TEXT = 1 << 20  # bytes of a text that is not the value of a page
_MOST_AT_ONCE = 512  # pieces of memory per system call; Linux takes 1,024


class RespError(Exception):
    """Report that the server refused one command; other commands of the batch may have run."""


def command(*words: bytes) -> bytes:
    """Encode a command."""
    pieces = [b"*%d\r\n" % len(words)]
    for word in words:
        pieces.append(b"$%d\r\n%b\r\n" % (len(word), word))
    return b"".join(pieces)


class RespConnection:
    """Send commands and read their replies, in order.

    Parameters
    ----------
    host : str
    port : int
    ends : float
        Deadline of the call, as of ``time.monotonic``, including the time to connect; see `begin`.
    tls : ssl.SSLContext, optional
        If given, the connection is encrypted.

    Raises
    ------
    OSError
        From every method if the server is gone, or sends a reply outside the protocol; TimeoutError
        after the deadline. The connection cannot be read any more.
    """

    def __init__(
        self, host: str, port: int, ends: float, tls: ssl.SSLContext | None = None
    ) -> None:
        import socket  # not imported by `import kvcore`

        self._ends = ends
        plain = socket.create_connection((host, port), self._left())
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.settimeout(self._left())
            self._socket = plain if tls is None else tls.wrap_socket(plain, server_hostname=host)
        except BaseException:
            plain.close()
            raise
        self._scatters = tls is None
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._first = self._last = 0  # range of `_scratch` that is not read yet

    def begin(self, ends: float) -> None:
        """Begin a call with this deadline."""
        self._ends = ends

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send commands without a copy of their pieces."""
        if not self._scatters:
            for piece in pieces:
                self._limit()
                self._socket.sendall(piece)
            return
        left = [memoryview(piece) for piece in pieces]
        first = 0
        while first < len(left):
            self._limit()
            sent = self._socket.sendmsg(left[first : first + _MOST_AT_ONCE])
            while first < len(left) and sent >= len(left[first]):
                sent -= len(left[first])
                first += 1
            if sent:
                left[first] = left[first][sent:]

    def read_simple(self) -> int | bytes | None:
        """Read a number, a status or a short text; return None for a nil.

        Raises
        ------
        RespError
            The reply is an error.
        """
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b":":
            return _number(rest)
        if kind == b"+":
            return rest
        if kind == b"-":
            raise RespError(rest.decode("utf-8", "replace"))
        if kind == b"$":
            size = _size(rest)
            if size is not None and size > _MOST_TEXT:
                raise OSError(f"a reply has a text of {size} bytes, must be at most {_MOST_TEXT}")
            return None if size is None else self._text(size)
        raise OSError(f"a reply begins with {kind!r}, which the protocol does not have")

    def read_list(self) -> list[Any]:
        """Read an array of numbers, texts, nils and further arrays."""
        return self._list(0)

    def _list(self, depth: int) -> list[Any]:
        line = self._line()
        if line[:1] == b"-":
            raise RespError(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"*":
            raise OSError(f"a reply begins with {line[:1]!r}, must be an array")
        if depth == _MOST_DEPTH:
            raise OSError(f"a reply has arrays in arrays {depth} deep, must be less")
        found: list[Any] = []
        for _ in range(_number(line[1:])):
            is_list = self._peek() == b"*"
            found.append(self._list(depth + 1) if is_list else self.read_simple())
        return found

    def begin_value(self) -> int | None:
        """Read the size of a value for `read_into` and `end_value`; return None for a nil.

        Raises
        ------
        RespError
            The reply is an error.
        """
        line = self._line()
        if line[:1] == b"-":
            raise RespError(line[1:].decode("utf-8", "replace"))
        if line[:1] != b"$":
            raise OSError(f"a reply begins with {line[:1]!r}, must be a value")
        return _size(line[1:])

    def read_into(self, to: memoryview) -> None:
        """Read the next bytes of a value into memory."""
        there = min(len(to), self._last - self._first)
        to[:there] = self._scratch[self._first : self._first + there]
        self._first += there
        to = to[there:]
        while to:
            # The same system call also reads the bytes after the value.
            self._limit()
            if self._scatters:
                got = self._socket.recvmsg_into([to, self._scratch[:_LINE_BYTES]])[0]
            else:
                got = self._socket.recv_into(to)
            if got == 0:
                raise ConnectionResetError("the server closed the connection")
            if got > len(to):
                self._first, self._last = 0, got - len(to)
            to = to[got:]

    def read(self, size: int) -> bytes:
        """Read the next bytes of a value, for small sizes."""
        found = bytearray(size)
        self.read_into(memoryview(found))
        return bytes(found)

    def skip(self, size: int) -> None:
        """Read and drop bytes of a value."""
        while size:
            if self._first == self._last:
                self._receive()
            there = min(size, self._last - self._first)
            self._first += there
            size -= there

    def end_value(self) -> None:
        """Read the end of a value."""
        if self.read(2) != b"\r\n":
            raise OSError("a value is longer than its declared size")

    def read_number(self) -> int:
        """Read a number.

        Raises
        ------
        RespError
            The reply is an error.
        """
        found = self.read_simple()
        if not isinstance(found, int):
            raise OSError(f"a reply is {found!r:.40}, must be a number")
        return found

    def _text(self, size: int) -> bytes:
        found = self.read(size)
        self.end_value()
        return found

    def _peek(self) -> bytes:
        if self._first == self._last:
            self._receive()
        return bytes(self._scratch[self._first : self._first + 1])

    def _line(self) -> bytes:
        found = b""
        while True:
            if self._first == self._last:
                self._receive()
            known = len(found)
            found += bytes(self._scratch[self._first : min(self._last, self._first + _LINE_BYTES)])
            end = found.find(b"\r\n")
            if end >= 0:
                self._first += end + 2 - known
                return found[:end]
            if len(found) > _SCRATCH_BYTES:
                raise OSError("a line of a reply does not end")
            self._first += len(found) - known

    def _receive(self) -> None:
        """Fill the scratch after all its bytes were read."""
        self._limit()
        self._first, self._last = 0, self._socket.recv_into(self._scratch)
        if self._last == 0:
            raise ConnectionResetError("the server closed the connection")

    def _limit(self) -> None:
        self._socket.settimeout(self._left())

    def _left(self) -> float:
        left = self._ends - monotonic()
        if left <= 0:
            raise TimeoutError("the server took too long")
        return left


def _size(text: bytes) -> int | None:
    """Return the bytes of a value; None for a nil, whose size is -1."""
    size = _number(text)
    if size < -1:
        raise OSError(f"the size of a value is {size}, must be at least -1")
    return None if size < 0 else size


def _number(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 18:
        raise OSError(f"a reply has {text[:40]!r} where a number must be")
    return int(text)
