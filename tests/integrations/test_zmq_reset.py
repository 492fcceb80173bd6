# SPDX-License-Identifier: Apache-2.0
"""A message to the manager's socket resets the prefix cache of all replicas."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from builders import claimed, make_manager, prefilled, put_in_cache
from conftest import require
from kvcore.observe.zmq_reset import ResetListener
from reset_sender import base, fetch_until_reset, send_reset
from together import THREADS, run_together, switch_often

__all__ = ["base", "switch_often"]

require("zmq")

PROMPT = list(range(12))


def test_message_resets_every_replica(base: str) -> None:
    manager = make_manager(replicas=2, zmq_endpoint_base=base)
    for replica in range(2):
        put_in_cache(manager, PROMPT, replica_idx=replica)
    running = prefilled(manager, range(50, 60), replica_idx=1)
    manager.fetch([])
    assert manager.match_prefix(PROMPT) == 12
    send_reset(base)
    fetch_until_reset(manager, PROMPT)
    assert [manager.match_prefix(PROMPT, replica_idx=r) for r in range(2)] == [0, 0]
    assert manager.match_prefix(running.tokens, replica_idx=1) == 0  # also pages in use


def test_several_messages_and_work_between(base: str) -> None:
    manager = make_manager(zmq_endpoint_base=base)
    for n in range(3):
        put_in_cache(manager, PROMPT)
        send_reset(base, messages=n + 1)
        fetch_until_reset(manager, PROMPT)
        manager.fetch([claimed(manager, range(n + 1))])


def test_without_prefix_caching_nothing_listens(base: str) -> None:
    manager = make_manager(caching=False, zmq_endpoint_base=base)
    manager.fetch([])
    assert not Path(f"{base.removeprefix('ipc://')}-reset_prefix_cache").exists()


def test_endpoint_is_free_again_once_the_manager_is_gone(base: str) -> None:
    for _ in range(3):
        manager = make_manager(zmq_endpoint_base=base)
        put_in_cache(manager, PROMPT)
        send_reset(base)
        fetch_until_reset(manager, PROMPT)
        del manager
        gc.collect()


@pytest.mark.usefixtures("switch_often")
def test_threads_share_the_socket(base: str) -> None:
    """No other thread may take a message that one thread has seen but not taken yet."""
    listener = ResetListener(base)
    asked = [0] * THREADS

    def work(number: int) -> None:
        if number == 0:
            for _ in range(20):
                send_reset(base, messages=100)
        while not any(asked):
            asked[number] += listener.is_asked()
        for _ in range(500):
            asked[number] += listener.is_asked()

    run_together(work)
    listener.close()
