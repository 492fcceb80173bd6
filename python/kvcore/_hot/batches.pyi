# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable, Sequence
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from kvcore._hot.claims import ClaimTable
from kvcore._hot.contexts import TextGenerationContext
from kvcore.context import ContextLike, Exported

_Tokens: TypeAlias = Sequence[int] | NDArray[np.int32] | NDArray[np.int64] | Exported

def update_batch(batch: Iterable[TextGenerationContext | ContextLike], tokens: _Tokens) -> None:
    """Call ``ctx.update(token)`` for each context of a batch.

    Parameters
    ----------
    batch : sequence of contexts [B]
    tokens : list of int, or array int32 or int64 [B]
        The sampled tokens; those of contexts that are between chunks are discarded.

    Raises
    ------
    ValueError
        The lengths differ, or a token is beyond int32; no context has changed.
    """

@final
class BatchReader:
    """Point to the requests of contexts, and remember the batch that was done with last."""

    def __new__(cls, claims: ClaimTable) -> Self: ...
