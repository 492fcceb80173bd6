# SPDX-License-Identifier: Apache-2.0
"""Keep pages in a server that speaks the Redis protocol."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

from kvcore.stores.page_values import (
    Found,
    Parts,
    pages_of,
    read_value,
    skip_value,
    value_of,
)
from kvcore.stores.protocol import (
    FinishedHandle,
    PageBuffers,
    StoreCapacity,
    StoreHandle,
)
from kvcore.stores.redis_nodes import RedisLink, RedisNodes, is_moved
from kvcore.stores.resp import RespConnection, RespError, command
from kvcore.stores.server_store import ServerStore
from kvcore.stores.specs import RedisTier, parse_tier

__all__ = ["RedisStore"]

_Result = TypeVar("_Result")

_MOST_NAMES = 1_000_000_000  # for a server that refuses DBSIZE


class RedisStore(ServerStore):
    """Keep pages in Redis, Valkey or a compatible server, for any number of processes.

    A page is one value, so either all its parts are stored or no part is. Its name is `prefix` and
    the page's key, which reveals no token. The first value of a name stays.

    Parameters
    ----------
    tier : str or RedisTier
        For example ``"redis://127.0.0.1:6379"``, or ``"rediss://"`` for TLS; see `parse_tier`. If
        it has no password, the store uses ``KVCORE_REDIS_PASSWORD`` and ``KVCORE_REDIS_USERNAME``.
    breaker_failures : int
        After this number of consecutive failures, or after one time-out, no call starts for
        `breaker_seconds`.
    breaker_seconds : float

    Raises
    ------
    ValueError
        `tier` is not a Redis tier.
    OSError
        The file of ``tier.ca_certs`` cannot be read.

    Notes
    -----
    One server of a Redis Cluster is enough to find the others; pages are spread over all servers.
    Any number of threads may use the store, each with its own connection. The store connects at its
    first use, and again after each failure. A failure of the server does not raise: it is a miss,
    and counts in `health`. A batch is one round trip, and takes at most ``tier.seconds``, for any
    number of pages. After ``close()``, and in a child of ``os.fork``, every call raises
    KVCacheError. The store checks only the form of a value. A manager therefore adds a label and a
    CRC to its pages, and checks both.

    Examples
    --------
    >>> from kvcore.stores import RedisStore
    >>> store = RedisStore("redis://127.0.0.1:6379?ttl=3600")  # doctest: +SKIP
    >>> store.put_from([bytes(32)], [b"a page"]).result()  # doctest: +SKIP
    1
    """

    _failures: ClassVar = (OSError, RespError)

    def __init__(
        self,
        tier: str | RedisTier,
        *,
        breaker_failures: int = 5,
        breaker_seconds: float = 10.0,
    ) -> None:
        spec = parse_tier(tier) if isinstance(tier, str) else tier
        if not isinstance(spec, RedisTier):
            raise ValueError(
                f"tier is {tier!r}, must be a Redis tier such as 'redis://127.0.0.1:6379'"
            )
        self.tier = spec
        self._nodes = RedisNodes(spec)
        server = f"the Redis server at {spec.host}:{spec.port}"
        super().__init__(server, spec.prefix, breaker_failures, breaker_seconds)

    def __repr__(self) -> str:
        return f"RedisStore({self.tier})"

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each page whether it is stored. One round trip."""
        names = self._names(keys)

        def ask(link: RedisLink) -> list[bool]:
            link.send((name, [command(b"EXISTS", name)]) for name in names)
            return [link.of(name).read_number() == 1 for name in names]

        return self._call(ask, [False] * len(names))

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Read pages into memory, up to the first page that is not stored. One round trip.

        Parameters
        ----------
        keys : sequence of bytes [n]
            32 bytes each.
        buffers : sequence of buffers [n]
            For each key, writable contiguous memory with the page's size in bytes; or a list of
            memory, part by part, with None for parts to skip.
        """
        names = self._names(keys)
        pages = pages_of(names, buffers, is_written=True)

        def read(link: RedisLink) -> int:
            link.send((name, [command(b"GET", name)]) for name in names)
            served, found = 0, Found.ALL
            for name, parts in zip(names, pages, strict=True):
                if found is not Found.ALL:
                    skip_value(link.of(name))
                    continue
                found = read_value(link.of(name), parts)
                served += found is Found.ALL
            if found is Found.WRONG:
                self._count(corrupt=1)
                _unlink(link, [names[served]])
            return served

        served = self._call(read, 0)
        out = sum(len(view) for parts in pages[:served] for view in parts.values())
        self._count(hits=served, misses=len(names) - served, bytes_out=out)
        return FinishedHandle(served)

    def put_from(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Store pages from memory, except pages that are already stored. One round trip.

        Parameters
        ----------
        keys : sequence of bytes [n]
            32 bytes each.
        buffers : sequence of buffers [n]
            For each key, contiguous memory, or a list of memory, part by part: with a list, a
            stored page, maybe with other parts, is replaced.
        """
        names = self._names(keys)
        pages = pages_of(names, buffers, is_written=False)

        def write(link: RedisLink) -> list[bool]:
            pairs = zip(names, pages, strict=True)
            link.send((name, [*self._set(name, parts)]) for name, parts in pairs)
            return [self._is_stored(link.of(name)) for name in names]

        stored = self._call(write, [False] * len(names))
        sizes = [sum(map(len, parts.values())) for parts in pages]
        self._count(bytes_in=sum(n for n, is_new in zip(sizes, stored, strict=True) if is_new))
        return FinishedHandle(sum(stored))

    def remove(self, keys: Sequence[bytes]) -> int:
        """Remove pages; return the number of removed pages. One round trip."""
        names = self._names(keys)
        return self._call(lambda link: _unlink(link, names), 0)

    def clear(self) -> int:
        """Remove all pages with this prefix, including pages that other processes stored.

        Pages that other processes store meanwhile may stay: after a change of weights use another
        fingerprint. One round trip for each 1,000 names of the server.
        """

        def clear(link: RedisLink) -> int:
            return sum(self._clear_one(link, each) for each in link.all())

        self._require_open()
        return self._call(clear, 0)

    def _clear_one(self, link: RedisLink, connection: RespConnection) -> int:
        connection.send([command(b"DBSIZE")])
        try:
            there = connection.read_number()
        except RespError:  # a user without DBSIZE may still clear
            there = _MOST_NAMES
        most = 1000 + there  # replies; each covers 1,000 places of its table
        removed, cursor = 0, b"0"
        for _ in range(most):
            link.extend(self.tier.seconds)
            scan = [b"SCAN", cursor, b"MATCH", self._prefix + b"*", b"COUNT", b"1000"]
            connection.send([command(*scan)])
            match connection.read_list():
                case [bytes(cursor), list(names)] if all(type(n) is bytes for n in names):
                    removed += _unlink(link, names)
                case other:
                    raise OSError(f"SCAN returns {other!r:.40}, must be a cursor and names")
            if cursor == b"0":
                return removed
        raise OSError(f"SCAN has not ended after {most} replies")

    def capacity(self) -> StoreCapacity:
        """Return the server's memory, which others also use, and its number of names.

        For a cluster, the sums over all its nodes.
        """

        def ask(link: RedisLink) -> StoreCapacity:
            found = [_capacity_of(each) for each in link.all()]
            sizes = [each.bytes for each in found if each.bytes is not None]
            return StoreCapacity(
                sum(sizes) if len(sizes) == len(found) else None,
                sum(each.used_bytes for each in found),
                sum(each.pages for each in found),
            )

        self._require_open()
        return self._call(ask, StoreCapacity(None, 0, 0))

    def close(self) -> None:
        """Disconnect. Calls in flight in other threads finish."""
        self._is_closed = True
        if os.getpid() == self._process:
            self._nodes.close()

    # ---- names and values ----------------------------------------
    def _set(self, name: bytes, parts: Parts) -> Iterator[bytes | memoryview]:
        options = [] if max(parts) > 0 else [b"NX"]
        if self.tier.ttl is not None:
            options += [b"PX", b"%d" % max(1, round(self.tier.ttl * 1000))]
        size, pieces = value_of(parts)
        yield b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n" % (3 + len(options), len(name), name)
        yield b"$%d\r\n" % size
        yield from pieces
        yield b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in options)

    def _is_stored(self, connection: RespConnection) -> bool:
        try:
            connection.read_simple()  # None: a page is already stored
        except RespError as error:
            if is_moved(error):
                raise
            self._note(error, "a page was not stored")
            return False
        return True

    def _call(self, work: Callable[[RedisLink], _Result], failed: _Result) -> _Result:
        """Run a function within one time-out; return `failed` if it fails."""
        return self._guard(lambda: self._nodes.call(work, self.tier.seconds), failed)


def _capacity_of(connection: RespConnection) -> StoreCapacity:
    connection.send([command(b"INFO", b"memory"), command(b"DBSIZE")])
    info = connection.read_simple()
    pages = connection.read_number()
    if not isinstance(info, bytes):
        raise OSError(f"INFO returns {info!r:.40}, must be a text")
    found = dict(re.findall(rb"^(maxmemory|used_memory):(\d+)", info, re.M))
    most, used = (int(found.get(name, 0)) for name in (b"maxmemory", b"used_memory"))
    return StoreCapacity(most or None, used, pages)


def _unlink(link: RedisLink, names: Sequence[bytes]) -> int:
    link.send((name, [command(b"UNLINK", name)]) for name in names)
    return sum(link.of(name).read_number() for name in names)
