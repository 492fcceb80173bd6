# SPDX-License-Identifier: Apache-2.0
"""Wait for the pages of a layer that are still loading from the host tier."""

from __future__ import annotations

from typing import Any, SupportsIndex

from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.ops.batch import layer_pools
from kvcore.ops.layer_pools import place_of_layer
from kvcore.ops.options import documents_options

__all__ = ["wait_layer"]


@documents_options
def wait_layer(inputs: RaggedKVCacheInputs, layer: SupportsIndex, *, stream: Any = None) -> None:
    """Make a stream wait until a layer's part of all pages has arrived from the host tier.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs
        The inputs that ``fetch`` returned.
    layer : int
        After this wait, the earlier layers of a page have also arrived, so a wait for the last
        layer waits for all layers.

    Raises
    ------
    IndexError
        A layer that does not exist.
    ValueError
        Inputs without a pool; a stream that is captured into a graph.
    TypeError
        An argument that is not inputs.

    Notes
    -----
    Call it before each kernel of your own that reads or writes the pages of a manager with
    ``layerwise_loads=True``; the other functions of ``kvcore.ops`` wait themselves. The call does
    nothing if all pages have arrived, as in host memory. The host does not wait. O(1).

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import RaggedKVCacheInputs, ops
    >>> pool, table = np.zeros((4, 2, 3, 16, 1, 8), np.float32), np.zeros((1, 1), np.uint32)
    >>> inputs = RaggedKVCacheInputs(pool, table[0], table, np.array([[1, 1]], np.uint32))
    >>> ops.wait_layer(inputs, 2)
    """
    place_of_layer(layer_pools(inputs, layer), stream)
