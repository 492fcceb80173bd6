# SPDX-License-Identifier: Apache-2.0
"""The arrays of a manager's pools, as the kernels that move whole pages see them."""

from __future__ import annotations

from typing import Any

from kvcore.backends.protocol import Shard, Tensor

__all__ = ["arrays_of", "layer_rows", "tensors_of", "tensors_of_shards"]


def layer_rows(place: Any, shape: tuple[int, int, int]) -> Any:
    """See a layer's place in every page as its rows.

    Parameters
    ----------
    place : array [pages, ...]
        Of a pool; each page's part of it is contiguous unless it has that shape already.
    shape : (page_size, heads, width)
        Of the layer's rows, which lie in front of the place.
    """
    if place.shape[1:] == shape:
        return place
    elements = shape[0] * shape[1] * shape[2]
    return place.reshape(len(place), -1)[:, :elements].reshape(len(place), *shape)


def arrays_of(shard: Shard) -> list[Any]:
    """Return the arrays of a device's part of a replica, scales behind the elements."""
    parts = [part for part in shard if part is not None]
    return [array for part in parts for array in (part if isinstance(part, tuple) else (part,))]


def tensors_of(array: Any) -> list[Tensor]:
    """See an array [pages, kv, layers, page_size, heads, dim] as K, and V where it has it."""
    return [[array[:, kv]] for kv in range(array.shape[1])]


def tensors_of_shards(shards: list[Shard]) -> list[list[Tensor]]:
    """See every array of a replica as K and V: those of all devices and their scales."""
    # Bytes are moved as they are: the dtype does not matter.
    arrays = [array for shard in shards for array in arrays_of(shard)]
    return [tensors_of(array.view(f"u{array.itemsize}")) for array in arrays]
