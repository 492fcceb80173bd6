# SPDX-License-Identifier: Apache-2.0
"""Read the bytes of a trace from a file, a pipe or standard input, plain or gzipped."""

from __future__ import annotations

import gzip
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, cast

from kvcore.apps.traces.errors import LineError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["MOST_CHARACTERS", "MOST_LINES", "MOST_LINE_CHARACTERS", "Source", "opened"]

# A small compressed file can contain any number of lines, and a device is endless. A valid row fits
# into the longest line: 2**24 prompt tokens are 2**15 ids of up to 19 digits, and the rest is for
# additional fields. Reading a line takes up to about 20 times its length in memory.
MOST_LINE_CHARACTERS = 1 << 24
MOST_LINES = 10_000_000
MOST_CHARACTERS = 4 << 30

_BEGINNING = 1 << 16
_BUFFER = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_PROGRESS_EVERY = 256


class Source:
    """The decompressed bytes of a trace, read once from beginning to end.

    Attributes
    ----------
    beginning : bytes
        Up to 64 KiB from the beginning, without a byte order mark of UTF-8.
    stream : binary stream
        All bytes, including `beginning`.
    rows : int
        Number of the last line that was read.
    """

    def __init__(self, stream: IO[bytes], on_progress: Callable[[], None] | None) -> None:
        self.beginning = stream.read(_BEGINNING).removeprefix(_BOM)
        self.stream = io.BufferedReader(_Rejoined(self.beginning, stream), _BUFFER)
        self.rows = 0
        self._on_progress = on_progress

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield the number and the text of each line that is not blank.

        Raises
        ------
        OSError, EOFError, zlib.error
            The file cannot be read.
        LineError
            A line is longer than `MOST_LINE_CHARACTERS` or is not UTF-8, or the file has more than
            `MOST_LINES` lines or `MOST_CHARACTERS` characters.
        """
        characters = 0
        while data := self.stream.readline(MOST_LINE_CHARACTERS + 1):
            self.rows = number = self.rows + 1
            characters += len(data)
            _check(number, len(data), characters)
            if self._on_progress is not None and number % _PROGRESS_EVERY == 0:
                self._on_progress()
            if not data.isspace():
                yield number, decoded(number, data)

    def chunks(self) -> Iterator[bytes]:
        """Yield all bytes in pieces of at most 1 MiB; LineError after `MOST_CHARACTERS` bytes."""
        characters = 0
        while data := self.stream.read(_BUFFER):
            characters += len(data)
            if characters > MOST_CHARACTERS:
                raise LineError(1, f"expected at most {MOST_CHARACTERS} characters, decompressed")
            if self._on_progress is not None:
                self._on_progress()
            yield data


def decoded(number: int, data: bytes) -> str:
    """Decode a line; LineError if it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LineError(
            number, f"expected text in UTF-8, got byte {data[error.start]:#04x} at {error.start}"
        ) from None


def _check(number: int, length: int, characters: int) -> None:
    if length > MOST_LINE_CHARACTERS:
        raise LineError(number, f"expected at most {MOST_LINE_CHARACTERS} characters in a line")
    if number > MOST_LINES:
        raise LineError(number, f"expected at most {MOST_LINES} lines, including blank lines")
    if characters > MOST_CHARACTERS:
        raise LineError(number, f"expected at most {MOST_CHARACTERS} characters, decompressed")


class _Rejoined(io.RawIOBase):
    """A stream from its beginning; its first bytes, already read, are passed as `start`."""

    def __init__(self, start: bytes, rest: IO[bytes] | io.FileIO) -> None:
        self._start = start
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if not self._start:
            return cast("io.BufferedReader", self._rest).readinto(buffer)
        view = memoryview(buffer)
        count = min(len(view), len(self._start))
        view[:count], self._start = self._start[:count], self._start[count:]
        return count


@contextmanager
def opened(path: str, on_progress: Callable[[int], None] | None = None) -> Iterator[Source]:
    """Open a trace for one reading.

    Parameters
    ----------
    path : str
        A file or a pipe; "-" is standard input. The first bytes show compression, not the name.
    on_progress : callable, optional
        Called from time to time with the number of bytes of the file read until now.

    Raises
    ------
    OSError, EOFError, zlib.error
        The file cannot be opened, or its beginning cannot be read.
    """
    if path == "-" and sys.stdin is None:
        raise OSError("standard input is closed")
    file = sys.stdin.buffer if path == "-" else open(path, "rb", buffering=0)  # noqa: PTH123, SIM115
    try:
        start = _read_start(cast("IO[bytes]", file))
        data: IO[bytes] = io.BufferedReader(_Rejoined(start, cast("io.FileIO", file)), _BUFFER)
        if start == _GZIP_MAGIC:
            # Read through a buffer: GzipFile's own lines cost several calls of Python each.
            unpacked = cast("io.RawIOBase", gzip.GzipFile(fileobj=data, mode="rb"))
            data = io.BufferedReader(unpacked, _BUFFER)
        tell = None
        if on_progress is not None and path != "-":
            descriptor = file.fileno()

            def tell() -> None:
                on_progress(os.lseek(descriptor, 0, os.SEEK_CUR))

        yield Source(data, tell)
    finally:
        if path != "-":
            file.close()


def _read_start(file: IO[bytes]) -> bytes:
    """Read the two bytes that show compression; a pipe may return them one by one."""
    start = b""
    while len(start) < len(_GZIP_MAGIC):
        more = file.read(len(_GZIP_MAGIC) - len(start))
        if not more:
            break
        start += more
    return start
