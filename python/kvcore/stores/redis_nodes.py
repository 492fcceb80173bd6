# SPDX-License-Identifier: Apache-2.0
"""Keep connections to a server of the Redis protocol, or to all nodes of a cluster.

A node of a cluster answers MOVED for names of other nodes. The node then returns the slots of all
nodes, and each command is sent to the node of its name's slot.
https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/
"""

from __future__ import annotations

import os
from binascii import crc_hqx
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from kvcore.stores.resp import RespConnection, RespError, command
from kvcore.stores.specs import RedisTier

if TYPE_CHECKING:
    import ssl

__all__ = ["RedisLink", "RedisNodes", "is_moved"]

_Result = TypeVar("_Result")

#: Host and port.
Address: TypeAlias = tuple[str, int]

_SLOTS = 16_384
_MOST_IDLE = 8  # idle connections that are kept per node


class RedisNodes:
    """Keep connections, from which each call takes the connections that it needs.

    Parameters
    ----------
    tier : RedisTier

    Notes
    -----
    Any number of threads may use it.
    """

    def __init__(self, tier: RedisTier) -> None:
        self._tier = tier
        self._login, self._tls = _login_of(tier), _tls_of(tier)
        self._named: Address = (tier.host, tier.port)
        self._slots: list[Address] | None = None  # of a cluster
        self._is_stale = False  # the slots may have changed
        self._idle: dict[Address, list[RespConnection]] = {}
        self._lock = Lock()
        self._is_closed = False

    def call(self, work: Callable[[RedisLink], _Result], seconds: float) -> _Result:
        """Run a function with connections, within `seconds`, including the time to connect.

        Raises
        ------
        OSError
            A server is gone, or sends a reply outside the protocol; TimeoutError after `seconds`.
        RespError
            The server refuses a command.
        """
        ends = monotonic() + seconds
        try:
            return self._in_place(work, ends)
        except RespError as error:
            if not is_moved(error):
                raise
            self._is_stale = True
        except ConnectionError:  # a server that restarted closes idle connections
            if not (self._close_idle() or self._is_stale):
                raise
        return self._in_place(work, ends)

    def close(self) -> None:
        """Disconnect; a connection in use is closed after its call."""
        with self._lock:
            self._is_closed = True
        self._close_idle()

    def address_of(self, name: bytes) -> Address:
        """Return the address of the server that has a name."""
        slots = self._slots
        return self._named if slots is None else slots[crc_hqx(name, 0) % _SLOTS]

    def addresses(self) -> Iterable[Address]:
        """Return the addresses of all servers that have names."""
        return [self._named] if self._slots is None else sorted({*self._slots})

    def take(self, address: Address, ends: float) -> RespConnection:
        """Return an unused connection."""
        with self._lock:
            idle = self._idle.get(address)
            connection = idle.pop() if idle else None
        if connection is None:
            return self._connected(address, ends)
        connection.begin(ends)
        return connection

    def _in_place(self, work: Callable[[RedisLink], _Result], ends: float) -> _Result:
        """Run a function after the slots of the nodes are known."""
        if self._is_stale:
            self._ask_for_slots(ends)
        try:
            return self._tried(work, ends)
        except OSError:  # another node may have replaced a lost node
            self._is_stale = self._slots is not None
            raise

    def _tried(self, work: Callable[[RedisLink], _Result], ends: float) -> _Result:
        link = RedisLink(self, ends)
        try:
            result = work(link)
        except BaseException:  # replies of this batch may still arrive
            link.close()
            raise
        for address, connection in link.used.items():
            self._give_back(address, connection)
        return result

    def _give_back(self, address: Address, connection: RespConnection) -> None:
        with self._lock:
            idle = self._idle.setdefault(address, [])
            is_kept = not self._is_closed and len(idle) < _MOST_IDLE
            if is_kept:
                idle.append(connection)
        if not is_kept:
            connection.close()

    def _close_idle(self) -> bool:
        """Close the unused connections; return whether any may have existed."""
        with self._lock:
            gone, self._idle = self._idle, {}
        for connections in gone.values():
            for each in connections:
                each.close()
        return bool(gone)

    def _connected(self, address: Address, ends: float) -> RespConnection:
        connection = RespConnection(*address, ends, self._tls)
        hello = [[b"AUTH", *self._login]] if self._login else []
        hello += [[b"SELECT", b"%d" % self._tier.database]] if self._tier.database else []
        try:
            connection.send([command(*words) for words in hello])
            for _ in hello:
                connection.read_simple()
        except BaseException:
            connection.close()
            raise
        return connection

    def _ask_for_slots(self, ends: float) -> None:
        """Read the slots of the cluster, from the first node that returns them."""
        asked = [self._named, *self.addresses()]
        for left, address in zip(range(len(asked), 0, -1), asked, strict=True):
            now = monotonic()
            try:
                connection = self._connected(address, now + (ends - now) / left)
                try:
                    connection.send([command(b"CLUSTER", b"SLOTS")])
                    self._slots = _slots_of(connection.read_list(), address[0])
                finally:
                    connection.close()
            except (OSError, RespError):
                if left == 1:
                    raise
            else:
                self._is_stale = False
                return


