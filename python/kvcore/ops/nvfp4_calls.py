# SPDX-License-Identifier: Apache-2.0
"""What calls on pools in nvfp4 hand to kernels."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kvcore.backends.protocol import Place
from kvcore.ops.layer_pools import LayerPools
from kvcore.ops.nvfp4 import global_scale_at

__all__ = ["nvfp4_transfers"]


def nvfp4_transfers(
    pools: LayerPools, place: Place, parts: list[tuple[str, NDArray[Any]]]
) -> list[tuple[str, NDArray[Any], Any, Any, NDArray[Any]]]:
    """Return what kernels take of K and V: name of tokens, pool, scales, global scale, tokens."""
    given = pools.global_scales or ()
    factors = [global_scale_at(place, each, f"global_scales[{i}]") for i, each in enumerate(given)]
    return [
        (name, pools.pools[i], pools.scales and pools.scales[i], factors[i], tokens)
        for i, (name, tokens) in enumerate(parts)
    ]
