# SPDX-License-Identifier: Apache-2.0
"""Make a model with the pages of another model and almost no bytes, for replays with tiers."""

from __future__ import annotations

import math
from dataclasses import replace

from kvcore import KVCacheParams
from kvcore.groups import State, bundles
from kvcore.layers.packing import row_elements

__all__ = ["tiny_model"]

_SLOT = {"state": ((1,), "int8")}


def tiny_model(model: KVCacheParams) -> KVCacheParams:
    """Return a model with the same layers, bundles and page sizes, in rows of few int8 elements.

    The rows of two groups have the same ratio as in the model, because it decides how many tokens
    of narrow rows a page has. A state has one byte for each layer.

    Parameters
    ----------
    model : KVCacheParams
        Model of one device with groups.

    Raises
    ------
    ValueError
        The bundles of the small model would differ.
    """
    rows = {group: sum(row_elements(model, group)) for group in model.attention_groups}
    unit = math.gcd(*rows.values())
    groups = tuple(
        replace(group, arrays=_SLOT)
        if isinstance(group, State)
        else replace(group, n_kv_heads=1, head_dim=rows[group] // unit, v_head_dim=None)
        for group in model.groups or ()
    )
    found = replace(
        model,
        dtype="int8",
        n_kv_heads=1,
        head_dim=max(rows.values()) // unit,
        v_head_dim=None,
        is_mla=False,
        kv_scale_granularity=None,
        groups=groups,
    )
    if _shape(found) != _shape(model):
        raise ValueError(
            f"small pages have other bundles than the pages of the model: {_shape(found)} and "
            f"{_shape(model)}; replay the model without tiers"
        )
    return found


def _shape(model: KVCacheParams) -> list[tuple[tuple[int, ...], int]]:
    return [(tuple(bundle.layers), bundle.page_size) for bundle in bundles(model)]
