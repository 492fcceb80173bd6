# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

@final
class FreedList:
    """Where a tree lists what its user gets back."""

class ForgettingTree:
    """What a tree does with pages that went bad."""

    def forget(self, pages: Sequence[int] | NDArray[np.int32] | NDArray[np.int64]) -> int:
        """Take pages out whose contents are wrong, say of a load that failed, and all behind them.

        Parameters
        ----------
        pages : list of int, or array int32 or int64 [n]
            Ids. Those that are not in the tree are passed over.

        Returns
        -------
        int
            Pages that left the tree. ``take_forgotten`` tells which of them are yours again: at
            once those that no pin protects, the others once they are unpinned.

        Raises
        ------
        ValueError, TypeError
            Ids beyond int32, or that are none.

        Notes
        -----
        Nothing finds these pages any more. Whoever has pinned them keeps them, and may ask
        ``pages_of`` and ``unpin``; to go on behind them is an InvalidHandleError. Costs O(pages in
        the tree).
        """
    def take_forgotten(self) -> NDArray[np.int32]:
        """Return forgotten pages that no pin protects any more, each of them once.

        Returns
        -------
        int32 [pages]
            Their ids, yours again.
        """
