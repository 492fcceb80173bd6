# SPDX-License-Identifier: Apache-2.0
"""Resets in threads that run during queries: a reset also removes pinned pages from the tree."""

from __future__ import annotations

from typing import Any

__all__ = ["SeenResets"]


class SeenResets:
    """A counter of the resets of a manager that all workers share."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self._begun: list[None] = []  # appending is atomic
        self._ended: list[None] = []

    def reset(self) -> None:
        self._begun.append(None)
        try:
            self.manager.reset_prefix_cache()
        finally:
            self._ended.append(None)

    def check_pin(self, prompt: list[int]) -> None:
        """Pin a prompt; check that its tokens are found, unless a reset ran meanwhile."""
        ended = len(self._ended)
        with self.manager.pin(prompt) as pinned:
            found = self.manager.match_prefix(prompt)
        if len(self._begun) == ended:
            assert found >= pinned.num_tokens
