# SPDX-License-Identifier: Apache-2.0
"""What an engine is given and calls: protocols of its parts that are written in Python."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcore.page_copies import Copier
from kvcore.swap import Mover

__all__ = ["Copier", "Mover", "ResetFlag", "Stager"]


class ResetFlag(Protocol):
    """Tell whether somebody wants the prefix cache to be forgotten."""

    def is_asked(self) -> bool:
        """Return True once per wish; never block."""


class Stager(Protocol):
    """Take what a fetch has written to the devices of a manager, and order who uses its pools."""

    def pinned(self, entries: int) -> NDArray[np.uint32]:
        """Allocate uint32 [entries] of memory that devices copy from."""

    def stage(
        self, shard: int, lengths: NDArray[np.uint32], table: NDArray[np.uint32]
    ) -> tuple[Any, Any]:
        """Return lengths [B] and table [B, columns] on the device of a shard."""

    def reuse_after(self, after: Any) -> None:
        """Let pages be written again only when a stream's work, or an event, is done."""
