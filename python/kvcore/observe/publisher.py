# SPDX-License-Identifier: Apache-2.0
"""Publish the cache events of a manager to subscribers."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from kvcore.cache_events import CacheCleared, PagesRemoved, PagesStored
from kvcore.errors import KVCacheError
from kvcore.observe.endpoints import (
    END,
    MOST_BATCH_BYTES,
    MOST_REQUEST_BYTES,
    SEQUENCE_BYTES,
    endpoint_of,
    import_zmq,
)
from kvcore.observe.wire import KVEventBatch, encode_batch, wire_event
from kvcore.params import require_count
from kvcore.support.threads import Threads

__all__ = ["EventPublisher"]

_LOGGER = logging.getLogger("kvcore")
_PATIENCE_S = 5.0  # maximum wait for the thread at its end


class EventSource(Protocol):
    """The methods of PagedKVCacheManager that a publisher calls."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas; each replica has its own sockets."""

    def take_events(self) -> list[PagesStored | PagesRemoved | CacheCleared]:
        """Return the events since the last call."""


class EventPublisher:
    """Publishes the events of a manager from a thread of its own, as vLLM does.

    Parameters
    ----------
    manager : PagedKVCacheManager
        A manager with ``events=True``. Only the publisher may take its events.
    endpoint : str
        Endpoint of the PUB socket of replica 0. The port of replica `i` is `i` higher.
    replay_endpoint : str, optional
        Endpoint of the ROUTER socket of replica 0, which sends missed batches to subscribers on
        request. None: no replay.
    topic : str
        The first frame of each message, such as "kv@POD@MODEL".
    form : {"map", "array"}
        As in ``encode_batch``.
    raw_keys : bool
        As in ``wire_event``.
    interval : float
        Seconds between two polls of the manager.
    buffer_batches : int
        Number of batches of each replica that can be replayed.
    high_water_mark : int
        Number of messages that wait for a slow subscriber. Further messages are dropped for it.

    Attributes
    ----------
    endpoints, replay_endpoints : tuple of str
        The bound endpoint of each replica.
    identity : str
        A random name of this publisher: the ZeroMQ identity of its replay sockets. A subscriber
        reads it with each answer (``frame.get("Identity")`` in pyzmq), and so detects another
        publisher at the same endpoint. The frames of messages do not contain it.

    Raises
    ------
    ImportError
        pyzmq is not installed.
    ValueError, TypeError
        An endpoint cannot be bound, a number is out of range, or the manager has no events.

    Notes
    -----
    The calls of the manager never wait for the publisher. If the manager's queue overflows, or the
    buffer no longer has the batches that subscribers miss, the subscribers have to start again.
    The publisher ends with ``close``, when it is collected, and when the manager is closed. A
    forked child has no publisher.

    By default the publisher binds to loopback: the messages contain tokens of prompts, unencrypted,
    for every process that connects.
    """

    def __init__(
        self,
        manager: EventSource,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        replay_endpoint: str | None = "tcp://127.0.0.1:5657",
        topic: str = "",
        form: Literal["map", "array"] = "map",
        raw_keys: bool = False,
        interval: float = 0.01,
        buffer_batches: int = 10_000,
        high_water_mark: int = 100_000,
    ) -> None:
        require_count(buffer_batches=buffer_batches, high_water_mark=high_water_mark)
        if not 0 < interval < threading.TIMEOUT_MAX:
            raise ValueError(f"interval is {interval}, must be more than 0 seconds, and finite")
        encode_batch(KVEventBatch(0.0, [], 0), form)  # refuses another form
        self.identity = secrets.token_hex(16)
        self._sender = _Sender(
            manager,
            self.identity,
            (endpoint, replay_endpoint),
            (high_water_mark, buffer_batches),
            (topic.encode(), form, raw_keys),
            interval,
        )
        self.endpoints = tuple(each.endpoint for each in self._sender.ranks)
        self.replay_endpoints = tuple(
            each.replay_endpoint for each in self._sender.ranks if each.replay_endpoint
        )
        self._finalizer = weakref.finalize(self, self._sender.stop)

    @property
    def is_running(self) -> bool:
        """True while events are published."""
        return self._sender.is_running

    def flush(self, timeout: float | None = None) -> bool:
        """Publish the manager's events up to now, and wait for it.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most.

        Returns
        -------
        bool
            False after `timeout`, or if the publisher is closed.
        """
        return self._sender.flush(timeout)

    def close(self) -> None:
        """Publish the remaining events, and end; may be repeated."""
        self._finalizer()

    def __enter__(self) -> Any:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()


class _Rank:
    """Owns the sockets and the buffer of one replica."""

    def __init__(
        self,
        context: Any,
        identity: str,
        endpoints: tuple[str, str | None],
        marks: tuple[int, int],
    ) -> None:
        zmq = import_zmq()
        self._sequence = 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=marks[1])
        self.replay: Any = None
        self.replay_endpoint = ""
        self.socket = context.socket(zmq.PUB)
        self.endpoint = _bound(self.socket, endpoints[0], marks[0])
        if endpoints[1] is not None:
            self.replay = context.socket(zmq.ROUTER)
            self.replay.setsockopt_string(zmq.ROUTING_ID, identity)
            # A subscriber that asks and does not read costs at most one buffer of memory.
            self.replay_endpoint = _bound(self.replay, endpoints[1], marks[1] + 1)

    def publish(self, topic: bytes, payload: bytes) -> None:
        number = self._sequence.to_bytes(SEQUENCE_BYTES, "big")
        self._sequence += 1
        self._buffer.append((number, payload))
        # A PUB socket drops messages for a slow subscriber above its high-water mark.
        self.socket.send_multipart((topic, number, payload))

    def answer(self, topic: bytes) -> None:
        """Replay batches for all waiting requests; ignore malformed requests."""
        zmq = import_zmq()
        while True:
            try:
                frames = self.replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
                continue
            name, first = frames[0], frames[2]
            for number, payload in self._buffer:
                if number >= first:
                    self.replay.send_multipart((name, b"", topic, number, payload))
            self.replay.send_multipart((name, b"", topic, END, b""))


