# SPDX-License-Identifier: Apache-2.0
"""Views of a manager's pool arrays for the kernels that move whole pages."""

from __future__ import annotations

from typing import Any

from kvcore.backends.protocol import Shard, Tensor

__all__ = ["arrays_of", "layer_rows", "tensors_of", "tensors_of_shards"]


def layer_rows(place: Any, shape: tuple[int, int, int]) -> Any:
    """View a layer's place in every page as the rows of the layer.

    Parameters
    ----------
    place : array [pages, ...]
        Part of a pool. Each page's part is contiguous, unless `place` has the shape already.
    shape : (page_size, heads, width)
        Shape of the layer's rows, which are the first elements of the place.
    """
    if place.shape[1:] == shape:
        return place
    elements = shape[0] * shape[1] * shape[2]
    return place.reshape(len(place), -1)[:, :elements].reshape(len(place), *shape)


def arrays_of(shard: Shard) -> list[Any]:
    """Return the arrays of a device's part of a replica, scales after the elements."""
    parts = [part for part in shard if part is not None]
    return [array for part in parts for array in (part if isinstance(part, tuple) else (part,))]


def tensors_of(array: Any) -> list[Tensor]:
    """Split an array [pages, kv, layers, page_size, heads, dim] into K, and V if it has V."""
    return [[array[:, kv]] for kv in range(array.shape[1])]


def tensors_of_shards(shards: list[Shard]) -> list[list[Tensor]]:
    """Split every array of a replica, scales included, on all its devices into K and V."""
    # The kernels move bytes, so the dtype does not matter.
    arrays = [array for shard in shards for array in arrays_of(shard)]
    return [tensors_of(array.view(f"u{array.itemsize}")) for array in arrays]
