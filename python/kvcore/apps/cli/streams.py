# SPDX-License-Identifier: Apache-2.0
"""Write to a terminal, a file or a pipe, which may be closed or full."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

__all__ = ["finish", "open_streams", "tell"]

_MOST_CHARACTERS = 2_000


def open_streams() -> None:
    """Make stdout and stderr usable: not None, and with escapes for unencodable characters."""
    # At the start, a closed stream has the value None.
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def tell(text: str) -> None:
    """Write one line to stderr; ignore a closed or full stderr."""
    line = " ".join(text.split())
    if len(line) > _MOST_CHARACTERS:
        line = f"{line[:_MOST_CHARACTERS]}..."
    with suppress(OSError):
        sys.stderr.write(f"kvcore: {line}\n")


def finish(code: int) -> int:
    """Flush both streams and return `code`; return 1 in place of 0 if a flush fails."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            _abandon(stream)
            # A broken pipe needs no message, and a failed run has already printed its error.
            if code == 0 and not isinstance(error, BrokenPipeError):
                tell(f"error: the output cannot be written: {error}")
            code = code or 1
    return code


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 - open until the program ends


def _abandon(stream: TextIO) -> None:
    """Redirect a stream to the null device, because the interpreter flushes it once more."""
    with suppress(OSError, ValueError):
        target = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)
