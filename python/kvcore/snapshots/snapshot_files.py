# SPDX-License-Identifier: Apache-2.0
"""Files of whole prefix caches: pages as they were copied, and behind them what they are.

The layout is that of safetensors, as in ``kvcore.snapshots.tensors``; but the header takes a fixed
part of the file, so that it can be written when all is known.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvcore._core import crc32c
from kvcore.snapshots.tensors import damaged, json_text, parsed_json, read_header, sealed_header

__all__ = ["FORMAT", "VERSION", "SnapshotReader", "SnapshotWriter"]

FORMAT = "kvcore.snapshot"
VERSION = 1

#: Bytes in front of the tensors: the length of the header, and the header.
_BEGIN = 64 << 10
_DTYPES = {"uint8": "U8", "uint32": "U32", "int32": "I32", "int64": "I64"}
#: Tensors of which every row has a CRC-32C: in the order of the file, which they begin.
_CONTENT = ("pages", "states")
_INDEX = {
    "names": ("uint8", 1),
    "name_ends": ("int64", 1),
    "page_crc32c": ("uint32", 1),
    "passed": ("uint8", 1),
    "present": ("uint8", 2),
    "runs": ("int32", 2),
    "stand_in_ends": ("int64", 1),
    "stand_in_names": ("uint8", 1),
    "stand_ins": ("int32", 1),
    "state_columns": ("int64", 1),
    "state_crc32c": ("uint32", 1),
    "tokens": ("int32", 2),
    "windows": ("uint8", 1),
}
_FIELDS = {
    *("format", "version", "model", "fingerprint", "params", "replicas", "pages_per_column"),
    "sha256",
}


def _sums(rows: NDArray[np.uint8]) -> NDArray[np.uint32]:
    return np.array([crc32c(row) for row in rows], np.uint32)


class SnapshotWriter:
    """Write a snapshot to a file that can be sought in.

    Parameters
    ----------
    file : binary file
        Empty.

    Notes
    -----
    Holds a checksum of each row; the rows themselves are written as they come.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = 0
        self._entries: dict[str, Any] = {}
        self._sums: dict[str, list[NDArray[np.uint32]]] = {name: [] for name in _CONTENT}
        file.seek(_BEGIN)

    def add(self, name: str, rows: NDArray[np.uint8]) -> None:
        """Write further rows, uint8 [n, bytes]: first all of the pages, then all of the states."""
        self._sums[name].append(_sums(rows))
        entry = self._entries.setdefault(name, {"begin": self._end, "size": rows.shape[1]})
        self._write(rows)
        entry["end"] = self._end

    def _write(self, array: NDArray[Any]) -> None:
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._end += array.nbytes

    def finish(
        self, sizes: Mapping[str, int], index: Mapping[str, Any], about: Mapping[str, Any]
    ) -> int:
        """Write what the rows are, and the header.

        Parameters
        ----------
        sizes : mapping of str to int
            Bytes of a row of ``pages`` and of ``states``.
        index : mapping of str to array
            The other tensors, but those of checksums.
        about : mapping of str to JSON value

        Returns
        -------
        int
            Bytes of the file.

        Raises
        ------
        ValueError
            A header that has no place in front of the tensors.
        """
        header: dict[str, Any] = {}
        for name in _CONTENT:
            entry = self._entries.get(name, {"begin": self._end, "end": self._end})
            count = sum(map(len, self._sums[name]))
            place = [entry["begin"], entry["end"]]
            header[name] = {"dtype": "U8", "shape": [count, sizes[name]], "data_offsets": place}
        sums = {
            f"{name[:-1]}_crc32c": np.concatenate([np.empty(0, np.uint32), *self._sums[name]])
            for name in _CONTENT
        }
        digests = {}
        for name, array in sorted({**index, **sums}.items()):
            part = np.ascontiguousarray(array, _INDEX[name][0])
            place = [self._end, self._end + part.nbytes]
            header[name] = {
                "dtype": _DTYPES[part.dtype.name],
                "shape": list(part.shape),
                "data_offsets": place,
            }
            digests[name] = hashlib.sha256(part.tobytes()).hexdigest()
            self._write(part)
        texts = {name: json_text(value) for name, value in about.items()}
        texts |= {"format": json_text(FORMAT), "version": json_text(VERSION)}
        text = sealed_header(header, texts | {"sha256": json_text(digests)}, _BEGIN - 8)
        if len(text) != _BEGIN - 8:
            raise ValueError(
                f"the header of the snapshot takes {len(text)} bytes, must be at most "
                f"{_BEGIN - 8}; give a shorter model name, or a model of fewer groups"
            )
        self._file.seek(0)
        self._file.write(len(text).to_bytes(8, "little") + text)
        return _BEGIN + self._end


