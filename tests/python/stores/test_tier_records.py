# SPDX-License-Identifier: Apache-2.0
"""Records: the bytes that kvcore adds to pages in stores that do not check them."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kvcore._core import crc32c
from kvcore.stores.tiers.records import LABEL_BYTES, Bytes, RecordLayout

KEY = bytes(range(32))
FINGERPRINT = bytes(32)


def layout(**parts: int) -> RecordLayout:
    return RecordLayout({int(name[1:]): size for name, size in parts.items()}, FINGERPRINT)


def data(size: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 255, size, np.uint8)


def test_a_record_has_its_parts_at_fixed_places() -> None:
    of = layout(p0=100, p1=100, p63=7)
    record = np.empty(of.record_bytes, np.uint8)
    assert of.record_bytes == len(record) == LABEL_BYTES + 207
    of.seal(record, KEY, {1: data(100, 1), 63: data(7, 2)})
    assert of.check(record, KEY) == 1 << 1 | 1 << 63
    assert bytes(record[128:228]) == bytes(100)
    parts = of.parts(record, of.check(record, KEY))
    assert {part: bytes(each) for part, each in parts.items()} == {
        1: bytes(data(100, 1)),
        63: bytes(data(7, 2)),
    }


def test_the_label_is_the_one_that_is_documented() -> None:
    of = layout(p0=10)
    record = np.empty(of.record_bytes, np.uint8)
    of.seal(record, KEY, {0: data(10, 1)})
    label = struct.unpack_from("<8sIIQQ32s32s", bytes(record))
    assert label == (b"KVCRECD\n", 1, 128, 10, 1, KEY, FINGERPRINT)
    assert bytes(record[96:124]) == bytes(28)
    crc = struct.unpack_from("<I", bytes(record), 124)[0]
    assert crc == crc32c(bytes(record[:124]) + bytes(record[128:]))


@pytest.mark.parametrize("bit", range(0, 8 * (LABEL_BYTES + 20), 7))
def test_a_flipped_bit_is_found(bit: int) -> None:
    of = layout(p0=10, p1=10)
    record = np.empty(of.record_bytes, np.uint8)
    of.seal(record, KEY, {0: data(10, 1), 1: data(10, 2)})
    record[bit // 8] ^= 1 << bit % 8
    assert of.check(record, KEY) == 0


def test_a_page_of_another_key_or_model_is_not_taken() -> None:
    of = layout(p0=10)
    record = np.empty(of.record_bytes, np.uint8)
    of.seal(record, KEY, {0: data(10, 1)})
    assert of.check(record, bytes(32)) == 0
    assert RecordLayout({0: 10}, b"x" * 32).check(record, KEY) == 0
    assert layout(p0=11).check(np.append(record, np.uint8(0)), KEY) == 0


def test_parts_can_be_added() -> None:
    of = layout(p0=10, p1=10, p2=10)
    record = np.empty(of.record_bytes, np.uint8)
    of.seal(record, KEY, {1: data(10, 1)})
    of.merge(record, KEY, {2: data(10, 2)})
    assert of.check(record, KEY) == 0b110
    again = np.empty(of.record_bytes, np.uint8)
    of.seal(again, KEY, {1: data(10, 1), 2: data(10, 2)})
    assert bytes(record) == bytes(again)


def test_a_record_of_nothing_is_none() -> None:
    assert layout(p0=10).check(np.zeros(LABEL_BYTES + 10, np.uint8), KEY) == 0
