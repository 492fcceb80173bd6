# SPDX-License-Identifier: Apache-2.0
"""Compute attention over the pages of a batch, or without a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore import Device, RaggedKVCacheInputs, ops
from kvcore.apps.demo.protocol import Floats
from kvcore.backends.protocol import Place
from kvcore.backends.selection import backend_of

# Queries per block: their scores fit into the processor's cache.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """An ``Attend`` that writes the K and V of a step into pages and attends over the pages.

    Attributes
    ----------
    inputs : RaggedKVCacheInputs
        Result of ``fetch`` for the step.
    row_offsets : array uint32 [B + 1]
        The new tokens of row b are ``row_offsets[b] .. row_offsets[b + 1]``; on the pages' device.
    dtype : numpy dtype
        Dtype of K and V before they are written; float8 and int8 pools quantise float32.
    threads : int
        Threads of the kernels in host memory.
    place : Place
        Device of the pages. q, K and V of the model are copied from host memory to this device;
        the output is copied back, and the host waits for it.
    """

    inputs: RaggedKVCacheInputs
    row_offsets: Any
    dtype: np.dtype[Any]
    threads: int
    place: Place

    @classmethod
    def of(
        cls,
        inputs: RaggedKVCacheInputs,
        row_offsets: NDArray[np.uint32],
        dtype: np.dtype[Any],
        threads: int,
        device: Device,
    ) -> PagedAttention:
        """Make the attention of a step whose pages are on `device`."""
        place = backend_of(device.kind).current_place(device.index)
        return cls(inputs, place.from_host(row_offsets), dtype, threads, place)

    def __call__(self, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        """Return attention ``[tokens, q_heads, head_dim]``."""
        inputs, offsets, threads, place = self.inputs, self.row_offsets, self.threads, self.place
        k, v = (place.from_host(each.astype(self.dtype, copy=False)) for each in (k, v))
        ops.append(inputs, layer, k, v, offsets, threads=threads)
        seen = ops.attention(inputs, layer, place.from_host(q), offsets, threads=threads)
        return place.to_host(seen)


def plain_attention(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:  # noqa: ARG001
    """Compute causal attention over one whole sequence without a cache: an ``Attend``.

    Parameters
    ----------
    layer : int
        Not used.
    q : float32 [tokens, q_heads, head_dim]
    k, v : float32 [tokens, kv_heads, head_dim]

    Returns
    -------
    float32 [tokens, q_heads, head_dim]
    """
    tokens, heads, dim = q.shape
    groups = q.transpose(1, 0, 2).reshape(k.shape[1], -1, tokens, dim) * np.float32(dim**-0.5)
    keys, values = k.transpose(1, 2, 0)[:, None], v.transpose(1, 0, 2)[:, None]
    seen = np.empty_like(groups)
    for begin in range(0, tokens, _BLOCK):
        end = min(begin + _BLOCK, tokens)
        scores = groups[:, :, begin:end] @ keys[..., :end]
        scores[..., begin:][..., ~np.tri(end - begin, dtype=bool)] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        sums = scores.sum(axis=-1, keepdims=True)
        np.divide(scores @ values[..., :end, :], sums, out=seen[:, :, begin:end])
    return seen.reshape(heads, tokens, dim).transpose(1, 0, 2)
