# SPDX-License-Identifier: Apache-2.0
"""Write to a terminal, a file or a pipe that may be closed, full or gone."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO

__all__ = ["finish", "open_streams", "tell"]

_MOST_CHARACTERS = 2_000


def open_streams() -> None:
    """Make both streams of the program usable: there, and with an answer to every character."""
    # A program that is started with one of them closed has None in its place.
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def tell(text: str) -> None:
    """Write one line to stderr, if anybody reads it."""
    line = " ".join(text.split())
    if len(line) > _MOST_CHARACTERS:
        line = f"{line[:_MOST_CHARACTERS]}..."
    with suppress(OSError):
        sys.stderr.write(f"kvcore: {line}\n")


def finish(code: int) -> int:
    """Write out what is buffered; return the exit code, 1 if it could not be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            _abandon(stream)
            # Nobody wants the rest of a broken pipe; a run that failed has said why already.
            if code == 0 and not isinstance(error, BrokenPipeError):
                tell(f"error: the output cannot be written: {error}")
            code = code or 1
    return code


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123 - lives as the program


def _abandon(stream: TextIO) -> None:
    """Let what is left of a stream go nowhere, for the interpreter flushes it once more."""
    with suppress(OSError, ValueError):
        target = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, target)
        os.close(nowhere)
