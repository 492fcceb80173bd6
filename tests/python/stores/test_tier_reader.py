# SPDX-License-Identifier: Apache-2.0
"""The reader's calls to each store, with a made-up core and stores that the test scripts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import numpy as np
import pytest

from interrupted_starts import MOMENTS, interrupt_starts
from kvcore.metrics import TierMetrics
from kvcore.stores.tiers.adapters import ALL_PARTS
from kvcore.stores.tiers.memory import HostMemory, Parts, mask_of
from kvcore.stores.tiers.reader import Flights, StoreDepth, StoreReader


def key(column: int) -> bytes:
    return column.to_bytes(32, "big")


class Pages:
    """The memory of the host tier."""

    def memory(self, replica: int) -> Any:
        return np.zeros((100, 8), np.uint8)

    def wait(self, replica: int) -> None:
        pass

    def expect(self, replica: int, last: int) -> None:
        assert 0 <= last < 100

    def run(self, orders: Any) -> int:
        raise AssertionError


class FakeFill:
    def __init__(self, columns: Sequence[tuple[int, int]]) -> None:
        self.replica = 0
        self.keys = [key(column) for column, _ in columns]
        self.parts = [
            [(part, 2 * column + part % 2) for part in range(2) if mask >> part & 1]
            for column, mask in columns
        ]
        self.finished: tuple[int, bool] | None = None

    def finish(self, arrived: int, forward: bool = False) -> None:
        assert self.finished is None
        self.finished = arrived, forward


class FakeSearch:
    """Columns with one part, and a window over the last `window` columns with another part."""

    def __init__(self, have: int = 0, most: int = 10, window: int = 0, room: int = 100) -> None:
        self.replica, self.have, self.legal, self.most = 0, have, have, most
        self.window, self.room, self.has_gaps = window, room, False
        self.fills: list[FakeFill] = []
        self.there: set[tuple[int, int]] = set()

    def keys(self, first: int, last: int) -> list[bytes]:
        assert 0 <= first < last <= self.most
        return [key(column) for column in range(first, last)]

    def needed(self, end: int) -> list[tuple[int, int]]:
        found = []
        for column in range(end):
            mask = 1 if column >= self.have and (column, 0) not in self.there else 0
            in_window = end - self.window <= column
            if in_window and self.window and (column, 1) not in self.there:
                mask |= 2
            if mask:
                found.append((column, mask))
        return found

    def begin_fill(self, columns: list[tuple[int, int]]) -> FakeFill | None:
        taken = columns[: self.room]
        if not taken:
            return None
        self.fills.append(FakeFill(taken))
        return self.fills[-1]


class FakeStore:
    """A store with parts of columns; it may need a read to find out which parts it has."""

    is_private = False

    def __init__(self, name: str, parts: dict[int, int], *, knows: bool = True) -> None:
        self.name, self.parts, self.knows = name, parts, knows
        self.asked: list[list[int]] = []
        self.read_columns: list[list[int]] = []
        self.fails_from = 1000
        self.handle: Handle | None = None
        self.interrupt: BaseException | None = None

    def parts_of(self, keys: Sequence[bytes]) -> list[int]:
        columns = [int.from_bytes(each, "big") for each in keys]
        self.asked.append(columns)
        found = [self.parts.get(column, 0) for column in columns]
        return found if self.knows else [ALL_PARTS if each else 0 for each in found]

    def read(
        self, keys: Sequence[bytes], to: Sequence[Parts], begun: Callable[[Any], None]
    ) -> list[int]:
        columns = [int.from_bytes(each, "big") for each in keys]
        self.read_columns.append(columns)
        if self.handle is not None:
            begun(self.handle)
            if self.interrupt is not None:
                raise self.interrupt
            return []
        masks = []
        for column, parts in zip(columns, to, strict=True):
            if column >= self.fails_from:
                break
            masks.append(self.parts[column])
            if mask_of(parts) & ~self.parts[column]:
                break
        return masks

    def write(self, keys: Sequence[bytes], pages: Sequence[Parts]) -> Callable[[], int]:
        raise AssertionError

    def remove(self, keys: Sequence[bytes]) -> None:
        raise AssertionError

    def clear(self) -> None:
        raise AssertionError

    def metrics(self, waiting: int) -> TierMetrics:
        return TierMetrics(pages_waiting=waiting)

    def close(self, timeout: float | None) -> None:
        raise AssertionError


class Handle:
    """A handle that the test ends."""

    def __init__(self) -> None:
        self.over = Event()

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self.over.wait(timeout)

    def result(self) -> int:
        return 0


def reader_of(*stores: FakeStore, batch_bytes: int = 1 << 20) -> StoreReader:
    memory = HostMemory(Pages(), None, 1)
    return StoreReader(stores, memory, batch_bytes, 10, lambda: False)


def test_one_page_is_asked_for_first_and_then_more_at_a_time() -> None:
    store = FakeStore("a", dict.fromkeys(range(40), 1))
    depth = StoreDepth(FakeSearch(have=3, most=100), [store])
    assert depth.reach() == 40
    assert [len(each) for each in store.asked] == [1, 8, 16, 32]
    assert store.asked[0] == [3]
    empty = FakeStore("b", {})
    assert StoreDepth(FakeSearch(have=3, most=100), [empty]).reach() == 3
    assert empty.asked == [[3]]


def test_each_page_is_read_from_the_first_store_that_has_it() -> None:
    upper = FakeStore("a", {0: 1, 1: 1, 4: 1})
    lower = FakeStore("b", dict.fromkeys(range(6), 1))
    search = FakeSearch()
    reader_of(upper, lower).bring(search)
    assert upper.read_columns == [[0, 1], [4]]
    assert lower.read_columns == [[2, 3], [5]]
    assert [each.finished for each in search.fills] == [(6, True)]  # the upper store lacks parts


def test_what_the_first_store_has_needs_no_writing() -> None:
    store = FakeStore("a", dict.fromkeys(range(6), 1))
    search = FakeSearch()
    reader_of(store, FakeStore("b", {})).bring(search)
    assert [each.finished for each in search.fills] == [(6, False)]


def test_reads_come_in_batches() -> None:
    store = FakeStore("a", dict.fromkeys(range(5), 1))
    search = FakeSearch()
    reader_of(store, batch_bytes=16).bring(search)
    assert store.read_columns == [[0, 1], [2, 3], [4]]
    reader_of(store, batch_bytes=1).bring(FakeSearch())
    assert store.read_columns[3:] == [[0], [1], [2], [3], [4]]


def test_a_page_that_one_store_loses_is_read_from_another() -> None:
    upper = FakeStore("a", dict.fromkeys(range(6), 1))
    upper.fails_from = 2
    lower = FakeStore("b", {2: 1, 3: 1})
    search = FakeSearch()
    reader_of(upper, lower).bring(search)
    arrived = [each.finished[0] for each in search.fills if each.finished]
    assert arrived[0] == 4
    assert lower.read_columns[:2] == [[2], [3]]


def test_a_short_fill_is_a_short_hit() -> None:
    store = FakeStore("a", dict.fromkeys(range(6), 1))
    search = FakeSearch(room=4)
    reader_of(store).bring(search)
    assert [each.finished for each in search.fills] == [(4, False)]
    reader_of(store).bring(FakeSearch(room=0))


@pytest.mark.parametrize("knows", [True, False])
def test_a_hit_ends_where_its_window_is(knows: bool) -> None:
    parts = {**dict.fromkeys(range(8), 1), 2: 3, 3: 3, 6: 3}
    store = FakeStore("a", parts, knows=knows)
    search = FakeSearch(window=2)
    reader_of(store).bring(search)
    last = search.fills[-1]
    assert last.keys[-1] == key(3)
    assert last.finished == (len(last.keys), False)
    if knows:
        assert len(search.fills) == 1


def test_nothing_is_read_that_makes_no_hit_longer() -> None:
    store = FakeStore("a", dict.fromkeys(range(8), 1))
    search = FakeSearch(window=2)
    reader_of(store).bring(search)
    assert search.fills == []
    assert store.read_columns == []


def test_memory_is_not_given_back_while_a_store_has_it() -> None:
    store = FakeStore("a", dict.fromkeys(range(3), 1))
    store.handle = Handle()
    search = FakeSearch()
    reader = reader_of(store)
    reader.bring(search)
    (fill,) = search.fills
    assert fill.finished is None
    store.handle.over.set()
    reader.close(60)
    assert fill.finished == (0, False)


def test_an_interrupt_does_not_give_memory_back_either() -> None:
    store = FakeStore("a", dict.fromkeys(range(3), 1))
    store.handle, store.interrupt = Handle(), KeyboardInterrupt()
    search = FakeSearch()
    reader = reader_of(store)
    with pytest.raises(KeyboardInterrupt):
        reader.bring(search)
    assert search.fills[0].finished is None
    store.handle.over.set()
    reader.close(60)
    assert search.fills[0].finished == (0, False)


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_thread_gives_memory_back_once_the_store_is_done(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    class Watched(FakeFill):
        def __del__(self) -> None:
            given_back.append(handle.done())

    class Search(FakeSearch):
        def begin_fill(self, columns: Any) -> FakeFill:
            return Watched(columns)

    class Late(Handle):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:
                self.over.set()  # the store has ended its read
            return super().wait(timeout)

    given_back: list[bool] = []
    store = FakeStore("a", dict.fromkeys(range(3), 1))
    handle = store.handle = Late()
    reader = reader_of(store)
    interrupt_starts(monkeypatch, "kvcore late read", moment, lambda: True)
    with pytest.raises(KeyboardInterrupt):
        reader.bring(Search())
    reader.close(60)
    gc.collect()
    assert given_back == [True]


def test_what_arrives_after_a_reset_is_not_found() -> None:
    class Resetting(FakeStore):
        reader: StoreReader

        def read(self, keys: Any, to: Any, begun: Any) -> list[int]:
            self.reader.forget()
            return super().read(keys, to, begun)

    store = Resetting("a", dict.fromkeys(range(3), 1))
    store.reader = reader_of(store)
    search = FakeSearch()
    store.reader.bring(search)
    assert [each.finished for each in search.fills] == [(0, False)]


def test_an_error_of_the_core_is_a_shorter_hit(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(FakeSearch):
        def begin_fill(self, columns: Any) -> FakeFill | None:
            raise MemoryError

    reader_of(FakeStore("a", {0: 1})).bring(Failing())
    assert "could not be loaded" in caplog.text


def test_pages_on_their_way_are_known_by_replica_and_key() -> None:
    flights = Flights()
    assert flights.begin(0, [b"a", b"b"]) is None
    assert flights.begin(1, [b"a"]) is None
    other = flights.begin(0, [b"c", b"b"])
    assert other is not None
    assert not other.is_set()
    assert flights.begin(0, [b"c"]) is None  # the refused call took no key
    flights.end(0, [b"a", b"b"])
    assert other.is_set()
    assert flights.begin(0, [b"b"]) is None
