# SPDX-License-Identifier: Apache-2.0
"""The slots of a continuous-batching cache: who has which, and how many tokens each holds."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._core import BlockPool
from kvcore.errors import (
    AlreadyClaimedError,
    CapacityError,
    InvalidHandleError,
    RequestNotFoundError,
)
from kvcore.support.arguments import integer

__all__ = ["SlotClaims", "SlotTable", "as_ids"]


def as_ids(ids: Iterable[Any], slots: int, name: str = "seq_ids") -> list[int]:
    """Return ids as a list of int; TypeError for what is none, ValueError for a duplicate.

    Of more ids than there are slots, one is returned too many: it is none of them. So a source
    without end is not read to its end.
    """
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise TypeError(f"{name} is a {type(ids).__name__}, must be a list of int")
    listed = [
        integer(f"{name}[{i}]", each) for i, each in enumerate(itertools.islice(ids, slots + 1))
    ]
    if len(set(listed)) < len(listed):
        twice = next(each for each in listed if listed.count(each) > 1)
        raise ValueError(f"{name} holds {twice} twice; name each sequence once")
    return listed


@dataclass(frozen=True, slots=True)
class SlotClaims:
    """Remember the claims of a batch's rows, to tell later whether they live.

    Attributes
    ----------
    table : SlotTable
    ids : tuple of int [B]
    serials : tuple of int [B]
        The claims that the slots had.
    """

    table: SlotTable
    ids: tuple[int, ...]
    serials: tuple[int, ...]

    def __call__(self, row: int, column: int, page: int) -> None:  # noqa: ARG002 - a Guard
        """Raise InvalidHandleError unless the claim of `row` lives."""
        self.table.require_serials(self.ids[row : row + 1], self.serials[row : row + 1])


class SlotTable:
    """Own the slots 0 .. num_slots - 1; a slot is one page of `max_seq_len` tokens.

    Notes
    -----
    A slot is claimed exactly when its page is referenced and it has a length. One lock; every
    method is atomic. ``claim`` costs O(slots), the others O(ids).
    """

    def __init__(self, num_slots: int, max_seq_len: int) -> None:
        self._lock = threading.Lock()
        self._pages = BlockPool(num_slots)
        self._max_seq_len = max_seq_len
        self._next = 0  # where the search for a free slot goes on
        self._lengths: dict[int, int] = {}
        self._serials: dict[int, int] = {}
        self._new_serial = itertools.count()

    # ---- claims --------------------------------------------------------------------------

    def claim(self, n: int) -> list[int]:
        """Claim the next `n` free slots, round robin; see the manager."""
        with self._lock:
            if n > self._pages.num_free:
                raise CapacityError(
                    f"{n} slots are wanted, {self._pages.num_free} of {self._pages.num_blocks} "
                    f"are free; release a sequence first"
                )
            free = self._pages.allocate(self._pages.num_free)
            free = free[np.argsort((free - self._next) % self._pages.num_blocks)]
            taken: list[int] = free[:n].tolist()
            self._keep(taken, free[n:])
            if taken:
                self._next = (taken[-1] + 1) % self._pages.num_blocks
            return taken

    def claim_ids(self, ids: list[int]) -> None:
        """Claim these slots; see the manager."""
        with self._lock:
            for slot in ids:
                if not 0 <= slot < self._pages.num_blocks:
                    raise ValueError(f"slot {slot} must be 0 .. {self._pages.num_blocks - 1}")
                if slot in self._lengths:
                    raise AlreadyClaimedError(f"slot {slot} is claimed already; release it first")
            free = self._pages.allocate(self._pages.num_free)
            self._keep(ids, free[~np.isin(free, ids)])

    def _keep(self, taken: list[int], rest: NDArray[np.int32]) -> None:
        """Record claims of pages that are referenced, and let the others go again."""
        self._pages.free(rest)
        self._lengths.update(dict.fromkeys(taken, 0))
        self._serials.update(zip(taken, self._new_serial, strict=False))

    def release(self, slot: int) -> None:
        """Free a slot."""
        with self._lock:
            self._require([slot])
            self._pages.free([slot])
            del self._lengths[slot], self._serials[slot]

    def _require(self, ids: Iterable[int]) -> None:
        for slot in ids:
            if slot not in self._lengths:
                raise RequestNotFoundError(
                    f"sequence {slot} is not claimed (slots 0 .. {self._pages.num_blocks - 1}); "
                    f"claim it first"
                )

    # ---- lengths -------------------------------------------------------------------------

    def rows(self, ids: list[int]) -> tuple[list[int], SlotClaims]:
        """Return the lengths of claimed slots, and their claims."""
        with self._lock:
            self._require(ids)
            claims = SlotClaims(self, tuple(ids), tuple(self._serials[slot] for slot in ids))
            return [self._lengths[slot] for slot in ids], claims

    def grow(self, ids: Sequence[int], added: list[int], claims: SlotClaims | None = None) -> None:
        """Add to the lengths of slots, those of `claims` where given; all or nothing."""
        with self._lock:
            if claims is not None:
                self._require_serials(claims.ids, claims.serials)
            self._require(ids)
            for slot, more in zip(ids, added, strict=True):
                total = self._lengths[slot] + more
                if more < 0:
                    raise ValueError(f"sequence {slot} would grow by {more}, must be at least 0")
                if total > self._max_seq_len:
                    raise CapacityError(
                        f"sequence {slot} would hold {self._lengths[slot]} + {more} = {total} "
                        f"tokens, max_seq_len is {self._max_seq_len}"
                    )
            for slot, more in zip(ids, added, strict=True):
                self._lengths[slot] += more

    def require_serials(self, ids: tuple[int, ...], serials: tuple[int, ...]) -> None:
        """Raise InvalidHandleError for a slot that was released since, claimed again or not."""
        with self._lock:
            self._require_serials(ids, serials)

    def _require_serials(self, ids: tuple[int, ...], serials: tuple[int, ...]) -> None:
        for slot, serial in zip(ids, serials, strict=True):
            if self._serials.get(slot) != serial:
                raise InvalidHandleError(
                    f"sequence {slot} was released after this view of it was made; "
                    f"fetch its present claim"
                )

    # ---- queries -------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Slots that can be claimed."""
        with self._lock:
            return self._pages.num_free

    def lengths(self) -> dict[int, int]:
        """Copy the lengths of all claimed slots."""
        with self._lock:
            return dict(self._lengths)

    def contains(self, slot: object) -> bool:
        """Tell whether a slot is claimed."""
        with self._lock:
            return slot in self._lengths

    def check_integrity(self) -> None:
        """Raise AssertionError unless claimed == referenced == has a length."""
        with self._lock:
            self._pages.check_integrity()
            claimed = self._lengths.keys()
            laws = {
                "a slot with a length has a claim": claimed == self._serials.keys(),
                "claimed + free == all": len(claimed) + self._pages.num_free
                == self._pages.num_blocks,
                "a claimed slot's page is referenced": all(map(self._pages.ref_count, claimed)),
                "lengths are 0 .. max_seq_len": all(
                    0 <= length <= self._max_seq_len for length in self._lengths.values()
                ),
            }
        for law, holds in laws.items():
            if not holds:
                raise AssertionError(f"slots: {law}")
