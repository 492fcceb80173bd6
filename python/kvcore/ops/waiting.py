# SPDX-License-Identifier: Apache-2.0
"""Layers whose pages are still on their way from the host tier."""

from __future__ import annotations

from typing import Any, SupportsIndex

from kvcore.native.contexts import RaggedKVCacheInputs
from kvcore.ops.batch import layer_pools
from kvcore.ops.options import Options, documents_options

__all__ = ["wait_layer"]


@documents_options
def wait_layer(inputs: RaggedKVCacheInputs, layer: SupportsIndex, *, stream: Any = None) -> None:
    """Let a stream wait until a layer's part of all pages has arrived from the host tier.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs
        What ``fetch`` handed out.
    layer : int
        Those in front of it in a page have arrived then as well: the last one stands for all.

    Raises
    ------
    IndexError
        A layer that does not exist.
    ValueError
        Inputs without a pool; a stream that is captured into a graph.
    TypeError
        Something else than inputs.

    Notes
    -----
    For kernels of the caller's that read or write the pages of a manager with
    ``layerwise_loads=True``, before each of them; the other functions of ``kvcore.ops`` do it
    themselves. Nothing happens where all pages are there, as in host memory. The host does not
    wait. O(1).

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import RaggedKVCacheInputs, ops
    >>> pool, table = np.zeros((4, 2, 3, 16, 1, 8), np.float32), np.zeros((1, 1), np.uint32)
    >>> inputs = RaggedKVCacheInputs(pool, table[0], table, np.array([[1, 1]], np.uint32))
    >>> ops.wait_layer(inputs, 2)
    """
    layer_pools(inputs, layer).place(Options(stream))
