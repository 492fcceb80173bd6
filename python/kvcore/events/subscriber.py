# SPDX-License-Identifier: Apache-2.0
"""Receive what publishers tell of their caches, and fill in what was missed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from typing import Any

from kvcore.events.endpoints import END, SEQUENCE_BYTES, endpoint_of, import_zmq
from kvcore.events.wire import AllBlocksCleared, KVEventBatch, decode_batch
from kvcore.params import require_count

__all__ = ["EventSubscriber"]

_LOGGER = logging.getLogger("kvcore")


class EventSubscriber:
    """Receive the events of a publisher: kvcore's or vLLM's.

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
    Batches come in order and once. Where one is missed it is asked for, so also those from before
    the subscriber was there; where nobody has it any more, and where a publisher began anew, comes
    a batch of one AllBlocksCleared, and what is known from then on. One thread at a time.

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
        try:
            for rank in range(replicas):
                at = self._context.socket(self._zmq.SUB)
                at.setsockopt(self._zmq.RCVHWM, high_water_mark)
                at.setsockopt_string(self._zmq.SUBSCRIBE, topic)
                at.connect(endpoint_of(endpoint, rank))
                other = None if replay_endpoint is None else endpoint_of(replay_endpoint, rank)
                self._feeds[at] = _Feed(self._context, other, rank, replay_timeout)
                self._poller.register(at, self._zmq.POLLIN)
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
        What is missed is asked for in here: with a publisher that does not answer it takes up to
        `replay_timeout` longer, also the first time. Until a first message has come by itself,
        it asks again now and then: what was published before the subscription had arrived there
        is not sent.
        """
        ends = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            feeds = self._feeds.values()
            batches = [batch for feed in feeds for batch in feed.ask_before_live()]
            now = time.monotonic()
            until = min([ends, *(feed.asks_at for feed in feeds)])
            wait = 0.0 if batches else max(0.0, until - now)
            for at, _ in self._poller.poll(None if wait == math.inf else math.ceil(1000 * wait)):
                batches += self._drain(at)
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

    def _drain(self, at: Any) -> list[KVEventBatch]:
        batches: list[KVEventBatch] = []
        while True:
            try:
                frames = at.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return batches
            if len(frames) == 3 and len(frames[1]) == SEQUENCE_BYTES:
                batches += self._feeds[at].take(int.from_bytes(frames[1], "big"), frames[2])


class _Feed:
    """Know how far one replica was heard."""

    def __init__(self, context: Any, replay: str | None, rank: int, timeout: float) -> None:
        self._zmq = import_zmq()
        self._context, self._replay = context, replay
        self._rank, self._timeout = rank, timeout
        self._next = 0  # sequence number of the batch that is expected
        self._live = -1  # the last one that was received, and not asked for
        self._last = b""  # payload in front of `_next`
        # When to ask, where no message has come by itself.
        self.asks_at = -math.inf if replay is not None else math.inf

    def ask_before_live(self) -> list[KVEventBatch]:
        """Ask for what was published before, until messages come by themselves."""
        if time.monotonic() < self.asks_at:
            return []
        begun = self._next > 0
        found = self._ask(self._next - 1 if begun else 0)
        if not begun:
            return self._read(found)
        return self._recover(found[-1][0] + 1) if found[1:] else []

    def take(self, number: int, payload: bytes) -> list[KVEventBatch]:
        """Return what a message brings, behind what was missed in front of it."""
        batches: list[KVEventBatch] = []
        if number <= self._live:
            batches += self._begin_again()
        if number > self._next:
            batches += self._recover(number)
        self._live = number
        self.asks_at = math.inf
        if number < self._next:  # it was replayed
            return batches
        return batches + self._read([(number, payload)])

    def _begin_again(self) -> list[KVEventBatch]:
        self._next, self._live, self._last = 0, -1, b""
        return [self._cleared()]

    def _cleared(self) -> KVEventBatch:
        return KVEventBatch(time.time(), [AllBlocksCleared()], self._rank)

    def _recover(self, number: int) -> list[KVEventBatch]:
        """Bring `_next` to `number`, or further."""
        begun = self._next > 0
        # With the last one that is known: it tells whether the publisher is still the same.
        found = self._ask(self._next - 1 if begun else 0)
        batches: list[KVEventBatch] = []
        if begun and found and found[0] == (self._next - 1, self._last):
            found = found[1:]
        elif begun:
            batches += self._begin_again()
            found = self._ask(0)
        if found and found[0][0] == self._next:
            batches += self._read(found)
        else:  # the first ones are lost
            if not batches:
                batches.append(self._cleared())
            if found:
                self._next = found[0][0]
                batches += self._read(found)
        if self._next < number:
            if found:  # some in the middle were not answered
                batches.append(self._cleared())
            self._next = number
        return batches

    def _read(self, found: list[tuple[int, bytes]]) -> list[KVEventBatch]:
        batches: list[KVEventBatch] = []
        for number, payload in found:
            if number != self._next:
                batches.append(self._cleared())
            try:
                batches.append(decode_batch(payload))
            except ValueError as error:
                _LOGGER.warning("batch %d of cache events cannot be read: %s", number, error)
                batches.append(self._cleared())
            self._next, self._last = number + 1, payload
        return batches

    def _ask(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches from `first` on that are replayed before an answer stays out."""
        if self._replay is None:
            return []
        zmq = self._zmq
        found: list[tuple[int, bytes]] = []
        waits = 10 * self._timeout  # for one that does not answer
        at = self._context.socket(zmq.DEALER)
        try:
            at.setsockopt(zmq.LINGER, 0)
            at.setsockopt(zmq.RCVHWM, 0)
            at.connect(self._replay)
            at.send_multipart((b"", first.to_bytes(SEQUENCE_BYTES, "big")))
            while at.poll(round(1000 * self._timeout)):
                *_, number, payload = at.recv_multipart()
                if number == END:
                    waits = self._timeout
                    break
                found.append((int.from_bytes(number, "big"), payload))
        finally:
            at.close(linger=0)
        if self._live < 0:
            self.asks_at = time.monotonic() + waits
        return found
