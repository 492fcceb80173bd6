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
    """
