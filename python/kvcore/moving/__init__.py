# SPDX-License-Identifier: Apache-2.0
"""Requests and caches that leave a manager, and go on in another one: of any process."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcore.snapshots.restoring import RestoredCache, check_snapshot
    from kvcore.snapshots.saving import SavedCache
    from kvcore.snapshots.sequences import SavedLayer, SavedSequence, SavedState, read_sequence

__all__ = [
    "RestoredCache",
    "SavedCache",
    "SavedLayer",
    "SavedSequence",
    "SavedState",
    "check_snapshot",
    "read_sequence",
]

_HOMES = {
    "RestoredCache": "restoring",
    "SavedCache": "saving",
    "SavedLayer": "sequences",
    "SavedSequence": "sequences",
    "SavedState": "sequences",
    "check_snapshot": "restoring",
    "read_sequence": "sequences",
}


if not TYPE_CHECKING:  # to type checkers every name would be one of the package

    def __getattr__(name: str) -> object:
        """Import what is asked for: every manager is in this package, and few move anything."""
        if name not in _HOMES:
            raise AttributeError(f"module 'kvcore.moving' has no attribute {name!r}")
        return getattr(import_module(f"kvcore.snapshots.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """Name that too."""
    return sorted({*globals(), *__all__})
