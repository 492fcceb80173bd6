# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.store_side import StoreSide

@final
class BelowSearch:
    """Say how far device and host tier get with a prompt, and take what stores have behind that.

    Attributes
    ----------
    replica : int
    have : int
        Columns of the prompt that the device or the host tier has.
    legal : int
        Columns that a hit could take of both together.
    most : int
        Columns that a hit could take of a cache that had everything.
    has_gaps : bool
        No group keeps everything: stores need not have every column of a hit.
    max_hit : int or None
        Tokens that the request wants of a hit at most, where it said so.

    Notes
    -----
    One thread at a time.
    """

    @property
    def max_hit(self) -> int | None: ...
    @property
    def replica(self) -> int: ...
    @property
    def have(self) -> int: ...
    @property
    def legal(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def has_gaps(self) -> bool: ...
    def keys(self, first: int, last: int) -> list[bytes]:
        """Return the keys of columns ``first .. last - 1``, bytes [32] each.

        Raises
        ------
        ValueError
            Columns outside ``0 .. most``.

        Notes
        -----
        Each key is computed once, those in front of what the host tier has all together.
        """

    def needed(self, end: int) -> list[tuple[int, int]]:
        """List what stores have to bring for a hit of `end` columns.

        Returns
        -------
        list of (int, int)
            Columns, rising, and their parts as bits: what neither the device nor the host tier has.
        """

    def begin_fill(self, columns: Iterable[tuple[int, int]]) -> Fill | None:
        """Take pages of the host tier for columns that stores have.

        Parameters
        ----------
        columns : list of (int, int)
            As of the last ``needed``, without what stores lack. Those behind what the host tier
            has go on from it, each with all parts of the groups that keep everything.

        Returns
        -------
        Fill or None
            Of as many columns, from the first one on, as there is room for; None for no room.

        Raises
        ------
        ValueError
            Columns that do not rise, or outside ``0 .. most - 1``.
        """

@final
class Fill:
    """Pages of the host tier that are read into; nobody finds them before ``finish``.

    One that is dropped is finished with nothing.

    Attributes
    ----------
    replica : int
    keys : list of bytes
        Of each column.
    parts : list of list of (int, int)
        Of each column: part, and the page of the host tier, or of STATE_PART the slot, where it
        goes.
    """

    @property
    def replica(self) -> int: ...
    @property
    def keys(self) -> list[bytes]: ...
    @property
    def parts(self) -> list[list[tuple[int, int]]]: ...
    def finish(self, arrived: int, forward: bool = False) -> None:
        """Let the first `arrived` columns be found in the host tier, and free the others.

        Parameters
        ----------
        arrived : int
        forward : bool
            They wait to be written to stores too.

        Raises
        ------
        RuntimeError
            It is finished.
        """

def search_prefix(
    side: StoreSide,
    tokens: Sequence[int] | NDArray[np.int32] | NDArray[np.int64],
    extra_key: str | None = None,
    cache_salt: str | None = None,
    replica_idx: int = 0,
    *,
    extra_keys: Iterable[tuple[int, int, bytes]] | None = None,
) -> BelowSearch | None:
    """Look for a prefix as ``reserve`` does; None where device and host tier have all of it.

    Parameters
    ----------
    side : StoreSide
    tokens : list of int, or array int32 or int64 [n]
    extra_key, cache_salt : str, optional
    replica_idx : int
    extra_keys : list of (int, int, bytes), optional
        Those of a context that start in front of `n`.

    Returns
    -------
    BelowSearch or None

    Raises
    ------
    IndexError, ValueError, TypeError
    """
