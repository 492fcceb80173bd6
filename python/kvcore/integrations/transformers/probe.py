# SPDX-License-Identifier: Apache-2.0
"""A probe of the K, V and states of each layer of a model, and the params of their pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from kvcore.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow, State
from kvcore.integrations.transformers.latents import keeps_latents
from kvcore.integrations.transformers.mixers import cache_of, states_of
from kvcore.integrations.transformers.rules import AttentionRule
from kvcore.integrations.transformers.tray import LayerTray, RunMixer
from kvcore.params import KVCacheParams

__all__ = ["Arrays", "LayerRow", "Probe", "flat_params", "grouped_params"]

Shape = tuple[bool, int, int, int]
Kind = tuple[int | None, int | None, Shape]
Arrays = dict[str, tuple[tuple[int, ...], str]]  # a layer's state of a request, by name


class LayerRow(NamedTuple):
    """The K and V that one layer keeps of a token, and its window or chunk.

    Attributes
    ----------
    shape : (bool, int, int, int)
        True for a latent row; the number of heads; the widths of K and V.
    window, chunk : int, or None
        The number of tokens that the layer reads.
    owner : int, or None
        The earlier layer whose K and V it reads, if it has no K and V of its own.
    """

    shape: Shape
    window: int | None
    chunk: int | None
    owner: int | None


class Probe:
    """A replacement of a packed batch that records each layer's K and V, and returns zeros.

    Attributes
    ----------
    tray : LayerTray
    layers : dict of int to LayerRow
    states : dict of int to dict
        By layer and name, the shape and dtype of each array of a request's state.
    dtype : str
    """

    def __init__(self) -> None:
        self.tray = LayerTray(self.mix)
        self.layers: dict[int, LayerRow] = {}
        self.states: dict[int, Arrays] = {}
        self.dtype = ""
        self._writers: dict[int, int] = {}
        self._held: list[torch.Tensor] = []  # so that no address is used twice

    @property
    def spans(self) -> set[int]:
        """The windows and chunks of all layers."""
        rows = self.layers.values()
        return {span for row in rows for span in (row.window, row.chunk) if span is not None}

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """Replace ``PackedBatch.attend``."""
        self.dtype = str(key.dtype).removeprefix("torch.")
        width, layer = value.shape[-1], self.tray.layer_of(module)
        shape = (False, key.shape[1], key.shape[-1], width)
        owner = None
        if keeps_latents(module):
            shape = (True, 1, self.tray.take().shape[-1], width)
        else:
            # If layers share K and V, the model passes the same tensors to them.
            owner = self._writers.setdefault(key.data_ptr(), layer)
            self._held.append(key)
        self.layers[layer] = LayerRow(
            shape, rule.window, rule.chunk, None if owner == layer else owner
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], width)

    def mix(self, module: Any, hidden: torch.Tensor, run: RunMixer) -> torch.Tensor:
        """Run a recurrent layer and record the states in its cache."""
        cache = cache_of(module.layer_idx, {}, is_new=True)
        out = run(hidden, cache)
        self.states[module.layer_idx] = {
            name: (tuple(state.shape[1:]), str(state.dtype).removeprefix("torch."))
            for name, state in states_of(cache).items()
        }
        return out


def _fields(dtype: str, layers: int, shape: Shape) -> dict[str, Any]:
    is_mla, heads, k_width, v_width = shape
    return {
        "dtype": dtype,
        "n_kv_heads": heads,
        "head_dim": k_width,
        "num_layers": layers,
        "is_mla": is_mla,
        "v_head_dim": None if is_mla or v_width == k_width else v_width,
        "page_size": 1,
    }


def flat_params(dtype: str, layers: Mapping[int, LayerRow]) -> KVCacheParams:
    """Return the params of pages in which every layer keeps K and V of every token.

    Raises
    ------
    ValueError
        Layers differ in their K and V.
    """
    shapes = {row.shape for row in layers.values()}
    if len(shapes) > 1:
        raise ValueError(
            "its layers differ in their K and V, one pool of equal pages does not hold them"
        )
    return KVCacheParams(**_fields(dtype, len(layers), shapes.pop()))


def grouped_params(
    dtype: str, layers: Mapping[int, LayerRow], states: Mapping[int, Arrays], num_layers: int
) -> KVCacheParams:
    """Return the params of pages for the layers' reads; flat params if all read every token.

    Parameters
    ----------
    dtype : str
    layers : mapping of int to LayerRow
        Layers that attend.
    states : mapping of int to dict
        Layers that keep states, with their arrays.
    num_layers : int

    Raises
    ------
    ValueError
        Rows of K and V that do not fit pages of one size.
    """
    shared = {layer: row.owner for layer, row in layers.items() if row.owner is not None}
    own = {layer: row for layer, row in layers.items() if row.owner is None}
    members: dict[Kind, list[int]] = {}
    for layer, row in own.items():
        members.setdefault((row.window, row.chunk, row.shape), []).append(layer)
    base = Counter(row.shape for row in own.values()).most_common(1)[0][0]
    fields = _fields(dtype, num_layers, base)
    if members.keys() == {(None, None, base)} and not shared and not states:
        return KVCacheParams(**fields)
    # Full groups come first: the length of their table follows the request's length.
    order = sorted(members, key=lambda kind: (kind[:2] != (None, None), kind[2] != base, str(kind)))
    groups: list[AttentionGroup | State] = [_group(members[kind], kind, base) for kind in order]
    groups += _state_groups(states)
    return KVCacheParams(**fields, groups=groups, shared=shared or None)


def _group(layers: list[int], kind: Kind, base: Shape) -> AttentionGroup:
    window, chunk, (_, heads, k_width, v_width) = kind
    is_as_wide = (k_width, v_width) == base[2:]
    row = {
        "n_kv_heads": None if heads == base[1] else heads,
        "head_dim": None if is_as_wide else k_width,
        "v_head_dim": None if is_as_wide or v_width == k_width else v_width,
    }
    if window is not None:
        return SlidingWindow(layers, window, **row)
    return FullAttention(layers, **row) if chunk is None else ChunkedLocal(layers, chunk, **row)


def _state_groups(states: Mapping[int, Arrays]) -> list[State]:
    """Return groups of layers with equal arrays."""
    kinds: list[Arrays] = []
    for arrays in states.values():
        if arrays not in kinds:
            kinds.append(arrays)
    return [
        State([layer for layer, own in states.items() if own == arrays], arrays) for arrays in kinds
    ]
