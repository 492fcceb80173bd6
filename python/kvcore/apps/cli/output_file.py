# SPDX-License-Identifier: Apache-2.0
"""Check before a long run that its result can be written."""

from __future__ import annotations

from pathlib import Path

__all__ = ["check_writable"]


def check_writable(path: Path, source: Path | None) -> None:
    """Raise ValueError unless a file can be written at `path`; change no existing file.

    Devices and pipes are not checked, because opening them may have an effect. The result may not
    replace `source`, the file that is read for it.
    """
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
