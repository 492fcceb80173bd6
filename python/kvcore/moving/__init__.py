# SPDX-License-Identifier: Apache-2.0
"""Requests and caches that leave a manager, and go on in another one: of any process."""

from __future__ import annotations

from kvcore.moving.restoring import RestoredCache, check_snapshot
from kvcore.moving.saving import SavedCache
from kvcore.moving.sequences import SavedLayer, SavedSequence, SavedState, read_sequence

__all__ = [
    "RestoredCache",
    "SavedCache",
    "SavedLayer",
    "SavedSequence",
    "SavedState",
    "check_snapshot",
    "read_sequence",
]
