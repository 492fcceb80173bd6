# SPDX-License-Identifier: Apache-2.0
"""kvcore's slots of vLLM's chunks, by hand: owners, the order of eviction, and failures.

Run by ``tests/integrations/run_vllm.py --part ours``.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

from kvcore.integrations.vllm.offload_below import Below
from kvcore.integrations.vllm.offload_manager import KVCoreOffloadingManager
from vllm_offloading_engine import check_slots


class Offer:
    """Requests of one manager, made by hand."""

    def __init__(self, slots: int, **more: Any) -> None:
        self.manager = KVCoreOffloadingManager(slots, enable_events=True, **more)

    def begin(self, name: str, *chunks: int) -> tuple[Any, list[OffloadKey]]:
        """Return a request, and the keys of its chunks, in order."""
        context = ReqContext(name)
        keys = [make_offload_key(bytes([chunk]) * 32, 0) for chunk in chunks]
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (i + 1))
        self.manager.on_new_request(context)
        return context, keys

    def store(self, name: str, *chunks: int) -> list[OffloadKey] | None:
        """Store chunks in a request and end it; return the evicted keys."""
        context, keys = self.begin(name, *chunks)
        taken = self.manager.prepare_store(keys, context)
        if taken is not None:
            self.manager.complete_store({*taken.keys_to_store}, context)
        self.manager.on_request_finished(context)
        check_slots(self.manager, at_rest=True)
        return None if taken is None else taken.evicted_keys


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    offer = Offer(4)
    offer.store("a", 1, 2, 3)
    assert [key[0] for key in offer.store("b", 9, 8, 7) or ()] == [3, 2]


def test_what_a_request_uses_stays_until_it_ends() -> None:
    offer = Offer(3)
    offer.store("a", 1, 2, 3)
    context, keys = offer.begin("b", 1, 2, 3)
    offer.manager.prepare_load(keys, context)
    offer.manager.complete_load({*keys}, context)
    assert offer.manager.prepare_store(offer.begin("c", 5)[1], ReqContext("c")) is None
    check_slots(offer.manager)
    offer.manager.on_request_finished(context)
    check_slots(offer.manager, at_rest=True)
    assert [key[0] for key in offer.store("d", 5) or ()] == [3]


def test_a_store_that_failed_leaves_no_key() -> None:
    offer = Offer(2)
    context, keys = offer.begin("a", 1, 2)
    assert offer.manager.prepare_store(keys, context) is not None
    assert {offer.manager.lookup(key, context) for key in keys} == {LookupResult.HIT_PENDING}
    offer.manager.complete_store({*keys}, context, success=False)
    assert {offer.manager.lookup(key, context) for key in keys} == {LookupResult.MISS}
    offer.manager.on_request_finished(context)
    check_slots(offer.manager, at_rest=True)
    (event,) = offer.manager.take_events()
    assert event.removed
    assert event.metadata_only


def test_a_load_of_what_is_not_there_changes_nothing() -> None:
    offer = Offer(2)
    offer.store("a", 1)
    context, keys = offer.begin("b", 1, 2)
    with pytest.raises(KeyError, match="not in host memory"):
        offer.manager.prepare_load(keys, context)
    check_slots(offer.manager, at_rest=True)


def test_slots_of_jobs_wait_for_the_fence_of_a_reset() -> None:
    offer = Offer(3)
    offer.store("a", 1)
    loads, stored = offer.begin("b", 1)
    offer.manager.prepare_load(stored, loads)
    context, keys = offer.begin("c", 2)
    assert offer.manager.prepare_store(keys, context) is not None
    offer.manager.reset_cache()
    check_slots(offer.manager)
    assert len(offer.manager._free) == 1
    offer.manager.on_reset_flushed()
    assert len(offer.manager._free) == 3
    offer.manager.on_request_finished(loads)
    offer.manager.on_request_finished(context)
    check_slots(offer.manager, at_rest=True)


def test_events_tell_of_chunks_in_order() -> None:
    offer = Offer(1)
    offer.store("a", 1)
    offer.store("b", 2)
    told = [(event.keys[0][0], event.removed) for event in offer.manager.take_events()]
    assert told == [(1, False), (1, True), (2, False)]
    assert not [*offer.manager.take_events()]


class Hanging:
    """A store that has every chunk, and whose read outlasts its time limit."""

    name = "hanging"

    def __init__(self) -> None:
        self.is_over = False

    def parts_of(self, keys: list[bytes]) -> list[int]:
        return [1] * len(keys)

    def read(self, keys: list[bytes], to: Any, begun: Any) -> list[int]:
        begun(SimpleNamespace(done=lambda: self.is_over))
        return []

    def write(self, keys: list[bytes], pages: Any) -> Any:
        return lambda: 0

    def clear(self) -> None:
        pass

    def close(self, timeout: float | None) -> None:
        pass


@pytest.mark.parametrize("is_reset", [False, True])
def test_slots_of_a_read_that_hangs_are_nobody_elses(is_reset: bool) -> None:
    store: Any = Hanging()
    region = SimpleNamespace(base_tensor=torch.zeros(3 * 4096, dtype=torch.int8), num_chunks=3)
    offer = Offer(3, below=Below([store], region, bytes(32)))
    manager = offer.manager
    context, keys = offer.begin("a", 1, 2)
    assert {manager.lookup(key, context) for key in keys} == {LookupResult.RETRY}
    step = ScheduleEndContext((), ())
    wait_until(manager, step, lambda: manager.lookup(keys[0], context) != LookupResult.RETRY)
    assert {manager.lookup(key, context) for key in keys} == {LookupResult.HIT_PENDING}
    manager.on_schedule_end(step)
    wait_until(manager, step, lambda: manager.lookup(keys[0], context) == LookupResult.MISS)
    if is_reset:
        manager.reset_cache()
        manager.on_reset_flushed()
    check_slots(manager)
    assert len(manager._free) == 1
    store.is_over = True
    wait_until(manager, step, lambda: not manager._below_slots)
    assert len(manager._free) == 3
    manager.on_request_finished(context)
    check_slots(manager, at_rest=True)
    manager.shutdown()


def wait_until(manager: Any, step: ScheduleEndContext, is_so: Any) -> None:
    """Run empty steps until a condition holds."""
    for _ in range(2000):
        manager.on_schedule_end(step)
        if is_so():
            return
        time.sleep(0.001)
    raise AssertionError("the condition never held")


class FaultyTree:
    """A tree that fails the n-th call of those methods that change it, before any change."""

    def __init__(self, tree: Any, fails_at: int) -> None:
        self.tree = tree
        self.left = fails_at

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.tree, name)
        if name not in ("insert", "pin", "match", "evict", "unpin"):
            return verb

        def call(*args: Any, **more: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise MemoryError("injected")
            return verb(*args, **more)

        return call


def serve(offer: Offer) -> None:
    """Store, use again, load, evict and fail, in requests of several chunks."""
    manager = offer.manager
    offer.store("a", 1, 2, 3)
    context, keys = offer.begin("b", 1, 2, 4)
    manager.touch(keys, context)
    manager.prepare_load(keys[:2], context)
    manager.prepare_store(keys, context)
    manager.complete_load({*keys[:2]}, context)
    manager.complete_store({keys[2]}, context)
    manager.on_request_finished(context)
    offer.store("c", 5, 6, 7)


TREE_CALLS = 28  # calls of `serve` that change the tree


def test_every_call_of_the_tree_is_made_to_fail() -> None:
    offer = Offer(4)
    manager: Any = offer.manager
    manager._tree = counting = FaultyTree(manager._tree, 1 << 30)
    serve(offer)
    assert (1 << 30) - counting.left == TREE_CALLS


@pytest.mark.parametrize("fails_at", range(1, TREE_CALLS + 1))
def test_a_call_of_the_tree_that_fails_loses_no_slot(fails_at: int) -> None:
    offer = Offer(4)
    manager: Any = offer.manager
    manager._tree = FaultyTree(tree := manager._tree, fails_at)
    with pytest.raises(MemoryError, match="injected"):
        serve(offer)
    manager._tree = tree
    check_slots(manager)
    manager.reset_cache()
    manager.on_reset_flushed()
    check_slots(manager, at_rest=True)
    offer.store("d", 1, 2, 3, 4)
