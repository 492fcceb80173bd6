# SPDX-License-Identifier: Apache-2.0
"""Requests that leave a manager, and go on in another one: of this process, or of any other."""

from __future__ import annotations

from kvcore.moving.sequences import SavedLayer, SavedSequence, SavedState, read_sequence

__all__ = ["SavedLayer", "SavedSequence", "SavedState", "read_sequence"]
