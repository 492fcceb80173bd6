# SPDX-License-Identifier: Apache-2.0
"""Find out before a long run whether its result can be written."""

from __future__ import annotations

from pathlib import Path

__all__ = ["check_writable"]


def check_writable(path: Path, source: Path | None) -> None:
    """Raise ValueError unless a file can be written at `path`; leave what is there as it is.

    Devices and pipes are taken as they are, for opening them may already be noticed. What `source`
    names is read for the result, which may not replace it.
    """
    try:
        if source is not None and path.exists() and source.exists() and path.samefile(source):
            raise ValueError("it is what is read")
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
