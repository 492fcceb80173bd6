# SPDX-License-Identifier: Apache-2.0
"""The disk store against a dictionary, with restarts and with evictions of pages."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcore.stores import DiskStore
from stored_pages import FINGERPRINT, content, key, quota

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

PAGES = 5
PART = 3000
NUMBERS = st.integers(0, 9)
PARTS = st.frozensets(st.integers(0, 2), min_size=1)


class DiskStoreMachine(RuleBasedStateMachine):
    """Writes one batch at a time, with pages in the given order, on one thread of the store."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.expected: OrderedDict[int, frozenset[int]] = OrderedDict()  # oldest use first
        self.written: list[int] = []  # in this order, which a restart restores as the order of uses
        self.store = self.opened()

    def opened(self) -> DiskStore:
        tier = f"disk:{Path(self.folder.name)}:{quota(PAGES, 3 * PART)}"
        size = 2 * (quota(1, 3 * PART) - 4096)
        return DiskStore(
            tier, page_bytes=3 * PART, fingerprint=FINGERPRINT, segment_bytes=size, threads=1
        )

    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=3), parts=PARTS)
    def put(self, numbers: list[int], parts: frozenset[int]) -> None:
        pages = [[content(n, i, PART) if i in parts else None for i in range(3)] for n in numbers]
        stored = self.store.put_from([key(n) for n in numbers], pages).result()
        assert stored == len(numbers)
        for number in numbers:
            if parts <= self.expected.get(number, frozenset()):
                self.expected.move_to_end(number)
                continue
            # A replaced page keeps its slot until the new page is written.
            if len(self.expected) == PAGES:
                self.expected.popitem(last=False)
            self.expected.pop(number, None)
            self.expected[number] = parts
            self.written = [n for n in self.written if n != number] + [number]

    @rule(numbers=st.lists(NUMBERS, max_size=4), parts=PARTS)
    def get(self, numbers: list[int], parts: frozenset[int]) -> None:
        pages = [[bytearray(PART) if i in parts else None for i in range(3)] for _ in numbers]
        served = self.store.get_into([key(n) for n in numbers], pages).result()
        hits = 0
        while hits < len(numbers) and parts <= self.expected.get(numbers[hits], frozenset()):
            self.expected.move_to_end(numbers[hits])
            hits += 1
        assert served == hits
        for number, page in zip(numbers[:served], pages, strict=False):
            assert page == [content(number, i, PART) if i in parts else None for i in range(3)]

    @rule(numbers=st.lists(NUMBERS, max_size=3, unique=True))
    def remove(self, numbers: list[int]) -> None:
        there = [n for n in numbers if n in self.expected]
        assert self.store.remove([key(n) for n in numbers]) == len(there)
        for number in there:
            del self.expected[number]

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.opened()
        assert self.store.stats()["restored"] == len(self.expected)
        order = [n for n in self.written if n in self.expected]
        self.expected = OrderedDict((n, self.expected[n]) for n in order)

    @invariant()
    def finds_what_is_stored(self) -> None:
        bits = [sum(1 << i for i in self.expected.get(n, ())) for n in range(10)]
        assert self.store.parts_of([key(n) for n in range(10)]) == bits
        self.store._store.check_integrity()

    def teardown(self) -> None:
        stats = self.store.stats()
        assert stats["corrupt"] == stats["errors"] == stats["no_room"] == 0
        self.store.close()
        self.folder.cleanup()


TestDiskStore = DiskStoreMachine.TestCase
TestDiskStore.settings = settings(
    max_examples=max(10, settings().max_examples // 4), stateful_step_count=25
)