class RedisLink:
    """Send the commands of one call, and read their replies.

    Parameters
    ----------
    nodes : RedisNodes
    ends : float
        Deadline of the call, as of ``time.monotonic``.

    Attributes
    ----------
    used : dict
        The connections that the call has used.
    """

    def __init__(self, nodes: RedisNodes, ends: float) -> None:
        self._nodes, self._ends = nodes, ends
        self.used: dict[Address, RespConnection] = {}

    def send(self, commands: Iterable[tuple[bytes, Sequence[bytes | memoryview]]]) -> None:
        """Send commands in pieces, each to the server of its name, before any reply is read."""
        pieces: dict[Address, list[bytes | memoryview]] = {}
        for name, words in commands:
            pieces.setdefault(self._nodes.address_of(name), []).extend(words)
        for address, of_one in pieces.items():
            self._at(address).send(of_one)

    def of(self, name: bytes) -> RespConnection:
        """Return the connection of the next reply to a command about a name."""
        return self._at(self._nodes.address_of(name))

    def all(self) -> list[RespConnection]:
        """Return a connection to each server."""
        return [self._at(address) for address in self._nodes.addresses()]

    def extend(self, seconds: float) -> None:
        """Set the deadline to `seconds` from now."""
        self._ends = monotonic() + seconds
        for connection in self.used.values():
            connection.begin(self._ends)

    def close(self) -> None:
        """Disconnect."""
        for connection in self.used.values():
            connection.close()

    def _at(self, address: Address) -> RespConnection:
        found = self.used.get(address)
        if found is None:
            found = self.used[address] = self._nodes.take(address, self._ends)
        return found


def is_moved(error: RespError) -> bool:
    """Return whether a node's error says that a name is, or will be, on another node."""
    return str(error).startswith(("MOVED ", "ASK "))


def _slots_of(found: list[Any], asked: str) -> list[Address]:
    """Read the reply to CLUSTER SLOTS.

    Raises
    ------
    OSError
        The reply has another form, or some slots have no node.
    """
    slots: list[Address | None] = [None] * _SLOTS
    for each in found:
        match each:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < _SLOTS:
                name = host.decode("ascii", "replace") if isinstance(host, bytes) else ""
                slots[first : last + 1] = [(name or asked, port)] * (last + 1 - first)
            case _:
                raise OSError(f"CLUSTER SLOTS has {each!r:.60}, must be slots and their node")
    known = [each for each in slots if each is not None]
    if len(known) < _SLOTS:
        raise OSError(f"{_SLOTS - len(known)} slots of the cluster are served by no node")
    return known


def _login_of(tier: RedisTier) -> list[bytes]:
    """Return the arguments of AUTH; an empty list without a password."""
    password = tier.password or os.environ.get("KVCORE_REDIS_PASSWORD")
    username = tier.username or os.environ.get("KVCORE_REDIS_USERNAME")
    if not password:
        return []
    return [*([username.encode()] if username else []), password.encode()]


def _tls_of(tier: RedisTier) -> ssl.SSLContext | None:
    if not tier.is_tls:
        return None
    import ssl

    return ssl.create_default_context(cafile=tier.ca_certs)
