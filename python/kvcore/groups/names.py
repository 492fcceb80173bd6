# SPDX-License-Identifier: Apache-2.0
"""Say what a group keeps, for people and for JSON."""

from __future__ import annotations

from kvcore.groups.kinds import AttentionGroup, ChunkedLocal, SlidingWindow
from kvcore.groups.state import State

__all__ = ["kept_tokens", "kind_of"]


def kind_of(group: AttentionGroup | State) -> str:
    """Return "full", "window", "chunk" or "state"."""
    if isinstance(group, State):
        return "state"
    if isinstance(group, SlidingWindow):
        return "window"
    return "chunk" if isinstance(group, ChunkedLocal) else "full"


def kept_tokens(group: AttentionGroup | State) -> int | None:
    """Return the tokens of a window or chunk, None where there is neither."""
    if isinstance(group, SlidingWindow):
        return group.window
    return group.chunk if isinstance(group, ChunkedLocal) else None
