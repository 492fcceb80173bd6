# SPDX-License-Identifier: Apache-2.0
"""Files that are there whole or not at all, and what is read out of them."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["bytes_of", "opened_regular", "replacing", "write_parts"]


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


def opened_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read it anywhere.

    Raises
    ------
    ValueError
        A path of what is no regular file, such as a pipe, which nothing is waited for.
    OSError
        It cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"path is {os.fspath(path)!r}, no regular file; pass another name")
    return os.fdopen(handle, "rb")


def write_parts(file: Any, parts: Iterable[Any]) -> None:
    """Write parts one behind the other to a path or a binary file.

    A path gets the file once all of it is on the disk: it is written beside it under another name,
    synced and renamed. What was there before stays so long, also where the process is killed. Links
    are followed. What is no regular file, a device or a pipe, is written as it is.

    Raises
    ------
    OSError
        Part of a file that is not named by a path may be written.
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
    """Write parts to a file that may take fewer bytes than it is given."""
    for part in parts:
        rest = memoryview(part)
        while len(rest) > 0:
            count = file.write(rest)
            if count is None:
                raise BlockingIOError(
                    errno.EAGAIN, "the file takes no more bytes now; pass one that blocks"
                )
            if not 0 < count <= len(rest):
                raise OSError(errno.EIO, f"the file took {count} of {len(rest)} bytes")
            rest = rest[count:]


def _status(file: Any) -> os.stat_result | None:
    """Return what is known of what a path names; None where there is nothing."""
    try:
        return Path(file).stat()
    except FileNotFoundError:
        return None


def _replace(path: Path, before: os.stat_result | None, parts: Iterable[Any]) -> None:
    with _beside(path, before) as target:
        _write_all(target, parts)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that takes a path's place at the end of ``with``, whole, and on the disk.

    What was there before stays so long, and where the body raises or the process is killed. Links
    are followed.

    Raises
    ------
    ValueError
        A path of what is no regular file.
    OSError
        It cannot be written there.
    """
    before = _status(path)
    if before is not None and not stat.S_ISREG(before.st_mode):
        raise ValueError(f"path is {os.fspath(path)!r}, no regular file; pass another name")
    with _beside(Path(os.path.realpath(path)), before) as target:
        yield target


@contextmanager
def _beside(path: Path, before: os.stat_result | None) -> Iterator[BinaryIO]:
    """Write beside a path and rename, with the permissions of what was there, or of a new file."""
    name = path.parent / f".{path.name}.{secrets.token_hex(4)}.part"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    # 0o666 is what open() makes files with: the umask of the process is taken off by the system.
    handle = os.open(name, flags, 0o666 if before is None else 0o600)
    try:
        with os.fdopen(handle, "w+b") as target:
            yield target
            target.flush()
            os.fsync(target.fileno())
            if before is not None:  # of the file that was written, whatever has its name by now
                os.fchmod(target.fileno(), stat.S_IMODE(before.st_mode))
        name.replace(path)
    except BaseException:
        name.unlink(missing_ok=True)
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
