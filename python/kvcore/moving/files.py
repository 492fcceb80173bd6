# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, and what is read out of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["bytes_of", "write_parts"]


def bytes_of(data: Any) -> Any:
    """Return all bytes of what is bytes already, of a path, or of a binary file.

    Raises
    ------
    TypeError
        Something else.
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


def write_parts(file: Any, parts: Iterable[Any]) -> None:
    """Write parts one behind the other to a path or a binary file.

    A path gets the file once all of it is on the disk: it is written beside it under another name,
    synced and renamed. What was there before stays so long, also where the process is killed.

    Raises
    ------
    OSError
    """
    if not isinstance(file, str | os.PathLike):
        for part in parts:
            file.write(part)
        return
    path = Path(file)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as target:
            for part in parts:
                target.write(part)
            target.flush()
            os.fsync(target.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Have the new name survive a loss of power, where folders can be synced."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
