# SPDX-License-Identifier: Apache-2.0
"""Prepare the kernel arguments of calls on pools in nvfp4."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvcore.backends.protocol import Place
from kvcore.ops.layer_pools import LayerPools
from kvcore.ops.nvfp4 import global_scale_at

__all__ = ["global_scales_of", "nvfp4_transfers"]


def global_scales_of(pools: LayerPools, place: Place) -> tuple[Any, Any] | None:
    """Return the global scales of K and V for kernels, or None for other pools."""
    if pools.global_scales is None:
        return None
    k, v = (  # numbers were checked when the pools were made
        scale if isinstance(scale, float) else global_scale_at(place, scale, f"global_scales[{i}]")
        for i, scale in enumerate(pools.global_scales)
    )
    return k, v


def nvfp4_transfers(
    pools: LayerPools, place: Place, parts: list[tuple[str, NDArray[Any]]]
) -> list[tuple[str, NDArray[Any], Any, Any, NDArray[Any]]]:
    """Return kernel arguments for K and V: token name, pool, scales, global scale, tokens."""
    factors = global_scales_of(pools, place) or ()
    return [
        (name, pools.pools[i], pools.scales and pools.scales[i], factors[i], tokens)
        for i, (name, tokens) in enumerate(parts)
    ]
