# SPDX-License-Identifier: Apache-2.0
"""The protocol between the serving loop and a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Tokens: TypeAlias = NDArray[np.int32]

Attend: TypeAlias = Callable[[int, Any, Any, Any], Any]
"""``attend(layer, q, k, v)``: store K and V of this step ``[tokens, kv_heads, head_dim]``; return
the attention ``[tokens, q_heads, head_dim]`` of q over all stored K and V of its sequences."""


class LanguageModel(Protocol):
    """A decoder whose caller stores K and V and computes attention.

    Attributes
    ----------
    num_layers, n_kv_heads, head_dim : int
        Shape of K and V.
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
        """Run the new tokens of a batch; the sequences are concatenated.

        Parameters
        ----------
        tokens : int32 [tokens]
        positions : int64 [tokens]
            Position of each token in its sequence.
        attend : callable
            Called once per layer, in order.
        wanted : int64 [n]
            Rows of the tokens whose next token is predicted.

        Returns
        -------
        float32 [n, vocabulary]
            Logits.
        """
        ...
