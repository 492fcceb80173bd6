# SPDX-License-Identifier: Apache-2.0
"""Say what a group keeps, for people and for JSON."""

from __future__ import annotations

from typing import Any

from kvcore.layers.kinds import AttentionGroup, ChunkedLocal, SlidingWindow
from kvcore.layers.state import State

__all__ = ["described", "kept_tokens"]


def described(group: AttentionGroup | State) -> dict[str, Any]:
    """Return what JSON tells of a group: its kind, the number of its layers, what they keep.

    Notes
    -----
    ``kind`` is "full", "window", "chunk" or "state". ``keeps`` are the tokens of the window or
    chunk, None where there is neither.
    """
    return {"kind": _kind(group), "layers": len(group.layers), "keeps": kept_tokens(group)}


def kept_tokens(group: AttentionGroup | State) -> int | None:
    """Return the tokens of a window or chunk, None where there is neither."""
    if isinstance(group, SlidingWindow):
        return group.window
    return group.chunk if isinstance(group, ChunkedLocal) else None


def _kind(group: AttentionGroup | State) -> str:
    if isinstance(group, State):
        return "state"
    if isinstance(group, SlidingWindow):
        return "window"
    return "chunk" if isinstance(group, ChunkedLocal) else "full"
