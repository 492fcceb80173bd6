# SPDX-License-Identifier: Apache-2.0
"""Receive the cache events of publishers, and ask for missed batches."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvcore.observe.endpoints import (
    END,
    MOST_BATCH_BYTES,
    SEQUENCE_BYTES,
    endpoint_of,
    import_zmq,
)
from kvcore.observe.wire import AllBlocksCleared, KVEventBatch, decode_batch
from kvcore.params import require_count

__all__ = ["EventSubscriber"]

_LOGGER = logging.getLogger("kvcore")


class EventSubscriber:
    """Receives the events of a publisher of kvcore, vLLM or SGLang.

    Parameters
    ----------
    endpoint : str
        Endpoint of replica 0.
    replay_endpoint : str, optional
        Replay endpoint of replica 0, to request missed batches. None: no replay.
    topic : str
        Prefix of the topics to receive.
    replicas : int
        Number of replicas of the publisher.
    replay_timeout : float
        Seconds to wait for each requested batch.
    high_water_mark : int
        Maximum number of messages in the receive queue.

    Raises
    ------
    ImportError
        pyzmq is not installed.
    ValueError, TypeError
        An endpoint is invalid, or a number is out of range.

    Notes
    -----
    Each batch is returned once, in order. The subscriber requests missed batches, and batches from
    before its start, from the replay socket. If a batch is lost, or another publisher took the
    endpoint, `receive` returns a batch with one AllBlocksCleared first, and the batches that the
    publisher still has after it. Only one thread at a time may call a subscriber.

    Each answer of the replay socket has the ZeroMQ identity of that socket, which a publisher of
    kvcore chooses at random. The publishers of vLLM and SGLang have no identity: they have to send
    the last known batch again, byte for byte. The subscriber also sends a request after each new
    connection, so it detects a restart without a new message. Without `replay_endpoint`, a restart
    is detected only by sequence numbers that decrease or leave a gap.

    Examples
    --------
    >>> from kvcore.events import EventSubscriber
    >>> with EventSubscriber("tcp://127.0.0.1:5557", replay_endpoint=None) as subscriber:
    ...     subscriber.receive(timeout=0.0)
    []
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        *,
        replay_endpoint: str | None = "tcp://127.0.0.1:5657",
        topic: str = "",
        replicas: int = 1,
        replay_timeout: float = 1.0,
        high_water_mark: int = 100_000,
    ) -> None:
        require_count(replicas=replicas, high_water_mark=high_water_mark)
        self._zmq = import_zmq()
        self._context = self._zmq.Context()
        self._poller = self._zmq.Poller()
        self._feeds: dict[Any, _Feed] = {}
        self._monitors: dict[Any, _Feed] = {}  # the same feeds, by their monitor sockets
        try:
            for rank in range(replicas):
                at = self._context.socket(self._zmq.SUB)
                at.setsockopt(self._zmq.RCVHWM, high_water_mark)
                at.setsockopt(self._zmq.MAXMSGSIZE, MOST_BATCH_BYTES)
                at.setsockopt_string(self._zmq.SUBSCRIBE, topic)
                other = None if replay_endpoint is None else endpoint_of(replay_endpoint, rank)
                source = _Source(at, endpoint_of(endpoint, rank))
                feed = _Feed(self._context, source, other, rank, replay_timeout)
                self._feeds[at] = self._monitors[source.monitor] = feed
                self._poller.register(at, self._zmq.POLLIN)
                self._poller.register(source.monitor, self._zmq.POLLIN)
                source.connect()
        except BaseException as error:
            self.close()
            if isinstance(error, self._zmq.ZMQError):
                raise ValueError(f"cannot subscribe to {endpoint}: {error}") from error
            raise

    def receive(self, timeout: float | None = None) -> list[KVEventBatch]:
        """Return the batches that have arrived; wait for a batch if none has arrived.

        Parameters
        ----------
        timeout : float, optional
            Maximum seconds to wait; None: no limit.

        Returns
        -------
        list of KVEventBatch
            Empty after `timeout`.

        Raises
        ------
        zmq.ZMQError
            The subscriber is closed.

        Notes
        -----
        The call requests missed batches, and also requests batches at the first call and after each
        new connection. If the publisher does not answer, the call takes up to `replay_timeout`
        longer. Until the first message arrives over a connection, the request is repeated from time
        to time, because a publisher does not send batches from before the subscription.
        """
        ends = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            feeds = self._feeds.values()
            batches = [batch for feed in feeds for batch in feed.ask_before_live()]
            now = time.monotonic()
            until = min([ends, *(feed.asks_at for feed in feeds)])
            wait = 0.0 if batches else max(0.0, until - now)
            for at, _ in self._poller.poll(None if wait == math.inf else math.ceil(1000 * wait)):
                batches += self._drain(self._feeds.get(at) or self._monitors[at])
            if batches or time.monotonic() >= ends:
                return batches

    def __iter__(self) -> Iterator[KVEventBatch]:
        """Yield batches without end."""
        while True:
            yield from self.receive()

    def close(self) -> None:
        """Close the sockets; may be repeated."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Any:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def _drain(self, feed: _Feed) -> list[KVEventBatch]:
        batches: list[KVEventBatch] = []
        while True:
            feed.note_connections()  # a connection is reported before its first message arrives
            try:
                frames = feed.source.socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                feed.source.connect_if_lost()
                return batches
            if len(frames) == 3 and len(frames[1]) == SEQUENCE_BYTES:
                batches += feed.take(int.from_bytes(frames[1], "big"), frames[2])


class _Source:
    """Owns the SUB socket of one replica, and the monitor socket that reports its connections.

    After a frame that is too long, ZeroMQ does not reconnect a SUB socket. `connect_if_lost`
    reconnects it after all arrived messages are read.
    """

    def __init__(self, socket: Any, endpoint: str) -> None:
        self._zmq = import_zmq()
        self._endpoint = endpoint
        self._is_lost = False
        self.socket = socket
        events = self._zmq.EVENT_CONNECTED | self._zmq.EVENT_DISCONNECTED
        self.monitor = socket.get_monitor_socket(events)

    def connect(self) -> None:
        self.socket.connect(self._endpoint)

    def read_connections(self) -> bool:
        """Return true if the socket has connected since the last call."""
        is_new = False
        while self.monitor.poll(0):
            event = int.from_bytes(self.monitor.recv_multipart()[0][:2], sys.byteorder)
            is_new |= event == self._zmq.EVENT_CONNECTED
            self._is_lost |= event == self._zmq.EVENT_DISCONNECTED
        return is_new

    def connect_if_lost(self) -> None:
        if not self._is_lost:
            return
        self._is_lost = False
        with contextlib.suppress(self._zmq.ZMQError):  # ZeroMQ has already dropped the endpoint
            self.socket.disconnect(self._endpoint)
        self.connect()


class _Answer(NamedTuple):
    """An answer of the replay socket."""

    publisher: str  # ZeroMQ identity of the replay socket; "" if the publisher has no identity
    batches: list[tuple[int, bytes]]
    is_complete: bool  # true if the end of the replay has arrived


class _Feed:
    """Tracks one replica: its publisher, and the last batch received from it.

    Invariant: `_next`, `_last` and `_publisher` belong to one publisher, or no batch is known
    (`_next` is 0). Batches of another publisher are returned only after an AllBlocksCleared.
    """

    def __init__(
        self, context: Any, source: _Source, replay: str | None, rank: int, timeout: float
    ) -> None:
        self._zmq = import_zmq()
        self.source = source
        self._context, self._replay = context, replay
        self._rank, self._timeout = rank, timeout
        self._publisher: str | None = None  # identity of the last answer; None before any answer
        self._is_compared = replay is None  # true if this connection has the known publisher
        self._is_clear = False  # true if the last returned batch is an AllBlocksCleared
        self._next = 0  # sequence number of the next expected batch
        self._live = -1  # number of the last published (not replayed) batch of this connection
        self._last = b""  # payload of batch `_next` - 1
        # Time of the next replay request, as long as no published batch has arrived.
        self.asks_at = -math.inf if replay is not None else math.inf

    def note_connections(self) -> None:
        """Compare the publisher again after a new connection, which may be to another publisher."""
        if self.source.read_connections() and self._replay is not None:
            self._is_compared = False
            self._live = -1
            self.asks_at = -math.inf

    def ask_before_live(self) -> list[KVEventBatch]:
        """Request earlier batches, until published batches arrive."""
        if time.monotonic() < self.asks_at:
            return []
        return self._catch_up()

    def take(self, number: int, payload: bytes) -> list[KVEventBatch]:
        """Return the batch of a message, after the batches that were missed before it."""
        batches: list[KVEventBatch] = []
        if number <= self._live:
            batches += self._begin_again()
        if number > self._next or (self._next and not self._is_compared):
            batches += self._catch_up()
        if self._next and not self._is_compared:  # no answer: this may be another publisher
            batches += self._begin_again()
        self._is_compared = True
        self._live = number
        self.asks_at = math.inf
        if number < self._next:  # it was replayed
            return batches
        return batches + self._read([(number, payload)])

    def _catch_up(self) -> list[KVEventBatch]:
        """Return the batches after the last known batch; all batches of another publisher."""
        begun = self._next > 0
        answer = self._ask(self._next - 1 if begun else 0)
        if answer is None:
            return []
        batches: list[KVEventBatch] = []
        self._is_compared = True
        if begun and not self._is_same(answer):
            batches += self._begin_again()
            answer = self._ask(0)
        self._publisher = None if answer is None else answer.publisher
        if answer is not None:
            batches += self._read([each for each in answer.batches if each[0] >= self._next])
        return batches

    def _is_same(self, answer: _Answer) -> bool:
        """Return true if the publisher that answers is the publisher of the last known batch."""
        if self._publisher is not None and answer.publisher != self._publisher:
            return False
        if not answer.batches:  # this publisher has not reached the last known batch
            return False
        first = answer.batches[0]
        if first[0] < self._next:
            return first == (self._next - 1, self._last)
        # The publisher no longer has that batch. Only an identity proves that it once had it.
        return answer.publisher != ""

    def _begin_again(self) -> list[KVEventBatch]:
        self._next, self._live, self._last, self._publisher = 0, -1, b"", None
        return self._clear()

    def _clear(self) -> list[KVEventBatch]:
        if self._is_clear:
            return []
        self._is_clear = True
        return [KVEventBatch(time.time(), [AllBlocksCleared()], self._rank)]

    def _read(self, found: list[tuple[int, bytes]]) -> list[KVEventBatch]:
        batches: list[KVEventBatch] = []
        for number, payload in found:
            if number != self._next:
                batches += self._clear()
            try:
                batch = decode_batch(payload)
            except ValueError as error:
                _LOGGER.warning("batch %d of cache events cannot be read: %s", number, error)
                batches += self._clear()
            else:
                batches.append(batch)
                self._is_clear = False
            self._next, self._last = number + 1, payload
        return batches

    def _ask(self, first: int) -> _Answer | None:
        """Request the batches from `first` on; return None without an answer."""
        if self._replay is None:
            return None
        zmq = self._zmq
        publisher = ""
        found: list[tuple[int, bytes]] = []
        is_answered = is_complete = False
        at = self._context.socket(zmq.DEALER)
        try:
            at.setsockopt(zmq.LINGER, 0)
            at.setsockopt(zmq.RCVHWM, 0)
            at.setsockopt(zmq.MAXMSGSIZE, MOST_BATCH_BYTES)
            at.connect(self._replay)
            at.send_multipart((b"", first.to_bytes(SEQUENCE_BYTES, "big")))
            while not is_complete and at.poll(round(1000 * self._timeout)):
                frames = at.recv_multipart(copy=False)
                if len(frames) < 2 or len(frames[-2]) != SEQUENCE_BYTES:
                    continue
                if not is_answered:
                    is_answered, publisher = True, _identity_of(frames[-1])
                number = frames[-2].bytes
                is_complete = number == END
                if not is_complete:
                    found.append((int.from_bytes(number, "big"), frames[-1].bytes))
        finally:
            at.close(linger=0)
        if self._live < 0:  # a publisher that does not answer gets fewer requests
            wait = self._timeout if is_complete else 10 * self._timeout
            self.asks_at = time.monotonic() + wait
        return _Answer(publisher, found, is_complete) if is_answered else None


def _identity_of(frame: Any) -> str:
    """Return the ZeroMQ identity of the socket that sent a frame; "" without an identity."""
    try:
        return str(frame.get("Identity"))
    except (import_zmq().ZMQError, UnicodeError):  # the connection has no identity, or not a text
        return ""
