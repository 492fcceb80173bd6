# SPDX-License-Identifier: Apache-2.0
"""Where the reference would use a host tier: without one nothing happens. See reference_tier."""

from __future__ import annotations

from typing import Any


class NoTier:
    """What a manager with a tier does otherwise."""

    def pages_below(self, ctx: Any, replica: int, hit: int) -> int:
        return 0

    def load(self, row: Any, claim: Any) -> None: ...

    def store(self, claim: Any, flights: list[Any]) -> None: ...

    def publish(self, flights: list[Any]) -> None: ...

    def leave_host(self, claim: Any, columns: int) -> None: ...
