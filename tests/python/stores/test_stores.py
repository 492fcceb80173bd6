# SPDX-License-Identifier: Apache-2.0
"""Rules of all stores of pages: kvcore's stores and users' stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcore.errors import KVCacheError
from kvcore.stores import (
    BlockStore,
    DiskTier,
    FinishedHandle,
    HostTier,
    MemoryStore,
    StoreHandle,
    parse_tier,
)
from stored_pages import PAGE, content, get, key, open_disk, put
from tables import table

MAKERS: dict[str, Callable[[Path], BlockStore]] = {
    "disk": lambda folder: open_disk(folder, 4),
    "memory": lambda _: MemoryStore(4 * PAGE),
}


@pytest.fixture(params=MAKERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockStore]:
    made = MAKERS[request.param](tmp_path / "store")
    yield made
    made.close()


def test_has_what_the_protocol_asks_for(store: BlockStore) -> None:
    assert isinstance(store, BlockStore)
    handle = store.put_from([key(1)], [content(1)])
    assert isinstance(handle, StoreHandle)
    assert handle.wait()
    assert handle.wait(timeout=0)
    assert handle.done()
    assert handle.result() == 1


def test_serves_a_prefix(store: BlockStore) -> None:
    assert put(store, 1, 2, 3) == 3
    assert store.contains([key(1), key(9), key(3)]) == [True, False, True]
    assert get(store, 1, 2, 3) == 3
    assert get(store, 1, 9, 3) == 1
    assert get(store, 9, 1) == 0
    assert get(store) == 0
    health = store.health()
    assert (health.hits, health.misses, health.breaker) == (4, 4, "closed")
    assert (health.bytes_in, health.bytes_out) == (3 * PAGE, 4 * PAGE)


def test_serves_the_parts_that_there_are(store: BlockStore) -> None:
    first, third = content(1, 0, 1000), content(1, 2, 2000)
    assert store.put_from([key(1)], [[first, None, third]]).result() == 1
    to = bytearray(2000)
    assert store.get_into([key(1)], [[None, None, to]]).result() == 1
    assert to == third
    assert store.get_into([key(1)], [[None, to]]).result() == 0
    assert store.get_into([key(1)], [[bytearray(999)]]).result() == 0  # of another size
    both = [bytearray(1000), None, bytearray(2000)]
    assert store.get_into([key(1)], [both]).result() == 1
    assert both == [first, None, third]


def test_forgets_what_is_removed_and_what_was_used_least_recently(store: BlockStore) -> None:
    put(store, 1)
    put(store, 2)
    assert store.remove([key(1), key(7)]) == 1
    assert store.contains([key(1), key(2)]) == [False, True]
    for number in (3, 4, 5):
        put(store, number)
    get(store, 2)
    put(store, 6)
    assert store.contains([key(n) for n in (2, 3, 4, 5, 6)]) == [True, False, True, True, True]
    assert store.capacity().pages == 4
    used, most = store.capacity().used_bytes, store.capacity().bytes
    assert most is not None
    assert 0 < used <= most


def test_refuses_everything_once_closed(store: BlockStore) -> None:
    put(store, 1)
    store.close()
    store.close()
    for call in (
        lambda: put(store, 1),
        lambda: get(store, 1),
        lambda: store.contains([key(1)]),
        lambda: store.remove([key(1)]),
        store.capacity,
    ):
        with pytest.raises(KVCacheError, match="store is closed; open another"):
            call()


def test_finished_handles_are_done() -> None:
    handle = FinishedHandle(3)
    assert handle.done()
    assert handle.wait(0)
    assert handle.result() == 3


# -- names of tiers --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "tier"),
    [
        ("host:8GiB", HostTier(8 << 30)),
        ("host: 4096", HostTier(4096)),
        ("disk:/var/cache/kv:200GiB", DiskTier((("/var/cache/kv", 200 << 30),))),
        ("disk:kv:1.5 kB", DiskTier((("kv", 1500),))),
        ("disk:/a:b:1KiB", DiskTier((("/a:b", 1024),))),
        ("disk:/a:1KiB,/b:2KiB", DiskTier((("/a", 1024), ("/b", 2048)))),
    ],
)
def test_a_tier_is_read(text: str, tier: HostTier | DiskTier) -> None:
    assert parse_tier(text) == tier


@table(
    ("text", "told"),
    [
        ("", "must begin with one of host:, disk:"),
        ("host", "must begin with"),
        ("tape:/dev/st0:1TB", "must begin with"),
        ("HOST:1GiB", "must begin with"),
        ("host:", "expected a size"),
        ("host:8 apples", "expected a size"),
        ("host:0", "must be 1 to"),
        ("host:-1GiB", "expected a size"),
        ("host:" + "9" * 50, "at most 40 characters"),
        ("host:99999999999999TiB", "must be 1 to"),
        ("disk:/var/cache", "lacks a size"),
        ("disk::1GiB", "give its path"),
        ("disk:", "lacks a size"),
        ("disk:/a:1GiB,", "lacks a size"),
        ("disk:/a:1GiB,/a:2GiB", "name each once"),
        ("disk:/a\0:1GiB", "give its path"),
    ],
)
def test_a_bad_tier_is_told_with_a_right_one(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as error:
        parse_tier(text)
    assert "for example 'host:8GiB'" in str(error.value) or "disk:/var/cache" in str(error.value)


def test_a_tier_is_a_text() -> None:
    with pytest.raises(TypeError, match="must be a text"):
        parse_tier(8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be an int"):
        HostTier(True)
    with pytest.raises(ValueError, match="without directories"):
        DiskTier(())


# -- the store in memory ---------------------------------------------------------------------------
def test_a_page_larger_than_the_memory_store_evicts_nothing() -> None:
    store = MemoryStore(4 * PAGE)
    assert put(store, 1, 2) == 2
    assert store.put_from([key(3)], [bytes(4 * PAGE + 1)]).result() == 0
    assert get(store, 1, 2) == 2
    assert store.put_from([key(1)], [bytes(4 * PAGE)]).result() == 1  # a new size replaces the page
    assert store.get_into([key(1)], [bytearray(4 * PAGE)]).result() == 1
    assert store.capacity().pages == 1


def test_a_wrong_batch_changes_nothing_in_memory() -> None:
    store = MemoryStore(4 * PAGE)
    with pytest.raises(ValueError, match="zip"):
        store.put_from([key(1), key(2)], [content(1)])
    with pytest.raises(TypeError, match="bytes-like object is required, not 'int'"):
        store.put_from([key(1), key(2)], [content(1), 5])
    assert store.contains([key(1), key(2)]) == [False, False]
    page = bytearray(PAGE)
    put(store, 1)
    with pytest.raises(ValueError, match="zip"):
        store.get_into([key(1), key(2)], [page])
    assert page == bytes(PAGE)
    assert store.health().hits == store.health().misses == 0


def test_the_memory_store_has_no_health_once_closed() -> None:
    store = MemoryStore(PAGE)
    store.close()
    with pytest.raises(KVCacheError, match="this store is closed; open another"):
        store.health()


def test_buffers_may_call_the_memory_store() -> None:
    store = MemoryStore(4 * PAGE)

    class Curious(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            assert store.contains([key(1)]) == [False]
            return super().__iter__()

    assert store.put_from([key(1)], [Curious([content(1)])]).result() == 1
    assert get(store, 1) == 1
