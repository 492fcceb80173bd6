# SPDX-License-Identifier: Apache-2.0
"""Every call that reads the prefix cache checks the reset socket first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, make_context, make_manager, prefilled, put_in_cache
from kvcore.observe import zmq_reset

PROMPT = list(range(12))


class Messages:
    """A reset listener without a socket."""

    waiting = False

    def __init__(self, _endpoint_base: str) -> None:
        pass

    def is_asked(self) -> bool:
        asked, Messages.waiting = Messages.waiting, False
        return asked


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a manager whose replicas both cache a prompt; a reset message waits."""
    monkeypatch.setattr(zmq_reset, "ResetListener", Messages)
    Messages.waiting = False
    made = make_manager(replicas=2, zmq_endpoint_base="none")
    for replica in range(2):
        put_in_cache(made, PROMPT, replica_idx=replica)
    for name in ("a", "b"):
        made.claim(name, replica_idx=1)
    assert [cached(made, replica) for replica in range(2)] == [3, 3]
    Messages.waiting = True
    return made


def cached(manager: Any, replica: int) -> int:
    count: int = manager._core.stats(replica).cached_pages
    return count


def pinned(manager: Any) -> object:
    with manager.pin(PROMPT) as prefix:
        return prefix.num_tokens


def fetched(manager: Any) -> object:
    context = make_context([*PROMPT, 50], "a")
    manager.fetch([context])
    return context.start_idx


def reserved(manager: Any) -> object:
    context = make_context([*PROMPT, 50], "a")
    assert manager.maybe_reserve(context)
    return context.start_idx


def reserved_together(manager: Any) -> object:
    batch = [make_context([*PROMPT, 50], name) for name in ("a", "b")]
    assert manager.maybe_reserve_batch(batch) == 2
    return max(context.start_idx for context in batch)


READS: dict[str, Callable[[Any], object]] = {
    "maybe_reserve": reserved,
    "maybe_reserve_batch": reserved_together,
    "plan": lambda m: m.plan(make_context([*PROMPT, 50], "a")).hit_tokens,
    "match_prefix": lambda m: m.match_prefix(PROMPT),
    "match_prefix with pages": lambda m: m.match_prefix(PROMPT, return_pages=True)[0],
    "pin": pinned,
    "fetch": fetched,
    "fetch of nothing": lambda m: len(m.fetch([])) - 2,
}


@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
def test_nothing_old_is_found_after_a_reset(read: Callable[[Any], object], manager: Any) -> None:
    assert read(manager) == 0
    assert not Messages.waiting
    assert cached(manager, 0) == 0
    manager.check_integrity()


def test_step_swaps_no_page_for_an_old_one(manager: Any) -> None:
    Messages.waiting = False
    context = make_context(PROMPT, "a")
    context.active_idx = 1  # no hit
    assert manager.reserve(context)
    own = manager.get_req_blocks("a")
    context.update(0)
    context.update(0)
    Messages.waiting = True
    assert manager.step([context]).shape == (0, 3)
    assert manager.get_req_blocks("a") == own


def test_no_replica_is_recommended_for_what_is_forgotten(manager: Any) -> None:
    Messages.waiting = False
    put_in_cache(manager, range(50, 70), replica_idx=1)
    late = make_context([*range(50, 70), 1])
    assert manager.get_or_recommend_replica(late) == 1
    Messages.waiting = True
    manager.get_or_recommend_replica(late)
    assert not Messages.waiting
    assert [cached(manager, replica) for replica in range(2)] == [0, 0]


def test_pages_in_use_stay(manager: Any) -> None:
    Messages.waiting = False
    context = prefilled(manager, range(50, 60))
    pages = manager.get_req_blocks(context.request_id)
    Messages.waiting = True
    (inputs, _) = manager.fetch([context])
    assert np.array_equal(inputs.lookup_table[0], pages)


def test_error_of_the_listener_comes_before_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Messages):
        def is_asked(self) -> bool:
            raise OSError("the socket is gone")

    monkeypatch.setattr(zmq_reset, "ResetListener", Broken)
    manager = make_manager(zmq_endpoint_base="none")
    context = claimed(manager, PROMPT)
    with pytest.raises(OSError, match="gone"):
        manager.reserve(context)
    assert manager.get_req_blocks(context.request_id) == []
    assert manager.metrics == kvcore.KVCacheMetrics()
