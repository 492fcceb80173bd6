# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

_Keys: TypeAlias = NDArray[np.uint64] | Sequence[bytes | int]

def hashes_of(keys: _Keys) -> NDArray[np.uint64]:
    """Return uint64 [n] of what stands for keys: such an array, or a sequence of bytes and ints."""

@final
class WorkerPages:
    """Which of workers 0 .. num_workers - 1 hold which pages.

    Parameters
    ----------
    num_workers : int
        1 .. 4,096.

    Notes
    -----
    Keys are an array uint64 [n] of their low 64 bits, which is not copied, or a sequence of bytes
    and ints. Media are the bits 1, 2 and 4. Any number of threads; none holds the GIL meanwhile.
    """

    def __init__(self, num_workers: int) -> None: ...
    @property
    def num_pages(self) -> int:
        """Pages that some worker has."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""

    def pages_of(self, worker: int) -> int:
        """Return how many pages a worker has."""

    def store(self, worker: int, keys: _Keys, medium: int) -> None:
        """Note pages that a worker has on a medium."""

    def remove(self, worker: int, keys: _Keys, medium: int) -> None:
        """Note pages that it has there no more."""

    def clear(self, worker: int) -> None:
        """Note that a worker has nothing."""

    def match(self, keys: _Keys, media: int) -> NDArray[np.int32]:
        """Return int32 [num_workers]: the leading pages of a prompt that each has."""

    def check_integrity(self) -> None:
        """Verify what the index keeps.

        Raises
        ------
        AssertionError
            With the law that is broken.
        """
