# SPDX-License-Identifier: Apache-2.0
"""The host-tier hooks of the reference, which do nothing. See reference_tier."""

from __future__ import annotations

from typing import Any


class NoTier:
    """The hooks that a manager with a tier overrides."""

    def pages_below(self, ctx: Any, replica: int, hit: int) -> int:
        return 0

    def load(self, row: Any, claim: Any) -> None: ...

    def store(self, claim: Any, flights: list[Any]) -> None: ...

    def publish(self, flights: list[Any]) -> None: ...

    def leave_host(self, claim: Any, columns: int) -> None: ...
