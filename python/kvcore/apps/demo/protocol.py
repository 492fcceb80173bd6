# SPDX-License-Identifier: Apache-2.0
"""Say what the serving loop needs from a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Tokens: TypeAlias = NDArray[np.int32]

Attend: TypeAlias = Callable[[int, Any, Any, Any], Any]
"""``attend(layer, q, k, v)``: keep this step's K and V ``[tokens, kv_heads, head_dim]``, and answer
the attention ``[tokens, q_heads, head_dim]`` of q over all that its sequences have kept."""


class LanguageModel(Protocol):
    """A decoder that leaves K, V and attention to its caller.

    Attributes
    ----------
    num_layers, n_kv_heads, head_dim : int
        The shape of its K and V.
    """

    num_layers: int
    n_kv_heads: int
    head_dim: int

    def forward(
        self,
        tokens: Tokens,
        positions: NDArray[np.int64],
        attend: Attend,
        wanted: NDArray[np.int64],
    ) -> Floats:
        """Run the new tokens of a batch, one sequence behind the other.

        Parameters
        ----------
        tokens : int32 [tokens]
        positions : int64 [tokens]
            Of each token in its sequence.
        attend : callable
            Called once per layer, in order.
        wanted : int64 [n]
            The tokens behind which the next one is asked for.

        Returns
        -------
        float32 [n, vocabulary]
            Logits.
        """
        ...
