# SPDX-License-Identifier: Apache-2.0
"""The memory of the host tier, as stores read and write it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from kvcore._hot.store_side import STATE_PART
from kvcore.backends.protocol import Mover
from kvcore.tiers.records import Bytes

__all__ = ["STATE_PART", "HostMemory", "Parts", "TierStates", "mask_of"]

#: The parts of a page that are there, or wanted, and where they lie.
Parts = dict[int, Bytes]


class TierStates(Protocol):
    """Say what is asked of `kvcore.states.StateArrays`."""

    def host_memory(self, replica: int) -> Bytes:
        """Return the slots of a replica, uint8 [slots, bytes]."""

    def wait(self, replica: int) -> None:
        """Block until what was moved so far has arrived."""


class HostMemory:
    """Show the pages of the host tier and its slots of states.

    Parameters
    ----------
    pages : Mover
    states : StateArrays or None
        None where the tier has no slots.
    num_replicas : int
    """

    def __init__(self, pages: Mover, states: TierStates | None, num_replicas: int) -> None:
        self._pages: Mover | None = pages
        self._states = states
        each = range(num_replicas)
        self._memory = [pages.memory(replica) for replica in each]
        self._slots = (
            [states.host_memory(replica) for replica in each] if states is not None else []
        )

    @property
    def num_bytes(self) -> int:
        """Of the pages of a replica."""
        return int(self._memory[0].nbytes)

    def part_bytes(self, num_lanes: int) -> dict[int, int]:
        """Return the bytes of each part that a page can have."""
        found = dict.fromkeys(range(num_lanes), int(self._memory[0].shape[1]))
        if self._slots:
            found[STATE_PART] = int(self._slots[0].shape[1])
        return found

    def parts(self, replica: int, places: Iterable[tuple[int, int]]) -> Parts:
        """Return views of some parts of a page, given as (part, page or slot)."""
        memory = self._memory[replica]
        return {
            part: self._slots[replica][at] if part == STATE_PART else memory[at]
            for part, at in places
        }

    def settle(self, replica: int) -> None:
        """Wait for copies that are on their way to or from the tier."""
        if self._pages is not None:
            self._pages.wait(replica)
        if self._states is not None:
            self._states.wait(replica)

    def expect(self, replica: int, columns: Iterable[Iterable[tuple[int, int]]]) -> None:
        """Have memory present that is about to be written, given as the parts of pages."""
        pages = [at for parts in columns for part, at in parts if part != STATE_PART]
        if pages and self._pages is not None:
            self._pages.expect(replica, max(pages))

    def let_go(self) -> None:
        """Refer to the memory no more; nobody asks for parts any longer."""
        self._memory, self._slots = [], []
        self._pages = self._states = None


def mask_of(parts: Iterable[Any]) -> int:
    """Return the bits of parts."""
    return sum(1 << part for part in parts)
