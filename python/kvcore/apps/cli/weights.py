# SPDX-License-Identifier: Apache-2.0
"""Read the bytes of a model's weights: a size, or the safetensors files of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcore.support.byte_sizes import parse_size

__all__ = ["weights_bytes"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MOST_INDEX_BYTES = 64 << 20


def weights_bytes(text: str) -> int:
    """Return the bytes of the weights.

    Parameters
    ----------
    text : str
        A size such as ``16GiB``, or the path of a ``model.safetensors.index.json`` or of a folder
        that has it or a ``model.safetensors``.

    Returns
    -------
    int
        The size; the ``metadata.total_size`` of the index, or without it the sum of the sizes of
        the files that the index names; the size of a single file.

    Raises
    ------
    ValueError
        `text` is neither a size nor such a path, or the index or its files cannot be read.
    """
    try:
        return parse_size(text)
    except ValueError:
        path = Path(text)
    try:
        if path.is_dir():
            index = path / _INDEX
            single = path / _SINGLE
            if not index.is_file():
                if single.is_file():
                    return single.stat().st_size
                raise ValueError(f"{path}: expected {_INDEX} or {_SINGLE} in the folder")
            path = index
        if not path.is_file():
            raise ValueError(
                f"expected a size such as 16GiB, a folder with {_INDEX}, or the path of this file, "
                f"got {text[:200]!r}"
            )
        return _indexed(path)
    except OSError as error:
        raise ValueError(f"{str(path)[:200]}: {error.strerror or error}") from error


def _indexed(path: Path) -> int:
    """Return the bytes of the weights that an index lists."""
    if path.stat().st_size > _MOST_INDEX_BYTES:
        raise ValueError(f"{path}: expected an index of at most {_MOST_INDEX_BYTES >> 20} MiB")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON ({error})") from error
    metadata = index.get("metadata") if isinstance(index, dict) else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is not None:
        return _whole(path, total)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{path}: expected metadata.total_size or a weight_map")
    return sum(_file_bytes(path, name) for name in set(map(str, names.values())))


def _whole(path: Path, total: Any) -> int:
    if isinstance(total, bool) or not isinstance(total, int | float) or not 0 < total < 2**63:
        raise ValueError(
            f"{path}: metadata.total_size is {str(total)[:40]!r}; expected a number of bytes"
        )
    return int(total)


def _file_bytes(path: Path, name: str) -> int:
    """Return the size of a file of the index, which must be in the folder of the index."""
    file = path.with_name(Path(name).name)
    if Path(name).name != name or not file.is_file():
        raise ValueError(
            f"{path}: without metadata.total_size the sizes of the files count, and {name[:200]!r} "
            f"is not in the folder"
        )
    return file.stat().st_size
