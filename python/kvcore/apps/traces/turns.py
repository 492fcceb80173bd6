# SPDX-License-Identifier: Apache-2.0
"""Follow the sessions of rows with `session_id` and `delay`, as NVIDIA Dynamo writes them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvcore.apps.traces.errors import counted

if TYPE_CHECKING:
    from kvcore.apps.traces.clock import Clock

__all__ = ["SessionTurns"]

_ROOT = -1
_MOST_TEXT = 256


class SessionTurns:
    """Number the sessions, and find the request that a row follows."""

    def __init__(self) -> None:
        self._sessions: dict[int | str, tuple[int, int]] = {}  # number, last request
        self._delayed = 0

    def add(self, clock: Clock, index: int, key: Any, delay: Any) -> dict[str, Any]:
        """Return session, parent and delay of request `index`; ValueError for bad fields."""
        if key is None:
            return {}
        if type(key) not in (int, str) or (type(key) is str and len(key) > _MOST_TEXT):
            raise ValueError(
                f"session_id: expected an integer or a text of at most {_MOST_TEXT} characters"
            )
        session, parent = self._sessions.get(key, (len(self._sessions), _ROOT))
        wait = math.nan if delay is None else clock.duration("delay", delay)
        if parent == _ROOT:
            wait = math.nan
        self._delayed += not math.isnan(wait)
        self._sessions[key] = (session, index)
        return {"session": session, "parent": parent, "delay": wait}

    def notes(self) -> list[str]:
        """Return the lines of a report."""
        if not self._sessions:
            return []
        lines = [f"{counted(len(self._sessions), 'session')}; each row has its whole prompt"]
        if self._delayed:
            lines.append(
                f"after an answer and a delay (online mode): {counted(self._delayed, 'request')}"
            )
        return lines
