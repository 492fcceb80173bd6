# SPDX-License-Identifier: Apache-2.0
"""What a reservation would do."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ReservePlan"]


@dataclass(frozen=True, slots=True)
class ReservePlan:
    """Tell what ``maybe_reserve`` would do now.

    Attributes
    ----------
    hit_tokens : int
        Tokens that would be taken from the prefix cache, copied ones included.
    new_pages : int
        Pages that would be allocated.
    evicted_pages : int
        Cached pages that would be given up for them.
    copied_tokens : int
        Of `hit_tokens`, those copied out of a page that is equal in part.
    fits : bool
        False when the pages cannot be had, now or ever.
    """

    hit_tokens: int
    new_pages: int
    evicted_pages: int
    copied_tokens: int
    fits: bool
