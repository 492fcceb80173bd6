# SPDX-License-Identifier: Apache-2.0
"""Pack the tokens of a step into one array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcore.context import ContextLike
from kvcore.native.contexts import (
    RaggedKVCacheInputs,
    TextGenerationContext,
    host_tensor,
    pack_active,
)
from kvcore.ops.batch import PagedBatch

__all__ = ["Packed", "pack"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Packed:
    """Hold a model's inputs for a batch of B rows with T new tokens, in host memory.

    Attributes
    ----------
    tokens : int32 [T]
        The active tokens, row after row.
    positions : int64 [T]
        The positions of the tokens in their sequences.
    row_offsets : uint32 [B + 1]
        Row b's tokens are ``row_offsets[b] .. row_offsets[b + 1]``.
    last_rows : int64 [B]
        Index of each row's last token, whose logits give the next token.
    max_length : int
        The largest number of tokens of a row.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int64]
    row_offsets: NDArray[np.uint32]
    last_rows: NDArray[np.int64]
    max_length: int


def pack(
    inputs: RaggedKVCacheInputs | PagedBatch,
    contexts: Sequence[TextGenerationContext | ContextLike],
) -> Packed:
    """Pack the active tokens of a batch into one array.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
        The inputs that ``fetch`` returned for `contexts`.
    contexts : sequence of contexts [B]
        The contexts of the rows of `inputs`, in the same order, not updated since the ``fetch``.

    Returns
    -------
    Packed

    Raises
    ------
    ValueError
        A number of contexts other than the number of rows, or a context whose position differs from
        its row's length.
    TypeError
        A value that is not a context.

    Notes
    -----
    One native call, O(B + T). Lengths on a GPU are not read back, so only their number is checked.

    Examples
    --------
    >>> from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext, ops
    >>> params = KVCacheParams("float32", 1, 8, 1, page_size=4)
    >>> manager = PagedKVCacheManager(params, max_batch_size=2, max_seq_len=16, num_pages=4)
    >>> batch = [TextGenerationContext("a", [5, 6, 7]), TextGenerationContext("b", [8])]
    >>> for context in batch:
    ...     manager.claim(context.request_id)
    >>> packed = ops.pack(manager.fetch(batch)[0], batch)
    >>> packed.tokens.tolist(), packed.positions.tolist(), packed.last_rows.tolist()
    ([5, 6, 7, 8], [0, 1, 2, 0], [2, 3])
    """
    packed = Packed(*pack_active(contexts))
    seen = host_tensor(inputs.cache_lengths)
    lengths = inputs.cache_lengths if seen is None else seen
    if len(lengths) != len(packed.last_rows):
        raise ValueError(
            f"{len(packed.last_rows)} contexts for inputs of {len(lengths)} rows; "
            f"pass the contexts that were fetched"
        )
    if isinstance(lengths, np.ndarray) and len(lengths):
        starts = packed.positions[packed.row_offsets[:-1]]
        if not np.array_equal(starts, lengths):
            row = int(np.argmax(starts != lengths))
            raise ValueError(
                f"row {row} has {lengths[row]} tokens written, its context has {starts[row]}; "
                f"call pack after the fetch, before the context is updated"
            )
    return packed
