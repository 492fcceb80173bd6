# SPDX-License-Identifier: Apache-2.0
"""Publishers and subscribers over sockets: late peers, slow peers, and restarted publishers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from conftest import require
from event_mirror import manager_of, run
from programs import printed

require("msgspec")
zmq = require("zmq")
msgpack = require("msgpack")

from kvcore import KVCacheParams  # noqa: E402
from kvcore.events import (  # noqa: E402
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    EventSubscriber,
)
from kvcore.keys import page_keys  # noqa: E402

ANY_PORT = "tcp://127.0.0.1:*"


def publisher_of(mgr: Any, **options: Any) -> EventPublisher:
    fields: dict[str, Any] = {
        "replay_endpoint": ANY_PORT,
        "topic": "kv@pod@model",
        "interval": 0.005,
    }
    return EventPublisher(mgr, ANY_PORT, **(fields | options))


def subscriber_of(publisher: EventPublisher, **options: Any) -> EventSubscriber:
    fields: dict[str, Any] = {"replay_endpoint": (publisher.replay_endpoints or (None,))[0]}
    return EventSubscriber(publisher.endpoints[0], **(fields | options))


def hashes_of(tokens: list[int], mgr: Any) -> list[int]:
    keys = page_keys(tokens, 2, seed=mgr.fingerprint)
    return [int.from_bytes(key[-8:], "big") for key in keys]


def receive(subscriber: EventSubscriber, n: int) -> list[Any]:
    """Receive until `n` events have arrived."""
    events: list[Any] = []
    ends = time.monotonic() + 20
    while len(events) < n and time.monotonic() < ends:
        for batch in subscriber.receive(1.0):
            events += batch.events
    return events


@pytest.fixture
def raw_socket() -> Iterator[Any]:
    with zmq.Context() as context, context.socket(zmq.SUB) as at:
        at.setsockopt(zmq.SUBSCRIBE, b"kv@")
        at.setsockopt(zmq.LINGER, 0)
        yield at


def test_the_frames_as_others_read_them(raw_socket: Any) -> None:
    """The test uses only the protocol: raw sockets and msgpack."""
    mgr = manager_of(num_pages=4)
    with publisher_of(mgr) as publisher:
        raw_socket.connect(publisher.endpoints[0])
        tokens, shift = [1, 2, 3, 4], 0
        while True:  # until the subscription has arrived
            shift += 10
            prompt = [shift + token for token in tokens]
            run(mgr, [*prompt, 5], cache_salt="s")
            assert publisher.flush(10.0)
            if raw_socket.poll(50):
                break
        topic, number, payload = raw_socket.recv_multipart()
        assert topic == b"kv@pod@model"
        assert len(number) == 8
        stamp, events, rank = msgpack.unpackb(payload)
        assert isinstance(stamp, float)
        assert rank == 0
        stored = events[-1]
        keys = page_keys(prompt, 2, seed=mgr.fingerprint, cache_salt="s")
        hashes = [int.from_bytes(key[-8:], "big") for key in keys]
        assert stored == {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": prompt,
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["s"], None],
            "group_idx": None,
        }
        asking = raw_socket.context.socket(zmq.DEALER)
        asking.connect(publisher.replay_endpoints[0])
        asking.send_multipart([b"nonsense"])
        asking.send_multipart([b"", b"short"])
        asking.send_multipart([b"", bytes(8)])
        answers: list[list[bytes]] = []
        while not answers or answers[-1][2] != b"\xff" * 8:
            answers.append(asking.recv_multipart())
        asking.close(linger=0)
        assert answers.pop() == [b"", topic, b"\xff" * 8, b""]
        assert [int.from_bytes(each[2], "big") for each in answers] == [*range(len(answers))]
        assert answers[-1] == [b"", topic, number, payload]


@pytest.mark.parametrize("form", ["array", "map"])
def test_a_late_subscriber_hears_of_everything(form: str) -> None:
    mgr = manager_of()
    with publisher_of(mgr, form=form) as publisher:
        for first in range(0, 30, 10):
            run(mgr, list(range(first, first + 5)))
            assert publisher.flush(10.0)
        with subscriber_of(publisher) as subscriber:
            events = receive(subscriber, 3)
            assert [event.block_hashes for event in events] == [
                hashes_of(list(range(first, first + 4)), mgr) for first in range(0, 30, 10)
            ]
            run(mgr, [100, 101, 102])
            assert [event.token_ids for event in receive(subscriber, 1)] == [[100, 101]]


def test_whole_keys() -> None:
    mgr = manager_of()
    with publisher_of(mgr, raw_keys=True) as publisher, subscriber_of(publisher) as subscriber:
        run(mgr, [1, 2, 3])
        run(mgr, [1, 2, 3, 4, 5])
        first, second = receive(subscriber, 2)
        keys = page_keys([1, 2, 3, 4], 2, seed=mgr.fingerprint)
        assert (first.block_hashes, second.parent_block_hash) == (keys[:1], keys[0])


def test_what_was_sent_before_the_subscription_arrived_is_asked_for() -> None:
    mgr = manager_of()
    with (
        publisher_of(mgr) as publisher,
        subscriber_of(publisher, replay_timeout=0.2) as subscriber,
    ):
        for at in subscriber._feeds:  # no live batch arrives
            at.disconnect(publisher.endpoints[0])
        assert subscriber.receive(0.0) == []
        for first in (0, 10):
            run(mgr, [first, first + 1, first + 2])
            assert publisher.flush(10.0)
            (stored,) = receive(subscriber, 1)
            assert stored.token_ids == [first, first + 1]
        for at in subscriber._feeds:
            at.connect(publisher.endpoints[0])
        first = 10
        events: list[Any] = []
        while not events:
            first += 10
            run(mgr, [first, first + 1, first + 2])
            assert publisher.flush(10.0)
            events = [event for batch in subscriber.receive(0.01) for event in batch.events]
        assert [event.token_ids for event in events] == [
            [at, at + 1] for at in range(20, first + 1, 10)
        ]


def test_lost_messages_are_asked_for() -> None:
    mgr = manager_of()
    with publisher_of(mgr) as publisher, subscriber_of(publisher) as subscriber:
        assert subscriber.receive(0.0) == []
        feed = next(iter(subscriber._feeds.values()))
        for first in range(0, 50, 10):
            run(mgr, list(range(first, first + 3)))
            assert publisher.flush(10.0)
        buffer = list(publisher._sender.ranks[0]._buffer)
        found = [batch for number, payload in buffer[:2]
                 for batch in feed.take(int.from_bytes(number, "big"), payload)]  # fmt: skip
        found += feed.take(4, buffer[4][1])
        events: list[Any] = [event for batch in found for event in batch.events]
        tokens = [event.token_ids for event in events]
        assert tokens == [[first, first + 1] for first in range(0, 50, 10)]
        # A batch that arrives late was already replayed.
        assert feed.take(5, buffer[4][1])
        assert feed._next == 6


def test_what_nobody_has_any_more_is_told_as_cleared() -> None:
    mgr = manager_of()
    with publisher_of(mgr, buffer_batches=2) as publisher:
        for first in range(0, 50, 10):
            run(mgr, list(range(first, first + 3)))
            assert publisher.flush(10.0)
        with subscriber_of(publisher) as subscriber:
            events = receive(subscriber, 3)
    assert events[0] == AllBlocksCleared()
    assert [event.token_ids for event in events[1:]] == [[30, 31], [40, 41]]


def test_without_replays_a_gap_is_told_as_cleared() -> None:
    mgr = manager_of()
    with (
        publisher_of(mgr, replay_endpoint=None) as publisher,
        subscriber_of(publisher) as subscriber,
    ):
        events: list[Any] = []
        first = 0
        while not events:
            run(mgr, list(range(first, first + 3)))
            assert publisher.flush(10.0)
            first += 10
            events = [event for batch in subscriber.receive(0.05) for event in batch.events]
    assert isinstance(events[-1], BlockStored)
    assert len(events) == 1 or events[0] == AllBlocksCleared()


def test_a_publisher_that_begins_anew() -> None:
    first, second = manager_of(), manager_of()
    publisher = publisher_of(first)
    endpoint, replay = publisher.endpoints[0], publisher.replay_endpoints[0]
    with subscriber_of(publisher) as subscriber:
        for start in (0, 10):
            run(first, list(range(start, start + 3)))
            assert publisher.flush(10.0)
        assert len(receive(subscriber, 2)) == 2
        publisher.close()
        assert not publisher.is_running
        assert not publisher.flush()
        with EventPublisher(second, endpoint, replay_endpoint=replay, interval=0.005) as other:
            for start in (50, 60, 70, 80):
                run(second, list(range(start, start + 3)))
                assert other.flush(10.0)
            events: list[Any] = []
            start = 100
            while not events:  # until the subscriber is connected again
                run(second, list(range(start, start + 3)))
                assert other.flush(10.0)
                events = [event for batch in subscriber.receive(0.1) for event in batch.events]
                start += 10
    assert events[0] == AllBlocksCleared()
    stored = [event.token_ids[0] for event in events[1:]]
    assert stored[:4] == [50, 60, 70, 80]


def test_replicas_have_ports_of_their_own() -> None:
    params = KVCacheParams(
        "float32", 1, 4, 1, page_size=2, enable_prefix_caching=True, data_parallel_degree=2,
        n_devices=2,
    )  # fmt: skip
    mgr = manager_of(params, devices=["cpu", "cpu"])
    with publisher_of(mgr) as publisher:
        for replica in (0, 1):
            run(mgr, [replica, 2, 3], replica=replica)
        assert publisher.flush(10.0)
        for replica in (0, 1):
            replay = publisher.replay_endpoints[replica]
            with EventSubscriber(publisher.endpoints[replica], replay_endpoint=replay) as one:
                (batch,) = one.receive(10.0)
                assert batch.data_parallel_rank == replica
                stored: Any = batch.events[0]
                assert stored.token_ids == [replica, 2]


def test_a_slow_subscriber_holds_nobody_up(raw_socket: Any) -> None:
    mgr = manager_of(num_pages=64)
    raw_socket.setsockopt(zmq.RCVHWM, 1)
    with publisher_of(mgr, high_water_mark=1) as publisher:
        raw_socket.connect(publisher.endpoints[0])
        for first in range(0, 3000, 10):
            run(mgr, list(range(first, first + 5)))
        assert publisher.flush(20.0)
        with subscriber_of(publisher) as subscriber:
            known: set[Any] = set()
            for batch in subscriber.receive(10.0):
                for event in batch.events:
                    if isinstance(event, BlockStored):
                        known |= set(event.block_hashes)
                    elif isinstance(event, BlockRemoved):
                        known -= set(event.block_hashes)
                    else:
                        known.clear()
            assert len(known) == mgr.num_cached_blocks


def test_closing_in_any_order() -> None:
    mgr = manager_of()
    publisher = publisher_of(mgr)
    mgr.close()
    ends = time.monotonic() + 20
    while publisher.is_running and time.monotonic() < ends:
        threading.Event().wait(0.01)
    assert not publisher.is_running
    publisher.close()
    publisher.close()


def test_what_is_left_is_published_at_the_end() -> None:
    mgr = manager_of()
    publisher = publisher_of(mgr, interval=60.0)
    with subscriber_of(publisher) as subscriber:
        assert subscriber.receive(0.0) == []
        run(mgr, [1, 2, 3])
        assert publisher.flush(10.0)
        assert len(receive(subscriber, 1)) == 1
        run(mgr, [4, 5, 6])
        publisher.close()
        assert [event.token_ids for event in receive(subscriber, 1)] == [[4, 5]]


FORK = """
    import os
    from test_event_publisher import manager_of, publisher_of, receive, run, subscriber_of
    mgr = manager_of()
    with publisher_of(mgr) as publisher, subscriber_of(publisher) as subscriber:
        child = os.fork()
        if child == 0:
            is_right = not publisher.is_running and not publisher.flush(1.0)
            publisher.close()
            os._exit(0 if is_right else 1)
        print(os.waitpid(child, 0)[1])
        run(mgr, [1, 2, 3])
        print(publisher.flush(10.0) + 0, len(receive(subscriber, 1)))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_none() -> None:
    assert printed(FORK, seed=1) == [0, 1, 1]


def test_wrong_arguments() -> None:
    mgr = manager_of()
    with pytest.raises(ValueError, match="events=True"):
        publisher_of(manager_of(events=False))
    with publisher_of(mgr) as publisher, pytest.raises(ValueError, match="cannot publish at"):
        EventPublisher(mgr, publisher.endpoints[0])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"form": "list"}, "form is 'list'"),
        ({"interval": 0.0}, "interval is 0.0"),
        ({"buffer_batches": 0}, "buffer_batches is 0"),
        ({"high_water_mark": -1}, "high_water_mark is -1"),
        ({"replay_endpoint": "tcp://127.0.0.1:70000"}, "port 70000"),
    ]
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            publisher_of(mgr, **options)
    with pytest.raises(ValueError, match="replicas is 0"):
        EventSubscriber(replicas=0)
    with pytest.raises(ValueError, match="cannot subscribe"):
        EventSubscriber("nowhere", replay_endpoint=None)
