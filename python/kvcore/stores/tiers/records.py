# SPDX-License-Identifier: Apache-2.0
"""Format of a page in stores that do not check pages: a label, then all parts of the page."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcore._core import crc32c

__all__ = ["LABEL_BYTES", "Bytes", "RecordLayout", "RecordMemory"]

#: Memory of a page or of a part of a page.
Bytes: TypeAlias = NDArray[np.uint8]

#: Bytes of the label. Each part after it has a fixed place, also if other parts are missing.
LABEL_BYTES = 128

#: The most bytes of free records that are kept for the next batch.
_FREE_BYTES = 64 << 20

_MAGIC = b"KVCRECD\n"
_VERSION = 1
_FIELDS = struct.Struct("<8sIIQQ32s32s28x")
_CRC = struct.Struct("<I")


class RecordMemory:
    """Keep memory for records, because new memory costs as much as a copy.

    Parameters
    ----------
    record_bytes : int
    new_buffer : callable, optional
        Takes a number of bytes; returns memory of this size that is fastest for the store, or None.

    Notes
    -----
    Any number of threads may use it.
    """

    def __init__(
        self, record_bytes: int, new_buffer: Callable[[int], Bytes | None] = lambda _: None
    ) -> None:
        self._bytes, self._new_buffer = record_bytes, new_buffer
        self._free: list[Bytes] = []

    def new(self) -> Bytes:
        """Return memory for one record."""
        try:
            return self._free.pop()
        except IndexError:
            found = self._new_buffer(self._bytes)
            return np.empty(self._bytes, np.uint8) if found is None else found

    def give_back(self, records: Sequence[Bytes]) -> None:
        """Take back memory that is no longer in use."""
        room = max(1, _FREE_BYTES // self._bytes) - len(self._free)
        self._free.extend(records[: max(0, room)])


class RecordLayout:
    """Write and check records: buffers of one size, each with the parts of one page.

    Parameters
    ----------
    part_bytes : mapping of int to int
        Bytes of each part that a page can have, by the part's number.
    fingerprint : bytes [32]
        Fingerprint of the pages.

    Attributes
    ----------
    record_bytes : int
        Bytes of a record, including the label.
    payload_bytes : int
        Bytes of all parts.
    all_parts : int
        All parts that a page can have, one bit per part.

    Notes
    -----
    Any number of threads may use it, on different records. `seal` and `merge` copy the parts and
    compute a CRC over them.
    """

    def __init__(self, part_bytes: Mapping[int, int], fingerprint: bytes) -> None:
        self.fingerprint = fingerprint
        self._places: dict[int, slice] = {}
        end = LABEL_BYTES
        for part, size in sorted(part_bytes.items()):
            self._places[part] = slice(end, end + size)
            end += size
        self.record_bytes = end
        self.payload_bytes = end - LABEL_BYTES
        self.all_parts = sum(1 << part for part in self._places)

    def seal(self, record: Bytes, key: bytes, parts: Mapping[int, Bytes]) -> None:
        """Write a page into a record, with zeros in the places of missing parts."""
        for part, place in self._places.items():
            record[place] = parts.get(part, 0)
        self._label(record, key, sum(1 << part for part in parts))

    def merge(self, record: Bytes, key: bytes, parts: Mapping[int, Bytes]) -> None:
        """Add parts to a checked record."""
        mask = self._mask_of(record)
        for part, data in parts.items():
            record[self._places[part]] = data
        self._label(record, key, mask | sum(1 << part for part in parts))

    def check(self, record: Bytes, key: bytes) -> int:
        """Return the parts of a record, one bit per part; 0 if the record is wrong or damaged."""
        mask = self._mask_of(record)
        right = bytes(record[: _FIELDS.size]) == self._fields(key, mask)
        if not right or not mask or mask & ~self.all_parts:
            return 0
        (stored,) = _CRC.unpack_from(record.data, _FIELDS.size)
        return mask if stored == self._crc(record, mask) else 0

    def parts(self, record: Bytes, mask: int) -> dict[int, Bytes]:
        """Return views of some parts of a record."""
        return {part: record[at] for part, at in self._places.items() if mask >> part & 1}

    def _fields(self, key: bytes, mask: int) -> bytes:
        sizes = LABEL_BYTES, self.payload_bytes
        return _FIELDS.pack(_MAGIC, _VERSION, *sizes, mask, key, self.fingerprint)

    def _label(self, record: Bytes, key: bytes, mask: int) -> None:
        record[: _FIELDS.size] = np.frombuffer(self._fields(key, mask), np.uint8)
        _CRC.pack_into(record.data, _FIELDS.size, self._crc(record, mask))

    def _crc(self, record: Bytes, mask: int) -> int:
        crc = crc32c(record[: _FIELDS.size])
        for part in self.parts(record, mask).values():
            crc = crc32c(part, crc)
        return crc

    @staticmethod
    def _mask_of(record: Bytes) -> int:
        (mask,) = struct.unpack_from("<Q", record.data, _MASK_AT)
        return int(mask)


_MASK_AT = struct.calcsize("<8sIIQ")
