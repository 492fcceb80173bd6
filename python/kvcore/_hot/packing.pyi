# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.contexts import TextGenerationContext
from kvcore.context import ContextLike

def pack_active(
    contexts: Sequence[TextGenerationContext | ContextLike],
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.uint32], NDArray[np.int64], int]:
    """Put the active tokens of contexts side by side.

    Parameters
    ----------
    contexts : sequence of contexts [B]

    Returns
    -------
    int32 [T], int64 [T], uint32 [B + 1], int64 [B], int
        Tokens, positions, where rows begin, the last token of each, most tokens of a row.
    """
