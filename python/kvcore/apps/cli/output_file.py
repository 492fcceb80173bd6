# SPDX-License-Identifier: Apache-2.0
"""Write the result of a command to a file or to stdout, and check before a long run that it can."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

from kvcore.apps.traces.canonical import STDOUT, standard_output

__all__ = ["check_writable", "report_apart_from", "write_text"]


def check_writable(path: Path, source: Path | None) -> None:
    """Raise ValueError unless a file can be written at `path`; change no existing file.

    Stdout, devices and pipes are not checked, because opening them may have an effect. The result
    may not replace `source`, the file that is read for it.
    """
    if path == STDOUT:
        return
    try:
        if source is not None and path.exists() and source.exists() and path.samefile(source):
            raise ValueError("it is the input file")
        if path.exists() and not (path.is_file() or path.is_dir()):
            return
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{path} cannot be written: {reason}") from error


@contextmanager
def report_apart_from(target: Path | None) -> Iterator[None]:
    """Print the report of the block to stdout, or to stderr if the result goes to stdout."""
    with redirect_stdout(sys.stderr) if target == STDOUT else nullcontext():
        yield


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, with escapes for characters that UTF-8 does not have."""
    data = text.encode("utf-8", "backslashreplace")
    if path == STDOUT:
        standard_output().write(data)
    else:
        path.write_bytes(data)
