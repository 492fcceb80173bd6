# SPDX-License-Identifier: Apache-2.0
"""Files of named tensors in the layout of safetensors, with checksums, written atomically.

A file begins with the length of the header: eight bytes, little-endian. The header is a JSON object
with the dtype, shape and place of each tensor, and with texts by name under ``__metadata__``. The
tensors follow the header without gaps. The header of a cache snapshot has a fixed size, because it
is written last.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvcore._core import crc32c
from kvcore.support.dtypes import numpy_dtype

__all__ = [
    "DTYPES",
    "FORMAT",
    "VERSION",
    "SnapshotReader",
    "SnapshotWriter",
    "bytes_of",
    "damaged",
    "json_text",
    "opened_regular",
    "pack",
    "parsed_json",
    "read_header",
    "replacing",
    "sealed_header",
    "unpack",
    "write_parts",
]

# ---- files ---------------------------------------------------------------------------------------


def bytes_of(data: Any) -> Any:
    """Return all bytes of a bytes-like object, a path or a binary file.

    Raises
    ------
    TypeError
        `data` has another type.
    OSError
        The file cannot be read.
    """
    if isinstance(data, str | os.PathLike):
        return Path(data).read_bytes()
    if hasattr(data, "read"):
        data = data.read()
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(
            f"data is a {type(data).__name__}, must be bytes, a path, or a file opened in binary "
            f"mode"
        )
    return data


def opened_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading and seeking.

    Raises
    ------
    ValueError
        `path` is not a regular file. The call does not wait for the writer of a pipe.
    OSError
        The file cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"path {os.fspath(path)!r} is not a regular file; pass another path")
    return os.fdopen(handle, "rb")


def write_parts(file: Any, parts: Iterable[Any]) -> None:
    """Write parts in their order to a path or a binary file.

    For a path, the parts go to a temporary file in the same folder, which is synced and renamed at
    the end. The old file stays until the rename, even if the process is killed. Links are followed.
    A device or a pipe is written directly.

    Raises
    ------
    OSError
        A write failed. A binary file may contain a part of the data.
    """
    if not isinstance(file, str | os.PathLike):
        _write_all(file, parts)
        return
    before = _status(file)
    if before is not None and not stat.S_ISREG(before.st_mode):
        with Path(file).open("wb", buffering=0) as target:
            _write_all(target, parts)
        return
    _replace(Path(os.path.realpath(file)), before, parts)


def _write_all(file: Any, parts: Iterable[Any]) -> None:
    """Write parts to a file whose ``write`` may accept fewer bytes than it receives."""
    for part in parts:
        rest = memoryview(part)
        while len(rest) > 0:
            count = file.write(rest)
            if count is None:
                raise BlockingIOError(
                    errno.EAGAIN, "the file takes no more bytes now; pass a file that blocks"
                )
            if not 0 < count <= len(rest):
                raise OSError(errno.EIO, f"the file took {count} of {len(rest)} bytes")
            rest = rest[count:]


def _status(file: Any) -> os.stat_result | None:
    """Return the status of the file at a path; None if the path does not exist."""
    try:
        return Path(file).stat()
    except FileNotFoundError:
        return None


def _replace(path: Path, before: os.stat_result | None, parts: Iterable[Any]) -> None:
    with _beside(path, before) as target:
        _write_all(target, parts)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file that is synced and replaces `path` at the end of ``with``.

    The old file stays until the end of ``with``, and also if the body raises or the process is
    killed. Links are followed.

    Raises
    ------
    ValueError
        `path` exists and is not a regular file.
    OSError
        The file cannot be written.
    """
    before = _status(path)
    if before is not None and not stat.S_ISREG(before.st_mode):
        raise ValueError(f"path {os.fspath(path)!r} is not a regular file; pass another path")
    with _beside(Path(os.path.realpath(path)), before) as target:
        yield target


