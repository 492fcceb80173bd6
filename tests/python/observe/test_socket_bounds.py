# SPDX-License-Identifier: Apache-2.0
"""Sockets have a size limit: a message that is too long is dropped, and costs no memory."""

from __future__ import annotations

import resource
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from conftest import require
from event_mirror import manager_of, run

require("msgspec")
zmq = require("zmq")
msgpack = require("msgpack")

from kvcore.events import EventPublisher, EventSubscriber, decode_batch  # noqa: E402
from kvcore.observe import publisher as publisher_module  # noqa: E402
from kvcore.observe import subscriber as subscriber_module  # noqa: E402
from kvcore.observe.zmq_reset import ResetListener  # noqa: E402

ANY_PORT = "tcp://127.0.0.1:*"
MIB = 1 << 20


def publisher_of(manager: Any) -> EventPublisher:
    return EventPublisher(manager, ANY_PORT, replay_endpoint=ANY_PORT, interval=0.005)


def test_every_socket_has_a_bound_before_anybody_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds: list[tuple[int, int]] = []

    def noting(verb: Any) -> Any:
        def noted(self: Any, endpoint: str) -> Any:
            if not endpoint.startswith("inproc:"):  # inproc sockets stay in this process
                bounds.append((self.type, self.getsockopt(zmq.MAXMSGSIZE)))
            return verb(self, endpoint)

        return noted

    monkeypatch.setattr(zmq.Socket, "bind", noting(zmq.Socket.bind))
    monkeypatch.setattr(zmq.Socket, "connect", noting(zmq.Socket.connect))
    ResetListener(f"ipc://{tmp_path}/kv").close()
    with publisher_of(manager_of()) as publisher:
        (replay,) = publisher.replay_endpoints
        with EventSubscriber(publisher.endpoints[0], replay_endpoint=replay) as subscriber:
            subscriber.receive(timeout=0.1)
    kinds = {kind for kind, _ in bounds}
    assert kinds == {zmq.PULL, zmq.PUB, zmq.ROUTER, zmq.SUB, zmq.DEALER}
    for kind, bound in bounds:
        assert bound == (256 * MIB if kind in {zmq.SUB, zmq.DEALER} else 4096)


def test_a_long_message_to_the_reset_socket_is_dropped(tmp_path: Path) -> None:
    listener = ResetListener(f"ipc://{tmp_path}/kv")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = bytes(256 * MIB)  # unwritten pages take no memory
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.setsockopt(zmq.LINGER, 0)
        sender.connect(listener.endpoint)
        sender.send(message, copy=False)
        # messages before the reconnection are lost
        while not listener.is_asked():
            sender.send(b"x" * 4096)
            time.sleep(0.02)
    assert listener.is_listening
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) << 10 < 64 * MIB
    listener.close()


def test_a_long_request_for_batches_is_dropped_and_the_next_is_answered() -> None:
    manager = manager_of()
    run(manager, [1, 2, 3, 4])
    with publisher_of(manager) as publisher:
        assert publisher.flush()
        with zmq.Context() as context, context.socket(zmq.DEALER) as at:
            at.setsockopt(zmq.LINGER, 0)
            at.connect(publisher.replay_endpoints[0])
            at.send_multipart((b"", bytes(8 * MIB)))
            at.send_multipart((b"", bytes(8)))
            while not at.poll(50):  # messages before the reconnection are lost
                at.send_multipart((b"", bytes(8)))
            assert at.recv_multipart()[-2] == bytes(8)
        assert publisher.is_running


def test_a_subscriber_takes_no_longer_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber_module, "MOST_BATCH_BYTES", MIB)
    batch = msgpack.packb([0.0, [["AllBlocksCleared"]], 0])
    with zmq.Context() as context, context.socket(zmq.PUB) as at:
        at.setsockopt(zmq.LINGER, 0)
        at.bind(ANY_PORT)
        endpoint = at.getsockopt_string(zmq.LAST_ENDPOINT)
        with EventSubscriber(endpoint, replay_endpoint=None) as subscriber:
            number = 0
            for payload in (batch, bytes(2 * MIB), batch):
                found: list[Any] = []
                for _ in range(5 if len(payload) > MIB else 500):
                    at.send_multipart((b"", number.to_bytes(8, "big"), payload))
                    number += 1
                    found = subscriber.receive(timeout=0.05)
                    if found:
                        break
                assert bool(found) is (payload is batch)


def test_a_publisher_divides_what_a_subscriber_would_not_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = manager_of(num_pages=64)
    prompts = [[i, 2, 3, 4] for i in range(8)]
    for prompt in prompts:
        run(manager, prompt)
    monkeypatch.setattr(publisher_module, "MOST_BATCH_BYTES", 300)
    with publisher_of(manager) as publisher:
        (replay,) = publisher.replay_endpoints
        with EventSubscriber(publisher.endpoints[0], replay_endpoint=replay) as subscriber:
            batches = subscriber.receive(timeout=20)
    stored = [event.token_ids for batch in batches for event in batch.events]
    assert [*chain(*stored)] == [*chain(*prompts)]
    assert len(batches) > 1


@pytest.mark.parametrize("depth", [100, 2_000, 200_000])
@pytest.mark.parametrize("place", ["payload", "event", "field", "map"])
def test_a_nested_payload_is_no_batch(depth: int, place: str) -> None:
    nested = b"\x91" * depth + b"\x90"
    event = {
        "event": nested,
        "field": b"\x92" + msgpack.packb("BlockRemoved") + nested,
        "map": b"\x82" + msgpack.packb("type") + msgpack.packb("BlockRemoved")
        + msgpack.packb("block_hashes") + nested,
    }  # fmt: skip
    payload = nested
    if place != "payload":
        payload = b"\x93" + msgpack.packb(0.0) + b"\x91" + event[place] + msgpack.packb(0)
    with pytest.raises(ValueError, match="is not a batch of events"):
        decode_batch(payload)
