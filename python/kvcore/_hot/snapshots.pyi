# SPDX-License-Identifier: Apache-2.0
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.parts import EngineParts

class CachedRuns(NamedTuple):
    """What is cached in a replica at one moment.

    Attributes
    ----------
    num_resets : int
        Of the caches until then.
    names : list of bytes
        Namespaces.
    runs : int32 [runs, 5]
        Parent (-1: none), namespace, columns in front, own columns, rank: of two runs that of less
        goes first. A run comes behind its parent, whose rank is no less.
    tokens : int32 [columns, tokens of a column]
        Of the runs, one behind the other, as the tree has them.
    """

    num_resets: int
    names: list[bytes]
    runs: NDArray[np.int32]
    tokens: NDArray[np.int32]

def cached_runs(engine: EngineParts, replica: int) -> CachedRuns:
    """Return the CachedRuns of a replica. O(cached tokens)."""

def num_resets(engine: EngineParts) -> int:
    """Return how often the caches of a manager were reset."""

@final
class ExportedColumns:
    """Hold cached columns for who copies them, until the end of ``with``.

    Attributes
    ----------
    pages : int32 [columns, lanes]
        Of each column lane by lane, -1 where it has none.
    parts : int32 [columns, 3]
        Windows that a column has pages of and those that requests passed, both as bits, and the
        slot of its checkpoint, -1 without.
    """

    @property
    def pages(self) -> NDArray[np.int32]: ...
    @property
    def parts(self) -> NDArray[np.int32]: ...
    def __enter__(self) -> ExportedColumns: ...
    def __exit__(
        self,
        *error: object,
    ) -> None: ...

def export_columns(
    engine: EngineParts,
    replica: int,
    resets: int,
    name: bytes,
    tokens: NDArray[np.int32],
    first: int,
) -> ExportedColumns:
    """Hold what is cached of columns `first` .. of a prefix, in a cache that was not reset since.

    Parameters
    ----------
    engine : EngineParts
    replica : int
    resets : int
        As of ``cached_runs``.
    name : bytes
        Of the namespace.
    tokens : int32 [n]
        Of the prefix, as the tree has them, whole columns.
    first : int

    Returns
    -------
    ExportedColumns
    """

@final
class ImportedColumns:
    """Hold pages for columns that the caller brings, until the end of ``with``.

    Attributes
    ----------
    status : str
        "taken"; "known" where there is nothing to be filled, and to publish them is a use of what
        is cached. Else nothing is held: "no parent", "no room", or "reset".
    pages, parts
        As of ExportedColumns, for the columns that there is room for: pages to be filled, and the
        slot to be filled; -1 where there is nothing to be written.
    """

    @property
    def status(self) -> str: ...
    @property
    def pages(self) -> NDArray[np.int32]: ...
    @property
    def parts(self) -> NDArray[np.int32]: ...
    def publish(self, more: bool) -> bool:
        """Have them found, now that they are filled; `more`: the run goes on.

        Returns
        -------
        bool
            False where the caches were reset meanwhile.
        """

    def __enter__(self) -> ImportedColumns: ...
    def __exit__(
        self,
        *error: object,
    ) -> None: ...

def import_columns(
    engine: EngineParts,
    replica: int,
    resets: int,
    name: bytes,
    tokens: NDArray[np.int32],
    first: int,
    parts: NDArray[np.int32],
) -> ImportedColumns:
    """Take free pages for columns `first` .. of a prefix.

    Parameters
    ----------
    engine, replica, resets, name, tokens, first
        As of ``export_columns``.
    parts : int32 [columns, 3]
        What there is of each, as of ExportedColumns; any number from 0 on for a checkpoint.

    Returns
    -------
    ImportedColumns
    """

@final
class HeldStandIns:
    """Keep stand-ins of tokens with extra keys, which a snapshot names, as long as it lives.

    A stand-in is a negative token that the prefix tree is shown; its name, which says what it
    stands for, is the same in every process.
    """

    def name_of(self, token: int) -> bytes | None:
        """Return the name of a token; None for one that stands for nothing.

        Parameters
        ----------
        token : int

        Returns
        -------
        bytes or None
        """

    def token_of(self, name: bytes) -> int:
        """Return the token that stands for a name here.

        Raises
        ------
        CapacityError
            All stand-ins are in use.
        """

def is_keyed(engine: EngineParts) -> bool:
    """Tell whether low tokens in the caches of a manager are stand-ins."""

def expect_keys(engine: EngineParts) -> None:
    """Have low tokens taken for stand-ins from now on.

    Raises
    ------
    ValueError
        The caches hold such tokens of requests without extra keys.
    """
