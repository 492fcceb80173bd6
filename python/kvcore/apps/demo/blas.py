# SPDX-License-Identifier: Apache-2.0
"""Run numpy's matrix products on one thread.

OpenBLAS divides every product among all processors, and its threads spin until the last thread is
done. If another program also runs, steps with many small products take ten times as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MAPS = Path("/proc/self/maps")
_PREFIXES = ("scipy_openblas", "openblas")
_SUFFIXES = ("64_", "")


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Run OpenBLAS with one thread while the block runs; other libraries do not change.

    Examples
    --------
    >>> from kvcore.apps.demo.blas import one_blas_thread
    >>> with one_blas_thread():
    ...     pass
    """
    loaded = [each for path in _loaded() if (each := _controls(path)) is not None]
    before = [get() for get, _ in loaded]
    try:
        for _, put in loaded:
            put(1)
        yield
    finally:
        for (_, put), threads in zip(loaded, before, strict=True):
            put(threads)


def _loaded() -> list[str]:
    """List the OpenBLAS libraries of this process; empty if the system has no list."""
    if not _MAPS.is_file():
        return []
    lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    return sorted({line.split(maxsplit=5)[5] for line in lines if "openblas" in line})


def _controls(path: str) -> tuple[Any, Any] | None:
    """Return the functions that get and set the number of threads of a library."""
    try:
        library = ctypes.CDLL(path)
    except OSError:
        return None
    for prefix in _PREFIXES:
        for suffix in _SUFFIXES:
            names = [f"{prefix}_{verb}_num_threads{suffix}" for verb in ("get", "set")]
            if all(hasattr(library, name) for name in names):
                return getattr(library, names[0]), getattr(library, names[1])
    return None
