# SPDX-License-Identifier: Apache-2.0
"""Files of named tensors in the layout of safetensors, with a checksum of each and of the header.

Eight bytes little-endian: the length of the header. The header: a JSON object that has dtype, shape
and place of each tensor, and under ``__metadata__`` texts by name. Then the tensors, one behind the
other without gaps.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.support.dtypes import numpy_dtype

__all__ = [
    "DTYPES",
    "damaged",
    "json_text",
    "pack",
    "parsed_json",
    "read_header",
    "sealed_header",
    "unpack",
]

#: Names of kvcore's dtypes in such files.
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

#: Bytes: 5,000 layers of K, V and their scales fit.
_MOST_HEADER = 4 << 20

#: Lists and objects in each other: files of kvcore have six at most.
_MOST_DEPTH = 32
_MOST_DIMS = 32
_METADATA = "__metadata__"
_CHECKSUMS = "sha256"  # of each tensor, in the metadata
_DIGEST = "header_sha256"  # of the header without this entry


def damaged(what: str) -> ValueError:
    """Return the error for data that is not what was written."""
    return ValueError(f"the data is damaged, or no such file: {what}; get it from its writer again")


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(np.int32) if name == "int32" else numpy_dtype(name)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def json_text(value: Any) -> str:
    """Return the one text of a value: sorted names, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def pack(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a file, to be written one behind the other.

    Parameters
    ----------
    tensors : mapping of str to array
        Of the dtypes of ``DTYPES``, in host memory.
    metadata : mapping of str to JSON value
        Each is written as its JSON text.

    Raises
    ------
    ValueError
        More than fits in a header.
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
        dtype, shape and data_offsets of each.
    metadata : mapping of str to str
    size : int, optional
        Bytes that it is padded to where it is shorter; by default a multiple of 8.
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
        Anything but a file of ``pack``, byte for byte.

    Notes
    -----
    Nothing is allocated by what the header says. Costs the checksums: O(bytes).
    """
    view = memoryview(data).cast("B").toreadonly()
    header, begin = read_header(view)
    metadata = header.pop(_METADATA)
    body = view[begin:]
    sums = _metadata_value(metadata, _CHECKSUMS)
    if not isinstance(sums, dict) or sums.keys() != header.keys():
        raise damaged("the tensors have no checksum each")
    tensors = {}
    for name, array, part in _arrays(header, body):
        if hashlib.sha256(part).hexdigest() != sums[name]:
            raise damaged(f"the checksum of tensor {name!r} is not that of its bytes")
        tensors[name] = array
    names = metadata.keys() - {_CHECKSUMS, _DIGEST}
    return tensors, {name: _metadata_value(metadata, name) for name in names}


def read_header(view: memoryview, size: int | None = None) -> tuple[dict[str, Any], int]:
    """Return the header, whose digest is right, and where the tensors begin.

    Parameters
    ----------
    view : memoryview of bytes
        From the beginning of a file.
    size : int, optional
        As of ``sealed_header``.

    Raises
    ------
    ValueError
        Anything but what ``sealed_header`` returns behind its length.
    """
    if len(view) < 8:
        raise damaged(f"it has {len(view)} bytes, fewer than the 8 in front of a header")
    length = int.from_bytes(view[:8], "little")
    if length > min(_MOST_HEADER, len(view) - 8):
        raise damaged(f"a header of {length} bytes in a file of {len(view)}")
    text = bytes(view[8 : 8 + length])
    header = parsed_json(text)
    metadata = header.get(_METADATA) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(type(text) is str for text in metadata.values()):
        raise damaged("the header has no metadata")
    if metadata.get(_DIGEST) != _digest(header):
        raise damaged("the checksum of the header is not that of its text")
    if text != _header_text(header, size):
        raise damaged("the header has other spaces, another order or other escapes")
    return header, 8 + length


def parsed_json(text: bytes | str) -> Any:
    """Return the value of a text in JSON, which is not nested deeply.

    Raises
    ------
    ValueError
        Anything else, so that nothing that walks through the value recurses too deeply.
    """
    try:
        value = json.loads(text, object_pairs_hook=_no_twins, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise damaged(f"a text is no JSON ({str(error)[:80]})") from None
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [child for each in level for child in _children(each)]
    if level:
        raise damaged(f"a text has values in values more than {_MOST_DEPTH} deep")
    return value


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


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
    """Return name, array and bytes of the tensors in the order of their bytes, which they fill."""
    for name, entry in header.items():
        is_entry = isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}
        if not is_entry or not _is_place(entry["data_offsets"]):
            raise damaged(f"tensor {name!r} has no dtype, shape and place")
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, last = entry["data_offsets"]
        if begin != end or last > len(body):
            raise damaged(f"tensor {name!r} is at {begin} .. {last}, must begin at {end}")
        yield name, _array(name, entry, body[begin:last]), body[begin:last]
        end = last
    if end != len(body):
        raise damaged(f"{len(body) - end} bytes behind the last tensor")


def _is_place(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2 and all(map(_is_count, value))
    return is_pair and value[0] <= value[1]


def _array(name: str, entry: Mapping[str, Any], part: memoryview) -> NDArray[Any]:
    shape = entry["shape"]
    if not isinstance(shape, list) or len(shape) > _MOST_DIMS or not all(map(_is_count, shape)):
        raise damaged(f"tensor {name!r} has no shape")
    if type(entry["dtype"]) is not str or entry["dtype"] not in _NAMES:
        raise damaged(f"tensor {name!r} has dtype {str(entry['dtype'])[:40]!r}")
    dtype = _dtype(_NAMES[entry["dtype"]])
    if math.prod(shape) * dtype.itemsize != len(part):
        raise damaged(f"tensor {name!r} has {len(part)} bytes for another shape")
    if len(part) == 0:
        raise damaged(f"tensor {name!r} is empty")
    return np.frombuffer(part, np.uint8).view(dtype).reshape(shape)
