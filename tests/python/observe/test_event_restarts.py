# SPDX-License-Identifier: Apache-2.0
"""Publishers that restart at the same endpoint: a subscriber reports their current cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from conftest import require

require("msgspec")
zmq = require("zmq")

from event_mirror import manager_of, run  # noqa: E402
from foreign_publisher import ForeignPublisher  # noqa: E402
from kvcore.events import (  # noqa: E402
    AllBlocksCleared,
    BlockStored,
    EventPublisher,
    EventSubscriber,
    KVEventBatch,
    encode_batch,
)

PATIENCE_S = 20.0


class Own:
    """A kvcore publisher over a manager; each prompt is a page of two tokens."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self.manager = manager_of()
        self._publisher = EventPublisher(
            self.manager, endpoint, replay_endpoint=replay, interval=0.002
        )
        self.endpoint, self.replay = (
            self._publisher.endpoints[0],
            self._publisher.replay_endpoints[0],
        )

    def serve(self, first: int) -> None:
        run(self.manager, [first, first + 1, first + 2])
        assert self._publisher.flush(10.0)

    def close(self) -> None:
        self._publisher.close()


class Foreign:
    """A publisher without an identity."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self._publisher = ForeignPublisher(endpoint, replay)
        self.endpoint, self.replay = self._publisher.endpoint, self._publisher.replay_endpoint

    def serve(self, first: int) -> None:
        event = BlockStored([first], None, [first, first + 1], 2)
        self._publisher.publish(encode_batch(KVEventBatch(time.time(), [event], 0)))

    def close(self) -> None:
        self._publisher.close()


KINDS: dict[str, Callable[[str, str], Any]] = {"kvcore": Own, "foreign": Foreign}


class Known:
    """First tokens of the prompts that a subscriber reports as cached."""

    def __init__(self, subscriber: EventSubscriber) -> None:
        self._subscriber = subscriber
        self.prompts: set[int] = set()
        self.clears = 0

    def receive(self, timeout: float = 0.2) -> None:
        for batch in self._subscriber.receive(timeout):
            for event in batch.events:
                if isinstance(event, AllBlocksCleared):
                    self.prompts.clear()
                    self.clears += 1
                else:
                    assert isinstance(event, BlockStored)
                    self.prompts.add(event.token_ids[0])

    def becomes(self, expected: set[int]) -> bool:
        """Receive until exactly these prompts are known; return false after a time limit."""
        ends = time.monotonic() + PATIENCE_S
        while self.prompts != expected and time.monotonic() < ends:
            self.receive()
        return self.prompts == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_live", [False, True], ids=["replayed", "live"])
@pytest.mark.parametrize("first_life", [1, 3])
@pytest.mark.parametrize("second_life", [0, 1, 2, 3, 4, 6])
def test_what_a_publisher_had_that_began_anew_is_forgotten(
    kind: str, is_live: bool, first_life: int, second_life: int
) -> None:
    """The second life may send fewer batches than the first, the same number, or more."""
    publisher = KINDS[kind]("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    endpoint, replay = publisher.endpoint, publisher.replay
    served = {100 * n for n in range(1, first_life + 1)}
    for first in sorted(served):
        publisher.serve(first)
    with EventSubscriber(endpoint, replay_endpoint=replay, replay_timeout=0.5) as subscriber:
        known = Known(subscriber)
        assert known.becomes(served)
        while is_live and next(iter(subscriber._feeds.values()))._live < 0:
            served.add(10_000 + len(served))
            publisher.serve(max(served))
            assert known.becomes(served)
        publisher.close()
        publisher = KINDS[kind](endpoint, replay)
        again = {5 * n for n in range(1, second_life + 1)}
        for first in sorted(again):
            publisher.serve(first)
        try:
            assert known.becomes(again)
            assert known.clears >= 1
            for first in (50_000, 60_000, 70_000):
                publisher.serve(first)
                again.add(first)
                assert known.becomes(again)
        finally:
            publisher.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_connection_that_comes_back_forgets_nothing(kind: str) -> None:
    publisher = KINDS[kind]("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    with EventSubscriber(
        publisher.endpoint, replay_endpoint=publisher.replay, replay_timeout=2.0
    ) as subscriber:
        known = Known(subscriber)
        served = {100}
        publisher.serve(100)
        assert known.becomes(served)
        (at,) = subscriber._feeds
        for first in (200, 300, 400):
            at.disconnect(publisher.endpoint)
            publisher.serve(first)
            at.connect(publisher.endpoint)
            publisher.serve(first + 1)
            served |= {first, first + 1}
            assert known.becomes(served)
        assert known.clears == 0
    publisher.close()


def test_where_nobody_answers_a_new_connection_is_not_trusted() -> None:
    """A publisher that does not answer cannot prove its identity."""
    publisher = ForeignPublisher(answers=False)

    def serve(first: int) -> None:
        event = BlockStored([first], None, [first, first + 1], 2)
        publisher.publish(encode_batch(KVEventBatch(time.time(), [event], 0)))

    with EventSubscriber(
        publisher.endpoint, replay_endpoint=publisher.replay_endpoint, replay_timeout=0.05
    ) as subscriber:
        known = Known(subscriber)
        first = 0
        while not known.prompts:  # until the subscription has arrived
            first += 10
            serve(first)
            known.receive(0.1)
        clears = known.clears
        (at,) = subscriber._feeds
        at.disconnect(publisher.endpoint)
        at.connect(publisher.endpoint)
        begun = time.monotonic()
        while known.clears == clears and time.monotonic() < begun + PATIENCE_S:
            first += 10
            serve(first)
            known.receive(0.1)
        assert known.clears == clears + 1
        assert max(known.prompts) <= first
    publisher.close()


def test_a_replay_that_lost_the_last_known_batch_is_told_by_its_identity() -> None:
    """The same publisher loses only missing batches; other and missing identities get no trust."""
    manager = manager_of()
    with EventPublisher(
        manager, "tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", buffer_batches=2
    ) as publisher:
        (replay,) = publisher.replay_endpoints
        with EventSubscriber(publisher.endpoints[0], replay_endpoint=replay) as subscriber:
            known = Known(subscriber)
            run(manager, [100, 101, 102])
            assert publisher.flush(10.0)
            assert known.becomes({100})
            (at,) = subscriber._feeds
            feed = subscriber._feeds[at]
            assert feed._publisher == publisher.identity
            at.disconnect(publisher.endpoints[0])
            for first in (200, 300, 400):
                run(manager, [first, first + 1, first + 2])
                assert publisher.flush(10.0)
            at.connect(publisher.endpoints[0])
            assert known.becomes({300, 400})
            assert known.clears == 1
            assert feed._publisher == publisher.identity


def test_the_identity_travels_beside_the_frames() -> None:
    """The frames are vLLM's; the identity is a property of each answer's connection."""
    manager = manager_of()
    with EventPublisher(
        manager, "tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic="kv@pod@model"
    ) as publisher:
        run(manager, [1, 2, 3])
        assert publisher.flush(10.0)
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.setsockopt(zmq.LINGER, 0)
            asking.connect(publisher.replay_endpoints[0])
            asking.send_multipart([b"", bytes(8)])
            answer, end = (asking.recv_multipart(copy=False) for _ in range(2))
        assert [frame.bytes for frame in answer[:3]] == [b"", b"kv@pod@model", bytes(8)]
        assert [frame.bytes for frame in end] == [b"", b"kv@pod@model", b"\xff" * 8, b""]
        assert {frame.get("Identity") for frame in [*answer, *end]} == {publisher.identity}
        with EventPublisher(
            manager_of(), "tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*"
        ) as other:
            assert other.identity != publisher.identity


def test_answers_that_are_no_answers_are_left_alone() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as replay:
        replay.setsockopt(zmq.LINGER, 0)
        port = replay.bind_to_random_port("tcp://127.0.0.1")
        with EventSubscriber(
            "tcp://127.0.0.1:9", replay_endpoint=f"tcp://127.0.0.1:{port}", replay_timeout=0.2
        ) as subscriber:
            assert subscriber.receive(0.0) == []
            name = replay.recv_multipart()[0]
            for frames in ([b""], [b"", b"short", b""], [b"x" * 9, b"y"]):
                replay.send_multipart([name, *frames])
            assert subscriber.receive(0.0) == []
