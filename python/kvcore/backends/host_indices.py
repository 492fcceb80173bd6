# SPDX-License-Identifier: Apache-2.0
"""Page tables of the host as lists of pages, row behind row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.protocol import IndexRequest

__all__ = ["write_page_indices"]


def write_page_indices(request: IndexRequest, offsets: NDArray[np.uint32], out: Any) -> None:
    """Write the lists of a batch in host memory; see ``ops.page_indices``.

    Raises
    ------
    ValueError
        Offsets that descend.
    IndexError
        More tokens in a row than its columns have room for. Nothing has been written.
    """
    table, columns = request.table, request.table.shape[1]
    if offsets.size and (offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any()):
        raise ValueError("row_offsets must begin at 0, no entry below the one before")
    lengths = request.lengths.astype(np.int64) + np.diff(offsets.astype(np.int64))
    counts = -(-lengths // request.page_size)
    if (counts > columns).any():
        row = int(np.argmax(counts > columns))
        raise IndexError(
            f"row {row} has {lengths[row]} tokens, its {columns} columns are pages of "
            f"{request.page_size}; fetch it again"
        )
    indptr, indices, last, kv_lengths = out
    indptr[0] = 0
    np.cumsum(counts, out=indptr[1:])
    found = table[np.arange(columns) < counts[:, None]]
    indices[: found.size] = np.where(found < request.num_pages, found, 0)
    kv_lengths[...] = lengths
    last[...] = lengths - np.maximum(counts - 1, 0) * request.page_size
