# SPDX-License-Identifier: Apache-2.0
"""Read the lines of a trace from a file, a pipe or a terminal, within bounds."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, cast

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["MOST_CHARACTERS", "MOST_LINES", "MOST_LINE_CHARACTERS", "LineError", "filled_lines"]

# A small compressed file can contain any number of lines, and a device is endless. A valid row fits
# into the longest line: 2**24 prompt tokens are 2**15 ids of up to 19 digits, and the rest is for
# additional fields. Reading a line takes up to about 20 times its length in memory.
MOST_LINE_CHARACTERS = 1 << 24
MOST_LINES = 10_000_000
MOST_CHARACTERS = 4 << 30

_GZIP_MAGIC = b"\x1f\x8b"


class LineError(ValueError):
    """Raised for a line beyond a bound; the text gives the bound."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


def filled_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line that is not blank, of plain or gzipped text.

    Parameters
    ----------
    path : str
        File to read. It is opened once and read from beginning to end, so it can be a pipe.

    Raises
    ------
    OSError, EOFError, zlib.error, UnicodeDecodeError
        The file cannot be read.
    LineError
        A line is longer than `MOST_LINE_CHARACTERS`, or the file has more than `MOST_LINES` lines
        or `MOST_CHARACTERS` characters.
    """
    with _opened(path) as stream:
        number, characters = 0, 0
        while text := stream.readline(MOST_LINE_CHARACTERS + 1):
            number += 1
            characters += len(text)
            _check(number, len(text), characters)
            if not text.isspace():
                yield number, text


def _check(number: int, length: int, characters: int) -> None:
    if length > MOST_LINE_CHARACTERS:
        raise LineError(number, f"expected at most {MOST_LINE_CHARACTERS} characters in a line")
    if number > MOST_LINES:
        raise LineError(number, f"expected at most {MOST_LINES} lines, including blank lines")
    if characters > MOST_CHARACTERS:
        raise LineError(number, f"expected at most {MOST_CHARACTERS} characters, decompressed")


class _Rejoined(io.RawIOBase):
    """A file from its beginning; its first bytes, already read, are passed as `start`."""

    def __init__(self, start: bytes, rest: io.FileIO) -> None:
        self._start = start
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if not self._start:
            return self._rest.readinto(buffer)
        view = memoryview(buffer)
        count = min(len(view), len(self._start))
        view[:count], self._start = self._start[:count], self._start[count:]
        return count


@contextmanager
def _opened(path: str) -> Iterator[IO[str]]:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - the path stays unchanged
        start = _read_start(file)
        data: IO[bytes] = io.BufferedReader(_Rejoined(start, file), 1 << 20)
        if start == _GZIP_MAGIC:
            # Read through a buffer: GzipFile's own lines cost several calls of Python each.
            unpacked = cast("io.RawIOBase", gzip.GzipFile(fileobj=data, mode="rb"))
            data = io.BufferedReader(unpacked, 1 << 20)
        yield io.TextIOWrapper(data, encoding="utf-8-sig")


def _read_start(file: io.FileIO) -> bytes:
    """Read the two bytes that show compression; a pipe may return them one by one."""
    start = b""
    while len(start) < len(_GZIP_MAGIC):
        more = file.read(len(_GZIP_MAGIC) - len(start))
        if not more:
            break
        start += more
    return start