def _bound(at: Any, endpoint: str, high_water_mark: int) -> str:
    zmq = import_zmq()
    at.setsockopt(zmq.SNDHWM, high_water_mark)
    at.setsockopt(zmq.MAXMSGSIZE, MOST_REQUEST_BYTES)
    at.setsockopt(zmq.LINGER, 0)
    try:
        at.bind(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(
            f"cannot publish at {endpoint}: {error}; pass an endpoint that is free, such as "
            f"tcp://127.0.0.1:5557"
        ) from error
    return str(at.getsockopt_string(zmq.LAST_ENDPOINT))


class _Sender:
    """Owns the thread and the sockets of all replicas."""

    def __init__(
        self,
        manager: EventSource,
        identity: str,
        endpoints: tuple[str, str | None],
        marks: tuple[int, int],
        message: tuple[bytes, Literal["map", "array"], bool],
        interval: float,
    ) -> None:
        self._zmq = import_zmq()
        self._manager = manager
        self._topic, self._form, self._raw_keys = message
        self._interval = interval
        self._is_forked = self._is_stopping = False
        self._asked = self._done = 0
        self._changed = threading.Condition()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._context = self._zmq.Context()
        self.ranks: list[_Rank] = []
        self._threads = Threads("kvcore-events")  # one
        try:
            manager.num_replicas  # noqa: B018 - raises TypeError before a socket is bound
            for rank in range(manager.num_replicas):
                both = tuple(None if e is None else endpoint_of(e, rank) for e in endpoints)
                self.ranks.append(_Rank(self._context, identity, both, marks))  # type: ignore[arg-type]
            self._publish()  # refuses a manager without events
            _SENDERS.add(self)
            self._threads.start(self._run)
        except BaseException:
            if len(self._threads) > 0:  # interrupted after the start: the thread frees everything
                self.stop()
            else:
                self._free()
            raise

    @property
    def is_running(self) -> bool:
        return not self._is_forked and not self._is_stopping and len(self._threads) > 0

    def flush(self, timeout: float | None) -> bool:
        with self._changed:
            if not self.is_running:
                return False
            self._asked += 1
            mine = self._asked
            self._wake()
            self._changed.wait_for(lambda: self._done >= mine or not self.is_running, timeout)
            return self._done >= mine

    def stop(self) -> None:
        if self._is_forked:
            return
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._wake()
        self._threads.join(_PATIENCE_S)

    def forget(self) -> None:
        """Close the copies in a forked child; the parent process keeps publishing."""
        self._is_forked = True
        self._changed = threading.Condition()
        self._waker.close()
        self._woken.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread is awake, or has ended
            self._waker.send(b"\0")

    def _run(self) -> None:
        try:
            self._serve()
        except KVCacheError:  # the manager was closed
            pass
        except Exception:
            _LOGGER.exception("events of the cache are no longer published")
        finally:
            with self._changed:
                self._is_stopping = True
                self._changed.notify_all()
            self._free()

    def _serve(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        for rank in self.ranks:
            if rank.replay is not None:
                poller.register(rank.replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(max(1, round(1000 * self._interval))))
            if self._woken.fileno() in ready:
                self._woken.recv(1 << 12)
            for rank in self.ranks:
                if rank.replay in ready:
                    rank.answer(self._topic)
            with self._changed:
                asked, is_stopping = self._asked, self._is_stopping
            self._publish()
            with self._changed:
                self._done = asked
                self._changed.notify_all()
            if is_stopping:
                return

    def _publish(self) -> None:
        """Send a batch for each replica that has events."""
        try:
            events = self._manager.take_events()
        except MemoryError:
            _LOGGER.warning("no memory for cache events; the manager sends the whole cache again")
            return
        batches: dict[int, KVEventBatch] = {}
        for event in events:
            batch = batches.get(event.replica)
            if batch is None:
                batch = batches[event.replica] = KVEventBatch(time.time(), [], event.replica)
            batch.events.append(wire_event(event, raw_keys=self._raw_keys))
        for rank, batch in batches.items():
            for payload in _payloads(batch, self._form):
                self.ranks[rank].publish(self._topic, payload)

    def _free(self) -> None:
        with contextlib.suppress(self._zmq.ZMQError):
            for rank in self.ranks:
                rank.socket.close(linger=_LINGER_MS)
                if rank.replay is not None:
                    rank.replay.close(linger=0)
            self._context.destroy(linger=_LINGER_MS)
        self._waker.close()
        self._woken.close()


def _payloads(batch: KVEventBatch, form: Literal["array", "map"]) -> Iterator[bytes]:
    """Encode a batch, and split it if it is longer than a subscriber accepts."""
    payload = encode_batch(batch, form)
    half = len(batch.events) // 2
    if half == 0 or len(payload) <= MOST_BATCH_BYTES:
        yield payload
        return
    for events in (batch.events[:half], batch.events[half:]):
        yield from _payloads(KVEventBatch(batch.ts, events, batch.data_parallel_rank), form)


#: Milliseconds to send the last messages at the end.
_LINGER_MS = 200

_SENDERS: weakref.WeakSet[_Sender] = weakref.WeakSet()


def _forget_all() -> None:
    for sender in list(_SENDERS):
        sender.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
