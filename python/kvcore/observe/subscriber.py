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
    """Receive the events of a publisher: kvcore's, vLLM's or SGLang's.

    Parameters
    ----------
    endpoint : str
        Of replica 0.
    replay_endpoint : str, optional
        Of replica 0, where is asked for what was missed; None: that cannot be asked for.
    topic : str
        What the topic of a message has to begin with.
    replicas : int
        So many, as of ``EventPublisher``.
    replay_timeout : float
        Seconds to wait for each batch that is asked for.
    high_water_mark : int
        Messages that wait to be received.

    Raises
    ------
    ImportError
        pyzmq is not installed.
    ValueError, TypeError
        An endpoint that cannot be, a number out of range.

    Notes
    -----
    Batches come in order and once. The subscriber asks the replay socket for missed batches, and
    for batches from before the subscriber was there. Where a batch is lost, or another publisher
    began at the endpoint, `receive` returns a batch of one AllBlocksCleared first, and the batches
    that the publisher still has after it. One thread at a time.

    Each answer of the replay socket names its publisher: the ZeroMQ identity of that socket, which
    a publisher of kvcore draws at random. vLLM's and SGLang's publishers have no identity: they
    have to send the last known batch again, byte for byte. The subscriber also asks after each new
    connection, so it notices a restart without a new message. Without `replay_endpoint` only
    sequence numbers show a restart: they go back, or leave a gap.

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
        self._monitors: dict[Any, _Feed] = {}  # the same feeds, by the socket of their connections
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
        """Return the batches that have arrived; wait for one where there is none.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most.

        Returns
        -------
        list of KVEventBatch
            Empty after `timeout`.

        Raises
        ------
        zmq.ZMQError
            It is closed.

        Notes
        -----
        The call itself asks for missed batches: with a publisher that does not answer it takes up
        to `replay_timeout` longer, also the first time and after each new connection. Until a first
        message has come over a connection, the call asks again now and then: a publisher sends no
        batch that it published before the subscription arrived.
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
        """Receive for ever."""
        while True:
            yield from self.receive()

    def close(self) -> None:
        """Let go of the sockets; may be repeated."""
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
            feed.note_connections()  # a connection is reported before its first message comes
            try:
                frames = feed.source.socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                feed.source.connect_if_lost()
                return batches
            if len(frames) == 3 and len(frames[1]) == SEQUENCE_BYTES:
                batches += feed.take(int.from_bytes(frames[1], "big"), frames[2])


class _Source:
    """Own the SUB socket of one replica, and the socket that reports its connections.

    ZeroMQ does not connect a SUB socket again after a frame that was too long: `connect_if_lost`
    does, once the messages that had arrived are read.
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
        """Return whether a connection was made since the last call."""
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
        with contextlib.suppress(self._zmq.ZMQError):  # ZeroMQ has given the endpoint up
            self.socket.disconnect(self._endpoint)
        self.connect()


class _Answer(NamedTuple):
    """Say what the replay socket sent: who answered, which batches, and whether all have come."""

    publisher: str  # ZeroMQ identity of the replay socket; "" where the publisher has none
    batches: list[tuple[int, bytes]]
    is_complete: bool


class _Feed:
    """Follow one replica: which publisher it has, and how far its batches are known.

    Invariant: `_next`, `_last` and `_publisher` belong to one publisher, or nothing is known
    (`_next` is 0). Batches of another publisher are returned only after an AllBlocksCleared.
    """

    def __init__(
        self, context: Any, source: _Source, replay: str | None, rank: int, timeout: float
    ) -> None:
        self._zmq = import_zmq()
        self.source = source
        self._context, self._replay = context, replay
        self._rank, self._timeout = rank, timeout
        self._publisher: str | None = None  # who answered last; None where nobody has
        self._is_compared = replay is None  # whether the connection's publisher is the known one
        self._is_clear = False  # whether the last batch that was returned is an AllBlocksCleared
        self._next = 0  # sequence number of the batch that is expected
        self._live = -1  # the last one that came over this connection, and not as an answer
        self._last = b""  # payload in front of `_next`
        # When to ask, where no message has come by itself.
        self.asks_at = -math.inf if replay is not None else math.inf

    def note_connections(self) -> None:
        """Compare the publisher again after a new connection: it may be another publisher's."""
        if self.source.read_connections() and self._replay is not None:
            self._is_compared = False
            self._live = -1
            self.asks_at = -math.inf

    def ask_before_live(self) -> list[KVEventBatch]:
        """Ask for what was published before, until messages come by themselves."""
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
        if self._next and not self._is_compared:  # nobody answered: this may be another publisher
            batches += self._begin_again()
        self._is_compared = True
        self._live = number
        self.asks_at = math.inf
        if number < self._next:  # it was replayed
            return batches
        return batches + self._read([(number, payload)])

    def _catch_up(self) -> list[KVEventBatch]:
        """Return what was published since the last known batch; of another publisher, all."""
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
        """Whether the answer to a question for the last known batch is its publisher's."""
        if self._publisher is not None and answer.publisher != self._publisher:
            return False
        if not answer.batches:  # it has not published as many
            return False
        first = answer.batches[0]
        if first[0] < self._next:
            return first == (self._next - 1, self._last)
        # It no longer has that batch: without an identity nothing tells that it ever had.
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
        """Ask for the batches from `first` on; None where nobody answers."""
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
        if self._live < 0:  # one that does not answer is asked less often
            wait = self._timeout if is_complete else 10 * self._timeout
            self.asks_at = time.monotonic() + wait
        return _Answer(publisher, found, is_complete) if is_answered else None


def _identity_of(frame: Any) -> str:
    """Return the ZeroMQ identity of the socket that sent a frame; "" where it has none."""
    try:
        return str(frame.get("Identity"))
    except (import_zmq().ZMQError, UnicodeError):  # no property of this connection, or no text
        return ""
