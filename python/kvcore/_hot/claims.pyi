# SPDX-License-Identifier: Apache-2.0
from collections.abc import Hashable
from typing import final

from typing_extensions import Self

from kvcore._core import CacheManager

@final
class Claim:
    """The claim of a request id, and its own key in the table of claims."""

    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class ClaimTable:
    """Tell who is claimed with a manager, by request id and by the slots of its sequences."""

    def __new__(cls, core: CacheManager) -> Self: ...

@final
class RowClaims:
    """Remember the claims of a batch's rows, to tell later whether a row still holds a page.

    Parameters
    ----------
    claims : ClaimTable
        Of a manager.
    request_ids : list [B]
    """

    def __new__(cls, claims: ClaimTable, request_ids: list[Hashable]) -> Self: ...
    def __call__(self, row: int, column: int, page: int) -> None: ...
