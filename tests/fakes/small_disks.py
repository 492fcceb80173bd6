# SPDX-License-Identifier: Apache-2.0
"""Small file systems that fill quickly."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import require_program


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system in memory, for example of "256k"; skip without permission."""
    mount = [
        require_program("mount"),
        "-t",
        "tmpfs",
        "-o",
        f"size={size},mode=0700",
        "tmpfs",
        str(folder),
    ]
    found = subprocess.run(mount, capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"no file system can be mounted: {found.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
