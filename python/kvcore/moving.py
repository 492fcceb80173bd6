# SPDX-License-Identifier: Apache-2.0
"""Move requests and prefix caches from one manager to another, also between processes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcore.snapshots.cache import RestoredCache, SavedCache, check_snapshot
    from kvcore.snapshots.request import SavedLayer, SavedSequence, SavedState, read_sequence

__all__ = [
    "RestoredCache",
    "SavedCache",
    "SavedLayer",
    "SavedSequence",
    "SavedState",
    "check_snapshot",
    "read_sequence",
]

_MODULES = {
    "RestoredCache": "cache",
    "SavedCache": "cache",
    "SavedLayer": "request",
    "SavedSequence": "request",
    "SavedState": "request",
    "check_snapshot": "cache",
    "read_sequence": "request",
}


if not TYPE_CHECKING:  # with this function, type checkers would accept every name

    def __getattr__(name: str) -> object:
        """Import a name at first use: most programs move no requests or caches."""
        if name not in _MODULES:
            raise AttributeError(f"module 'kvcore.moving' has no attribute {name!r}")
        return getattr(import_module(f"kvcore.snapshots.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)
