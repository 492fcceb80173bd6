# SPDX-License-Identifier: Apache-2.0
"""The memory of the host tier, as stores read and write it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, overload

from kvcore._core import DiskLowerStore, DiskStore
from kvcore.backends.protocol import Mover
from kvcore.native.engine import STATE_PART
from kvcore.stores.tiers.records import Bytes

__all__ = ["STATE_PART", "HostMemory", "Parts", "Places", "TierStates", "mask_of"]

#: The memory of each part of a page, by the number of the part.
Parts = dict[int, Bytes]


class Places(Sequence[Parts]):
    """Views of the parts of host-tier pages; a page's views are made when the page is used.

    Parameters
    ----------
    rows : uint8 [num_pages, page_bytes]
    slots : uint8 [num_slots, slot_bytes] or None
    columns : list of list of (int, int)
        For each page its parts, as (part, row).
    """

    def __init__(
        self, rows: Bytes, slots: Bytes | None, columns: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        self.rows, self.slots, self.columns = rows, slots, columns

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, at: int) -> Parts: ...

    @overload
    def __getitem__(self, at: slice) -> Places: ...

    def __getitem__(self, at: int | slice) -> Parts | Places:
        if isinstance(at, slice):
            return Places(self.rows, self.slots, self.columns[at])
        return {part: self._row(part, row) for part, row in self.columns[at]}

    def masks(self) -> list[int]:
        """Return the parts of each page as bits."""
        return [sum(1 << part for part, _ in column) for column in self.columns]

    def _row(self, part: int, row: int) -> Bytes:
        of = self.slots if part == STATE_PART else self.rows
        assert of is not None
        view: Bytes = of[row]
        return view


class TierStates(Protocol):
    """The methods of `kvcore.pools.StateArrays` that this module uses."""

    def host_memory(self, replica: int) -> Bytes:
        """Return the slots of a replica, uint8 [slots, bytes]."""

    def wait(self, replica: int) -> None:
        """Wait for all state copies that were started before this call."""


class HostMemory:
    """Give access to the pages and the state slots of the host tier.

    Parameters
    ----------
    pages : Mover
    states : StateArrays or None
        None if the tier has no slots.
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
        """The bytes of a replica's pages."""
        return int(self._memory[0].nbytes)

    def part_bytes(self, num_lanes: int) -> dict[int, int]:
        """Return the bytes of each part that a page can have."""
        parts = [*range(num_lanes), *([STATE_PART] if self._slots else [])]
        return {part: self.bytes_of(part) for part in parts}

    def bytes_of(self, part: int) -> int:
        """Return the bytes of a part; 0 if the tier has no slots."""
        of = self._slots if part == STATE_PART else self._memory
        return int(of[0].shape[1]) if of else 0

    def parts(self, replica: int, places: Iterable[tuple[int, int]]) -> Parts:
        """Return views of some parts of a page, given as (part, page or slot)."""
        return self.places(replica, [[*places]])[0]

    def places(self, replica: int, columns: Sequence[Sequence[tuple[int, int]]]) -> Places:
        """Return views of pages, given for each page as (part, page or slot)."""
        slots = self._slots[replica] if self._slots else None
        return Places(self._memory[replica], slots, columns)

    def lower_store(self, disk: DiskStore, *, has_parts: bool, seconds: float) -> DiskLowerStore:
        """Return a disk as a lower store of this memory.

        Parameters
        ----------
        disk : kvcore._core.DiskStore
        has_parts : bool
            Whether a page can have more than one part.
        seconds : float
            Time limit of a read.
        """
        return DiskLowerStore(disk, self._memory, self._slots, has_parts, seconds)

    def settle(self, replica: int) -> None:
        """Wait for copies to and from the tier that are in flight."""
        if self._pages is not None:
            self._pages.wait(replica)
        if self._states is not None:
            self._states.wait(replica)

    def prepare(self, replica: int, last: int) -> None:
        """Prepare the tier for writes: wait for copies in flight, make pages up to `last` present.

        `last` is -1 if no pages are written.
        """
        self.settle(replica)
        if last >= 0 and self._pages is not None:
            self._pages.expect(replica, last)

    def let_go(self) -> None:
        """Drop all references to the memory; no other method is called after this."""
        self._memory, self._slots = [], []
        self._pages = self._states = None


def mask_of(parts: Iterable[Any]) -> int:
    """Return parts as bits."""
    return sum(1 << part for part in parts)
