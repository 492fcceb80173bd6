# SPDX-License-Identifier: Apache-2.0
from typing import Final, final

from typing_extensions import Self

from kvcore._core import CacheManager

STATE_PART: Final[int]

@final
class StoreSide:
    """What stores below a manager's host tier ask of it.

    Parameters
    ----------
    core : kvcore._core.CacheManager
        Made with ``has_stores``.
    """

    def __new__(cls, core: CacheManager) -> Self: ...
    def take_writes(self, most: int) -> StoreWrites | None:
        """Take up to `most` columns that are to be written; None where none waits."""

    @property
    def waiting(self) -> int:
        """Columns that wait to be written, or are being written."""

    @property
    def dropped(self) -> int:
        """Columns that were forgotten while they waited."""

@final
class StoreWrites:
    """Pages of the host tier that are being written; they stay as they are until ``finish``.

    Attributes
    ----------
    replica : int
    keys : list of bytes
    parts : list of list of (int, int)
        As of Fill.
    """

    @property
    def replica(self) -> int: ...
    @property
    def keys(self) -> list[bytes]:
        """Of the columns, bytes [32] each."""

    @property
    def parts(self) -> list[list[tuple[int, int]]]: ...
    def note_stored(self) -> None:
        """Tell who listens to events that a store has all of them, unless there was a reset."""

    def finish(self) -> None:
        """Let the host tier evict these pages again.

        Raises
        ------
        RuntimeError
            It is finished.
        """
