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

_MOST_NAMES = 1_000_000_000  # of a server that does not tell


class RedisStore(ServerStore):
    """Keep pages in Redis, Valkey or another server of that protocol, for any number of processes.

    A page is one value, so its parts are there together or not at all. Its name is `prefix` and the
    page's key, which reveals no token. The first value of a name stays.

    Parameters
    ----------
    tier : str or RedisTier
        Such as ``"redis://127.0.0.1:6379"``, or ``"rediss://"`` for TLS; see `parse_tier`. Where it
        has no password, ``KVCORE_REDIS_PASSWORD`` is taken, and ``KVCORE_REDIS_USERNAME``.
    breaker_failures : int
        After so many failures in a row nothing is tried for `breaker_seconds`; after one that took
        too long at once.
    breaker_seconds : float

    Raises
    ------
    ValueError
        `tier` is none of Redis.
    OSError
        The file of ``tier.ca_certs`` cannot be read.

    Notes
    -----
    One server of a Redis Cluster is enough to find the others; pages lie on all of them. Any number
    of threads, each with a connection of its own. It connects when it is first used, and again
    after each failure: no call raises because the server fails; that is a miss, and counts in
    `health`. A batch is one round trip, and takes at most ``tier.seconds``, however many pages it
    has. After ``close()``, and in a child of ``os.fork``, every call raises KVCacheError. Of a
    value no more than its form is checked here: a manager adds a label and a CRC to what it stores,
    and checks both.

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
            raise ValueError(f"tier is {tier!r}, must be one such as 'redis://127.0.0.1:6379'")
        self.tier = spec
        self._nodes = RedisNodes(spec)
        server = f"the Redis server at {spec.host}:{spec.port}"
        super().__init__(server, spec.prefix, breaker_failures, breaker_seconds)

    def __repr__(self) -> str:
        return f"RedisStore({self.tier})"

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell of each page whether it is stored. One round trip."""
        names = self._names(keys)

        def ask(link: RedisLink) -> list[bool]:
            link.send((name, [command(b"EXISTS", name)]) for name in names)
            return [link.of(name).read_number() == 1 for name in names]

        return self._call(ask, [False] * len(names))

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[PageBuffers]) -> StoreHandle:
        """Read pages into memory, up to the first that is not there. One round trip.

        Parameters
        ----------
        keys : sequence of bytes [n]
            32 bytes each.
        buffers : sequence of buffers [n]
            For each key writable contiguous memory with as many bytes as the page has; or a list of
            it, part by part, with None for parts that are not wanted.
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
        """Store pages from memory, but those that are there. One round trip.

        Parameters
        ----------
        keys : sequence of bytes [n]
            32 bytes each.
        buffers : sequence of buffers [n]
            For each key contiguous memory, or a list of it, part by part: then a page that is
            there, maybe with other parts, is replaced.
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
        """Forget pages; return how many there were. One round trip."""
        names = self._names(keys)
        return self._call(lambda link: _unlink(link, names), 0)

    def clear(self) -> int:
        """Forget all pages with this prefix, those that others have stored included.

        What others store meanwhile may stay: after a change of weights take another fingerprint.
        One round trip for each 1,000 names of the server.
        """

        def clear(link: RedisLink) -> int:
            return sum(self._clear_one(link, each) for each in link.all())

        self._require_open()
        return self._call(clear, 0)

    def _clear_one(self, link: RedisLink, connection: RespConnection) -> int:
        connection.send([command(b"DBSIZE")])
        try:
            there = connection.read_number()
        except RespError:  # who may not ask may clear all the same
            there = _MOST_NAMES
        most = 1000 + there  # replies; each is for 1,000 places of its table
        removed, cursor = 0, b"0"
        for _ in range(most):
            link.extend(self.tier.seconds)
            scan = [b"SCAN", cursor, b"MATCH", self._prefix + b"*", b"COUNT", b"1000"]
            connection.send([command(*scan)])
            match connection.read_list():
                case [bytes(cursor), list(names)] if all(type(n) is bytes for n in names):
                    removed += _unlink(link, names)
                case other:
                    raise OSError(f"SCAN answers {other!r:.40}, must be a cursor and names")
            if cursor == b"0":
                return removed
        raise OSError(f"SCAN has not ended after {most} replies")

    def capacity(self) -> StoreCapacity:
        """Return the memory of the server, which others use as well, and the names that it has.

        Of a cluster, of all its nodes together.
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
        """Disconnect. Calls under way in other threads come to their end."""
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
            connection.read_simple()  # None: it is there
        except RespError as error:
            if is_moved(error):
                raise
            self._note(error, "a page was not stored")
            return False
        return True

    def _call(self, work: Callable[[RedisLink], _Result], failed: _Result) -> _Result:
        """Do something within one time-out; what fails is `failed`."""
        return self._guard(lambda: self._nodes.call(work, self.tier.seconds), failed)


def _capacity_of(connection: RespConnection) -> StoreCapacity:
    connection.send([command(b"INFO", b"memory"), command(b"DBSIZE")])
    info = connection.read_simple()
    pages = connection.read_number()
    if not isinstance(info, bytes):
        raise OSError(f"INFO answers {info!r:.40}, must be a text")
    found = dict(re.findall(rb"^(maxmemory|used_memory):(\d+)", info, re.M))
    most, used = (int(found.get(name, 0)) for name in (b"maxmemory", b"used_memory"))
    return StoreCapacity(most or None, used, pages)


def _unlink(link: RedisLink, names: Sequence[bytes]) -> int:
    link.send((name, [command(b"UNLINK", name)]) for name in names)
    return sum(link.of(name).read_number() for name in names)