class SnapshotReader:
    """Read a snapshot, whose index is compared with its checksums at once.

    Parameters
    ----------
    file : binary file
        Open for reading.

    Attributes
    ----------
    about : dict of str to JSON value
        What ``SnapshotWriter.finish`` was given.
    index : dict of str to array
        The tensors but ``pages`` and ``states``.
    counts, sizes : dict of str to int
        Rows of these two, and bytes of a row.

    Raises
    ------
    ValueError
        Anything but a snapshot, of this version: nothing is allocated by what it says of itself.

    Notes
    -----
    Costs reading the index.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        size = file.seek(0, os.SEEK_END)
        if size < _BEGIN:
            raise damaged(f"it has {size} bytes, fewer than the {_BEGIN} in front of the pages")
        file.seek(0)
        header, begin = read_header(memoryview(self._read(_BEGIN)), _BEGIN - 8)
        if begin != _BEGIN:
            raise damaged(f"its header ends at {begin}, must end at {_BEGIN}")
        self.about = _metadata(header.pop("__metadata__"))
        if header.keys() != {*_CONTENT, *_INDEX}:
            raise damaged("its tensors are others")
        self._places = self._check_places(header, size - _BEGIN)
        self.counts = {name: header[name]["shape"][0] for name in _CONTENT}
        self.sizes = {name: header[name]["shape"][1] for name in _CONTENT}
        digests = self.about.pop("sha256")
        self.index = {name: self._tensor(name, header[name], digests) for name in _INDEX}
        for name in _CONTENT:
            if len(self.index[f"{name[:-1]}_crc32c"]) != self.counts[name]:
                raise damaged(f"{name} have {self.counts[name]} rows and other checksums")

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise damaged(f"it ends {size - len(data)} bytes before it should")
        return data

    def _check_places(self, header: Mapping[str, Any], size: int) -> dict[str, int]:
        """Check that the tensors lie one behind the other to the end; return where each begins."""
        end = 0
        places = {}
        for name in (*_CONTENT, *sorted(_INDEX)):
            dtype, rank = _INDEX.get(name, ("uint8", 2))
            shape, place = _entry(name, header[name], dtype, rank)
            length = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
            if place != [end, end + length] or end + length > size:
                raise damaged(f"tensor {name!r} is at {str(place)[:60]}, must begin at {end}")
            places[name] = end
            end += length
        if end != size:
            raise damaged(f"{size - end} bytes behind the last tensor")
        return places

    def _tensor(self, name: str, entry: Mapping[str, Any], digests: Any) -> NDArray[Any]:
        dtype = np.dtype(_INDEX[name][0])
        self._file.seek(_BEGIN + self._places[name])
        data = self._read(entry["data_offsets"][1] - entry["data_offsets"][0])
        wanted = digests.get(name) if isinstance(digests, dict) else None
        if hashlib.sha256(data).hexdigest() != wanted:
            raise damaged(f"the checksum of tensor {name!r} is not that of its bytes")
        return np.frombuffer(data, dtype).reshape(entry["shape"])

    def rows(self, name: str, first: int, n: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Read rows of ``pages`` or ``states``.

        Returns
        -------
        uint8 [n, bytes], bool [n]
            And whether each is what its checksum says.
        """
        size = self.sizes[name]
        self._file.seek(_BEGIN + self._places[name] + first * size)
        rows = np.frombuffer(self._read(n * size), np.uint8).reshape(n, size)
        wanted = self.index[f"{name[:-1]}_crc32c"][first : first + n]
        return rows, _sums(rows) == wanted


def _metadata(given: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for name, text in given.items():
        if name == "header_sha256":
            continue
        found[name] = parsed_json(text)
    if found.pop("format", None) != FORMAT or found.pop("version", None) != VERSION:
        raise ValueError(
            f"the file is no {FORMAT!r} of version {VERSION}; read it with the version of kvcore "
            f"that wrote it"
        )
    if found.keys() != _FIELDS - {"format", "version"}:
        raise damaged("its metadata has other names")
    return found


def _entry(name: str, given: Any, dtype: str, rank: int) -> tuple[list[int], list[int]]:
    is_entry = isinstance(given, dict) and given.keys() == {"dtype", "shape", "data_offsets"}
    if not is_entry or given["dtype"] != _DTYPES[dtype]:
        raise damaged(f"tensor {name!r} is not {dtype}")
    shape, place = given["shape"], given["data_offsets"]
    for values, length in ((shape, rank), (place, 2)):
        is_list = isinstance(values, list) and len(values) == length
        if not is_list or not all(type(v) is int and 0 <= v < 1 << 62 for v in values):
            raise damaged(f"tensor {name!r} has no shape of {rank} and no place")
    return shape, place
