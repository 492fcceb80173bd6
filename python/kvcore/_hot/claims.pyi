# SPDX-License-Identifier: Apache-2.0
from collections.abc import Hashable
from typing import final

from typing_extensions import Self

from kvcore._core import CacheManager

@final
class Claim:
    """The claim of a request id, and its own key in the table of claims.

    The id is hashed once, before anything is looked up. Two claims that the table has are equal
    only if they are one object, so that a claim is put there and taken out of it again without any
    code of the id, which could raise, or let other threads run.
    """

    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class ClaimTable:
    """Tell who is claimed with a manager, by request id and by the slots of its sequences.

    An id is hashed once, before anything is read, and code of its own runs in ``claim_of`` and
    ``require_unclaimed`` alone.
    """

    def __new__(cls, core: CacheManager, tenants: tuple[str, ...] = ()) -> Self: ...

@final
class RowClaims:
    """Remember the claims of a batch's rows, to tell later whether a row still holds a page.

    Parameters
    ----------
    claims : ClaimTable
        Of a manager.
    request_ids : list [B]

    Raises
    ------
    RequestNotFoundError
        One of them is not claimed.
    """

    def __new__(cls, claims: ClaimTable, request_ids: list[Hashable]) -> Self: ...
    def __call__(self, row: int, column: int, page: int) -> None: ...
