# SPDX-License-Identifier: Apache-2.0
"""A DiskStore reads pages into rows of arrays, as the host tier needs it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore.errors import KVCacheError
from kvcore.stores import DiskStore
from stored_pages import content, key, open_disk, quota

_PAGE = 8192  # whole blocks, for reads in place
_STATE = 1000
_STATE_PART = 63


def _bytes(number: int, part: int = 0, size: int = _PAGE) -> bytes:
    return content(number, part, size)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    """Store pages 0 to 7; the odd pages also have states."""
    store = open_disk(tmp_path, 16, _PAGE + _STATE)
    pages: list[Any] = []
    for number in range(8):
        parts: list[Any] = [_bytes(number)]
        if number % 2:
            parts += [None] * (_STATE_PART - 1) + [_bytes(number, _STATE_PART, _STATE)]
        pages.append(parts)
    assert store.put_from([key(n) for n in range(8)], pages).result() == 8
    yield store
    store.close()


def _rows() -> Any:
    return np.zeros((12, _PAGE), np.uint8)


def _get(store: DiskStore, numbers: list[int], places: Any, *arrays: Any) -> int:
    return store._store.get_placed([key(n) for n in numbers], places, *arrays).result()


def test_each_part_goes_to_its_row(store: DiskStore) -> None:
    rows, slots = _rows(), np.zeros((3, _STATE), np.uint8)
    places = [[(0, 9)], [(0, 2), (_STATE_PART, 1)], [(0, 11)]]
    assert _get(store, [4, 1, 2], places, rows, slots) == 3
    for number, row in ((4, 9), (1, 2), (2, 11)):
        assert rows[row].tobytes() == _bytes(number)
    assert slots[1].tobytes() == _bytes(1, _STATE_PART, _STATE)
    assert not slots[[0, 2]].any()
    assert not rows[[0, 1, 3, 4, 5, 6, 7, 8, 10]].any()


def test_a_hole_or_a_missing_part_ends_it(store: DiskStore) -> None:
    rows, slots = _rows(), np.zeros((3, _STATE), np.uint8)
    assert _get(store, [0, 99, 1], [[(0, 0)], [(0, 1)], [(0, 2)]], rows) == 1
    assert _get(store, [1, 2], [[(_STATE_PART, 0)], [(_STATE_PART, 1)]], rows, slots) == 1
    assert _get(store, [], [], rows) == 0
    assert rows[0].tobytes() == _bytes(0)


@pytest.mark.parametrize("at", [40, 300, 4096 + 17])  # key, table of parts, payload
def test_a_flipped_bit_is_a_miss_and_the_page_is_gone(
    store: DiskStore, tmp_path: Path, at: int
) -> None:
    slot = quota(1, _PAGE + _STATE) - 4096
    for path in tmp_path.glob("segment-*.kv"):
        with path.open("r+b") as file:
            for begin in range(0, path.stat().st_size, slot):
                file.seek(begin + at)
                byte = file.read(1)[0] ^ 16
                file.seek(begin + at)
                file.write(bytes([byte]))
    rows = _rows()
    assert _get(store, [2, 4], [[(0, 0)], [(0, 1)]], rows) == 0
    assert store.health().corrupt >= 1
    assert not store.contains([key(2)])[0]
    assert store.health().breaker == "closed"


def test_a_file_that_ends_too_soon_is_a_miss(store: DiskStore, tmp_path: Path) -> None:
    for path in tmp_path.glob("segment-*.kv"):
        with path.open("r+b") as file:
            file.truncate(4096)
    assert _get(store, [0, 1, 2], [[(0, 0)], [(0, 1)], [(0, 2)]], _rows()) == 0
    assert store.health().corrupt >= 1


def test_sizes_that_differ_are_a_miss(store: DiskStore) -> None:
    assert _get(store, [0], [[(0, 0)]], np.zeros((1, _PAGE - 4096), np.uint8)) == 0
    assert store.contains([key(0)]) == [True]


@pytest.mark.parametrize(
    ("places", "arrays", "error", "text"),
    [
        ([[(0, 0)]], [_rows()], ValueError, "2 keys and 1 places"),
        ([[(0, 0)], [(0, 12)]], [_rows()], IndexError, "row 12, must be 0 to 11"),
        ([[(0, 0)], [(0, -1)]], [_rows()], IndexError, "row -1"),
        ([[(0, 3)], [(0, 3)]], [_rows()], ValueError, "two parts go to the same row"),
        ([[(0, 0)], [(_STATE_PART, 0)]], [_rows()], IndexError, "part 63"),
        ([[(0, 0)], [(1, 1), (0, 2)]], [_rows()], ValueError, "must rise"),
        ([[(0, 0)], [(64, 1)]], [_rows()], ValueError, "less than 64"),
        ([[(0, 0)], []], [_rows()], ValueError, "without parts"),
        ([[(0, 0)], [0]], [_rows()], TypeError, r"places\[1\] must be"),
        ([[(0, 0)], [(0, 1)]], [np.zeros(_PAGE, np.uint8)], TypeError, "uint8"),
        ([[(0, 0)], [(0, 1)]], [np.zeros((2, 8), np.int32)], TypeError, "uint8"),
        ([[(0, 0)], [(0, 1)]], [_rows()[:, ::2]], TypeError, "contiguous"),
        ([[(0, 0)], [(0, 1)]], [b"x" * _PAGE], TypeError, "uint8"),
        ([[(0, 0)], [(0, 1)]], [_rows(), 7], TypeError, "slots"),
    ],
)
def test_wrong_arguments_read_nothing(
    store: DiskStore, places: Any, arrays: Any, error: Any, text: str
) -> None:
    before = store.health()
    with pytest.raises(error, match=text):
        _get(store, [0, 1], places, *arrays)
    assert store.health() == before


def test_read_only_memory_is_refused(store: DiskStore) -> None:
    rows = _rows()
    rows.flags.writeable = False
    with pytest.raises(
        TypeError, match="source array is read-only; pass a contiguous writable array of bytes"
    ):
        _get(store, [0], [[(0, 0)]], rows)


def test_a_store_that_is_closed_meanwhile_carries_out_what_it_was_given(store: DiskStore) -> None:
    rows = _rows()
    task = store._store.get_placed(
        [key(n) for n in range(8)], [[(0, n)] for n in range(8)], rows, None
    )
    store.close()
    assert task.done()
    assert task.result() == 8
    assert all(rows[n].tobytes() == _bytes(n) for n in range(8))
    with pytest.raises(KVCacheError, match="this disk store is closed; open another"):
        _get(store, [0], [[(0, 0)]], rows)


def test_a_task_that_is_dropped_has_ended(store: DiskStore) -> None:
    rows = _rows()
    store._store.get_placed([key(n) for n in range(8)], [[(0, n)] for n in range(8)], rows)
    assert rows[7].tobytes() == _bytes(7)


def test_memory_stays_as_long_as_it_is_read_into(store: DiskStore) -> None:
    task = store._store.get_placed([key(0)], [[(0, 0)]], np.zeros((1, _PAGE), np.uint8))
    assert task.result() == 1
