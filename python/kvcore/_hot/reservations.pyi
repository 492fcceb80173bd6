# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable
from typing import TypeAlias

from kvcore._hot.contexts import TextGenerationContext
from kvcore._hot.parts import EngineParts
from kvcore.context import ContextLike
from kvcore.plans import ReservePlan

_Context: TypeAlias = TextGenerationContext | ContextLike

class ReservingEngine(EngineParts):
    """Reserve pages for requests, and tell what that would do."""

    def maybe_reserve(
        self,
        data: _Context,
        num_steps: int = 1,
        *,
        max_hit: int | None = None,
        keep_free: int = 0,
        must_fit: int | None = None,
    ) -> bool:
        """Reuse."""

    def reserve(
        self,
        data: _Context,
        num_steps: int = 1,
        *,
        max_hit: int | None = None,
        keep_free: int = 0,
        must_fit: int | None = None,
    ) -> bool:
        """Reuse."""

    def maybe_reserve_batch(self, batch: Iterable[_Context], num_steps: int = 1) -> int:
        """Reserve."""

    def plan(
        self,
        ctx: _Context,
        num_steps: int = 1,
        *,
        replica_idx: int | None = None,
        max_hit: int | None = None,
        keep_free: int = 0,
        must_fit: int | None = None,
    ) -> ReservePlan:
        """Tell."""