@contextmanager
def _beside(path: Path, before: os.stat_result | None) -> Iterator[BinaryIO]:
    """Open a temporary file, and rename it to `path`; keep the permissions of an old file."""
    name = path.parent / f".{path.name}.{secrets.token_hex(4)}.part"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    # open() also creates files with 0o666; the system removes the bits of the process's umask.
    handle = os.open(name, flags, 0o666 if before is None else 0o600)
    try:
        with os.fdopen(handle, "w+b") as target:
            yield target
            target.flush()
            os.fsync(target.fileno())
            if before is not None:  # by descriptor: another process may have renamed the file
                os.fchmod(target.fileno(), stat.S_IMODE(before.st_mode))
        name.replace(path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Sync a folder, if the system can, so that the new name survives a loss of power."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- named tensors -------------------------------------------------------------------------------


#: Names of kvcore's dtypes in these files.
DTYPES = {
    "float32": "F32",
    "int32": "I32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
}
_NAMES = {name: dtype for dtype, name in DTYPES.items()}

#: Maximum bytes of a header: 5,000 layers of K, V and their scales fit.
_MOST_HEADER = 4 << 20

#: Maximum nesting of lists and objects. Files of kvcore nest at most six.
_MOST_DEPTH = 32
_MOST_DIMS = 32
_METADATA = "__metadata__"
_CHECKSUMS = "sha256"  # of each tensor, in the metadata
_DIGEST = "header_sha256"  # of the header without this entry


def damaged(what: str) -> ValueError:
    """Return the error for damaged data."""
    return ValueError(
        f"the data is damaged, or not a file of kvcore: {what}; get it from its writer again"
    )


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(np.int32) if name == "int32" else numpy_dtype(name)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def json_text(value: Any) -> str:
    """Return the canonical JSON text of a value: sorted names, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def pack(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a file, in the order of the file.

    Parameters
    ----------
    tensors : mapping of str to array
        Arrays in host memory, with dtypes of ``DTYPES``.
    metadata : mapping of str to JSON value
        Each value is written as its JSON text.

    Raises
    ------
    ValueError
        The header is too long.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    parts = [_bytes_of(array) for _, array in ordered]
    header: dict[str, Any] = {}
    begin = 0
    for (name, array), part in zip(ordered, parts, strict=True):
        place = [begin, begin + len(part)]
        dtype = DTYPES[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": place}
        begin = place[1]
    sums = {
        name: hashlib.sha256(part).hexdigest()
        for (name, _), part in zip(ordered, parts, strict=True)
    }
    texts = {name: json_text(value) for name, value in metadata.items()}
    text = sealed_header(header, texts | {_CHECKSUMS: json_text(sums)})
    if len(text) > _MOST_HEADER:
        raise ValueError(
            f"the header of the file takes {len(text)} bytes, must be at most {_MOST_HEADER}; pass "
            f"digests as extra_keys, not contents"
        )
    return [len(text).to_bytes(8, "little"), text, *parts]


def sealed_header(
    tensors: Mapping[str, Any], metadata: Mapping[str, str], size: int | None = None
) -> bytes:
    """Return the bytes of a header, with its digest.

    Parameters
    ----------
    tensors : mapping of str to dict
        dtype, shape and data_offsets of each tensor.
    metadata : mapping of str to str
    size : int, optional
        Bytes that a shorter header is padded to; by default the next multiple of 8.
    """
    header = {**tensors, _METADATA: dict(metadata)}
    header[_METADATA][_DIGEST] = _digest(header)
    return _header_text(header, size)


def _header_text(header: Mapping[str, Any], size: int | None = None) -> bytes:
    text = json_text(header).encode()
    padding = -len(text) % 8 if size is None else size - len(text)
    return text + b" " * padding


def _digest(header: Mapping[str, Any]) -> str:
    metadata = {name: text for name, text in header[_METADATA].items() if name != _DIGEST}
    return hashlib.sha256(json_text({**header, _METADATA: metadata}).encode()).hexdigest()


def unpack(data: Any) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the tensors of a file, read-only views of its bytes, and its metadata.

    Parameters
    ----------
    data : bytes-like
        All of a file.

    Raises
    ------
    ValueError
        The data is not exactly a file of ``pack``.

    Notes
    -----
    No memory is allocated by sizes in the header. Cost: the checksums, O(bytes).
    """
    view = memoryview(data).cast("B").toreadonly()
    header, begin = read_header(view)
    metadata = header.pop(_METADATA)
    body = view[begin:]
    sums = _metadata_value(metadata, _CHECKSUMS)
    if not isinstance(sums, dict) or sums.keys() != header.keys():
        raise damaged("its tensors and its checksums have different names")
    tensors = {}
    for name, array, part in _arrays(header, body):
        if hashlib.sha256(part).hexdigest() != sums[name]:
            raise damaged(f"the checksum of tensor {name!r} does not match its bytes")
        tensors[name] = array
    names = metadata.keys() - {_CHECKSUMS, _DIGEST}
    return tensors, {name: _metadata_value(metadata, name) for name in names}


def read_header(view: memoryview, size: int | None = None) -> tuple[dict[str, Any], int]:
    """Check the header; return it and the offset of the tensors.

    Parameters
    ----------
    view : memoryview of bytes
        The beginning of a file.
    size : int, optional
        As in ``sealed_header``.

    Raises
    ------
    ValueError
        The bytes are not the length and the text of a header of ``sealed_header``.
    """
    if len(view) < 8:
        raise damaged(f"it has {len(view)} bytes, fewer than the 8 before a header")
    length = int.from_bytes(view[:8], "little")
    if length > min(_MOST_HEADER, len(view) - 8):
        raise damaged(f"a header of {length} bytes in a file of {len(view)}")
    text = bytes(view[8 : 8 + length])
    header = parsed_json(text)
    metadata = header.get(_METADATA) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(type(text) is str for text in metadata.values()):
        raise damaged("the header has no metadata")
    if metadata.get(_DIGEST) != _digest(header):
        raise damaged("the checksum of the header does not match its text")
    if text != _header_text(header, size):
        raise damaged("the header has other spaces, another order or other escapes")
    return header, 8 + length


def parsed_json(text: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises
    ------
    ValueError
        The text is not JSON, or nests too deeply for code that recurses through the value.
    """
    try:
        value = json.loads(text, object_pairs_hook=_no_twins, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise damaged(f"a text is not JSON ({str(error)[:80]})") from None
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [child for each in level for child in _children(each)]
    if level:
        raise damaged(f"a text nests values more than {_MOST_DEPTH} deep")
    return value


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _metadata_value(metadata: Mapping[str, str], name: str) -> Any:
    if name not in metadata:
        raise damaged(f"the metadata lacks {name!r}")
    value = parsed_json(metadata[name])
    if json_text(value) != metadata[name]:
        raise damaged(f"the text of {name!r} has other spaces, another order or other escapes")
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _arrays(
    header: Mapping[str, Any], body: memoryview
) -> Iterator[tuple[str, NDArray[Any], memoryview]]:
    """Yield name, array and bytes of the tensors in file order; check that they fill the body."""
    for name, entry in header.items():
        is_entry = isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}
        if not is_entry or not _is_place(entry["data_offsets"]):
            raise damaged(f"tensor {name!r} has no valid dtype, shape and place")
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, last = entry["data_offsets"]
        if begin != end or last > len(body):
            raise damaged(f"tensor {name!r} is at {begin} .. {last}, must begin at {end}")
        yield name, _array(name, entry, body[begin:last]), body[begin:last]
        end = last
    if end != len(body):
        raise damaged(f"it has {len(body) - end} bytes after the last tensor")


def _is_place(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))
    return is_pair and value[0] <= value[1]


def _array(name: str, entry: Mapping[str, Any], part: memoryview) -> NDArray[Any]:
    shape = entry["shape"]
    if not isinstance(shape, list) or len(shape) > _MOST_DIMS or not all(map(_is_count, shape)):
        raise damaged(f"tensor {name!r} has no valid shape")
    if type(entry["dtype"]) is not str or entry["dtype"] not in _NAMES:
        raise damaged(f"tensor {name!r} has unsupported dtype {str(entry['dtype'])[:40]!r}")
    dtype = _dtype(_NAMES[entry["dtype"]])
    if math.prod(shape) * dtype.itemsize != len(part):
        raise damaged(f"tensor {name!r} has {len(part)} bytes, which do not fit its shape")
    if len(part) == 0:
        raise damaged(f"tensor {name!r} is empty")
    return np.frombuffer(part, np.uint8).view(dtype).reshape(shape)


# ---- snapshots -----------------------------------------------------------------------------------


FORMAT = "kvcore.snapshot"
VERSION = 1

#: Bytes before the tensors: the length of the header, and the header.
_BEGIN = 64 << 10
_DTYPES = {"uint8": "U8", "uint32": "U32", "int32": "I32", "int64": "I64"}
#: The first tensors of the file, in file order. Each of their rows has a CRC-32C.
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
    """Writes a snapshot to a seekable file.

    Parameters
    ----------
    file : binary file
        An empty file.

    Notes
    -----
    Keeps the checksum of each row in memory; ``add`` writes the rows at once.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = 0
        self._entries: dict[str, Any] = {}
        self._sums: dict[str, list[NDArray[np.uint32]]] = {name: [] for name in _CONTENT}
        file.seek(_BEGIN)

    def add(self, name: str, rows: NDArray[np.uint8]) -> None:
        """Append rows, uint8 [n, bytes]; all pages must come before the states."""
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
        """Write the index and the header.

        Parameters
        ----------
        sizes : mapping of str to int
            Bytes of a row of ``pages`` and of ``states``.
        index : mapping of str to array
            The other tensors, without the checksums.
        about : mapping of str to JSON value

        Returns
        -------
        int
            Bytes of the file.

        Raises
        ------
        ValueError
            The header is longer than the space before the tensors.
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
    """Reads a snapshot; the constructor checks the checksums of the index.

    Parameters
    ----------
    file : binary file
        Open for reading.

    Attributes
    ----------
    about : dict of str to JSON value
        The `about` argument of ``SnapshotWriter.finish``.
    index : dict of str to array
        All tensors except ``pages`` and ``states``.
    counts, sizes : dict of str to int
        Number of rows of ``pages`` and of ``states``, and bytes of a row.

    Raises
    ------
    ValueError
        The file is not a snapshot of this version. No memory is allocated by sizes in the header
        before they are checked.

    Notes
    -----
    Cost: reading the index.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        size = file.seek(0, os.SEEK_END)
        if size < _BEGIN:
            raise damaged(f"it has {size} bytes, fewer than the {_BEGIN} before the pages")
        file.seek(0)
        header, begin = read_header(memoryview(self._read(_BEGIN)), _BEGIN - 8)
        if begin != _BEGIN:
            raise damaged(f"its header ends at {begin}, must end at {_BEGIN}")
        self.about = _metadata(header.pop("__metadata__"))
        if header.keys() != {*_CONTENT, *_INDEX}:
            raise damaged("it has extra or missing tensors")
        self._places = self._check_places(header, size - _BEGIN)
        self.counts = {name: header[name]["shape"][0] for name in _CONTENT}
        self.sizes = {name: header[name]["shape"][1] for name in _CONTENT}
        digests = self.about.pop("sha256")
        self.index = {name: self._tensor(name, header[name], digests) for name in _INDEX}
        for name in _CONTENT:
            if len(self.index[f"{name[:-1]}_crc32c"]) != self.counts[name]:
                raise damaged(
                    f"{name} have {self.counts[name]} rows and another number of checksums"
                )

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise damaged(f"it lacks {size - len(data)} bytes at its end")
        return data

    def _check_places(self, header: Mapping[str, Any], size: int) -> dict[str, int]:
        """Check that the tensors fill the file without gaps; return the offset of each."""
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
            raise damaged(f"it has {size - end} bytes after the last tensor")
        return places

    def _tensor(self, name: str, entry: Mapping[str, Any], digests: Any) -> NDArray[Any]:
        dtype = np.dtype(_INDEX[name][0])
        self._file.seek(_BEGIN + self._places[name])
        data = self._read(entry["data_offsets"][1] - entry["data_offsets"][0])
        wanted = digests.get(name) if isinstance(digests, dict) else None
        if hashlib.sha256(data).hexdigest() != wanted:
            raise damaged(f"the checksum of tensor {name!r} does not match its bytes")
        return np.frombuffer(data, dtype).reshape(entry["shape"])

    def rows(self, name: str, first: int, n: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Read rows of ``pages`` or ``states``.

        Returns
        -------
        uint8 [n, bytes], bool [n]
            The rows, and true for each row that matches its checksum.
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
            f"the file is not a {FORMAT!r} of version {VERSION}; read it with the version of "
            f"kvcore that wrote it"
        )
    if found.keys() != _FIELDS - {"format", "version"}:
        raise damaged("its metadata has extra or missing fields")
    return found


def _entry(name: str, given: Any, dtype: str, rank: int) -> tuple[list[int], list[int]]:
    is_entry = isinstance(given, dict) and given.keys() == {"dtype", "shape", "data_offsets"}
    if not is_entry or given["dtype"] != _DTYPES[dtype]:
        raise damaged(f"tensor {name!r} is not {dtype}")
    shape, place = given["shape"], given["data_offsets"]
    for values, length in ((shape, rank), (place, 2)):
        is_list = isinstance(values, list) and len(values) == length
        if not is_list or not all(type(v) is int and 0 <= v < 1 << 62 for v in values):
            raise damaged(f"tensor {name!r} has no valid shape of {rank} dimensions, or no place")
    return shape, place
