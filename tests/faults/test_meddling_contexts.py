# SPDX-License-Identifier: Apache-2.0
"""Foreign contexts whose attributes raise, or call the manager during its reads."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvcore
from builders import claimed, make_context, make_manager, prefilled, put_in_cache
from foreign_context import Calling, Context, FrozenContext


def test_context_that_cannot_be_written_does_not_break_the_manager() -> None:
    manager = make_manager()
    put_in_cache(manager, range(8))
    context = FrozenContext("foreign", range(10))
    manager.external_claim("foreign")
    with pytest.raises(AttributeError, match="cannot be set"):
        manager.maybe_reserve(context)
    manager.check_integrity()
    manager.release("foreign")
    assert manager.num_free_blocks == 16


class Meddling(Context):
    """A context that fetches another batch when the manager sets its index."""

    manager: Any
    others: list[Any]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "start_idx" and value > 0:
            self.inner = self.manager.fetch(self.others)


def test_fetch_within_a_fetch_has_tables_of_its_own() -> None:
    manager = make_manager(1, 64)
    others = [claimed(manager, range(100, 109))]
    put_in_cache(manager, range(50, 60))
    manager.fetch(others)
    context = Meddling("foreign", range(50, 62))
    context.manager, context.others = manager, others
    manager.external_claim("foreign")
    (outer,) = manager.fetch([context])
    assert outer.lookup_table.tolist() == [list(manager.get_req_blocks("foreign"))]
    (inner,) = context.inner
    assert inner.lookup_table.tolist() == [list(manager.get_req_blocks(others[0].request_id))]


class Reentrant(Context):
    """A context that calls the manager while the manager reads it."""

    manager: Any = None

    @property
    def tokens(self) -> Any:
        if self.manager is not None:
            manager, self.manager = self.manager, None
            manager.release(self.request_id)
        return super().tokens


@pytest.mark.parametrize("verb", ["maybe_reserve", "plan", "fetch"])
def test_context_that_releases_itself_while_it_is_read(verb: str) -> None:
    manager = make_manager()
    context = Reentrant("foreign", range(10))
    manager.external_claim("foreign")
    context.manager = manager
    call: Callable[[Any], object] = getattr(manager, verb)
    with pytest.raises(kvcore.RequestNotFoundError):
        call(context if verb in ("maybe_reserve", "plan") else [context])
    manager.check_integrity()
    assert manager.num_free_blocks == 16


Meddler = Callable[[kvcore.PagedKVCacheManager, list[Any]], object]


def claim_many(manager: kvcore.PagedKVCacheManager, batch: list[Any]) -> None:
    for n in range(40):
        manager.external_claim(n)


def drop_the_first(manager: kvcore.PagedKVCacheManager, batch: list[Any]) -> None:
    """The batch holds the last reference to a context that the manager has read already."""
    name = batch.pop(0).request_id
    gc.collect()
    junk = [make_context(range(5000)) for _ in range(20)]
    assert manager.contains(name)
    assert len(junk) == 20


MEDDLERS: dict[str, Meddler] = {
    "the batch is emptied": lambda manager, batch: batch.clear(),
    "the batch grows": lambda manager, batch: batch.append(batch[0]),
    "a context is dropped": drop_the_first,
    "a context read already grows": lambda manager, batch: batch[0].extend([7] * 20_000),
    "a context read already shrinks": lambda manager, batch: batch[0].rewind(1),
    "a context read already is updated": lambda manager, batch: batch[0].update(1),
    "a request read already leaves": lambda manager, batch: manager.release(batch[0].request_id),
    "a later request leaves": lambda manager, batch: manager.release(batch[2].request_id),
    "requests come": claim_many,
    "the cache is reset": lambda manager, batch: manager.reset_prefix_cache(),
    "the batch is fetched": lambda manager, batch: manager.fetch(list(batch)),
    "the batch is committed": lambda manager, batch: manager.step(list(batch)),
    "everything is reserved": lambda manager, batch: manager.maybe_reserve_batch(list(batch), 9),
}


@pytest.mark.parametrize("verb", ["maybe_reserve_batch", "fetch", "step"])
@pytest.mark.parametrize("meddler", MEDDLERS.values(), ids=list(MEDDLERS))
def test_whatever_happens_while_a_batch_is_read_the_manager_stays_whole(
    verb: str, meddler: Meddler
) -> None:
    manager = make_manager(4, 64)
    put_in_cache(manager, range(8))
    batch: list[Any] = [claimed(manager, range(10)), Calling("foreign", range(6, 20))]
    manager.external_claim("foreign")
    batch.append(prefilled(manager, range(50, 70)))
    if verb == "step":
        manager.fetch([batch[1]])
        batch[1].update(1)
    batch[1].call = lambda: meddler(manager, batch)
    try:
        getattr(manager, verb)(batch)
    except (kvcore.KVCacheError, ValueError) as error:
        assert str(error)
    manager.check_integrity()
    for context in [c for c in dict.fromkeys(batch) if manager.contains(c.request_id)]:
        pages = manager.get_req_blocks(context.request_id)
        assert len(set(pages)) == len(pages)
        manager.release(context.request_id)
    manager.check_integrity()


def test_batch_that_is_no_list_is_read_once() -> None:
    manager = make_manager()
    batch = [claimed(manager, range(5)), claimed(manager, range(7))]
    (entry,) = manager.fetch(context for context in batch)
    assert entry.cache_lengths.tolist() == [0, 0]
    kvcore.update_batch(batch, [1, 2])
    assert manager.step(context for context in batch).shape == (1, 3)  # both share a prefix
    lookup = np.array(entry.lookup_table)
    assert lookup.shape == (2, 2)
