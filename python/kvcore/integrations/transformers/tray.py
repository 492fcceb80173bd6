# SPDX-License-Identifier: Apache-2.0
"""The data that a model's layers pass to kvcore outside the arguments of their attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
import transformers
from transformers import Cache

__all__ = ["LayerTray", "Mix", "RunMixer"]


class RunMixer(Protocol):
    """Run a recurrent layer over rows of equal length, from the states of a cache."""

    def __call__(self, hidden: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Return [B, T, width] for `hidden` [B, T, width]; the cache gets the new states."""


#: Called with a recurrent layer, its input [1, T, width] and its runner; returns its output.
Mix = Callable[[Any, torch.Tensor, RunMixer], torch.Tensor]


class LayerTray(Cache):
    """Store the data that a layer passes to its cache, for the attention call after it.

    A packed batch passes it as the model's cache. Only ``update`` gets latents and, for an
    attention module that several layers share, the number of the running layer. ``update`` returns
    its arguments: the K and V of the new tokens.

    Parameters
    ----------
    mix : Mix
        Runs recurrent layers; ``kvcore.integrations.transformers.mixers`` calls it.
    """

    def __init__(self, mix: Mix) -> None:
        super().__init__(layers=[])
        self.mix = mix
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None
        self._layer: int | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int | None = None,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the latent and the rope part until the attention call, and return them."""
        self._held = key_states, value_states
        self._layer = layer_idx
        return key_states, value_states

    def take(self) -> torch.Tensor:
        """Return the rows [T, 1, rank + rope_dim] of the running layer, and forget them.

        Raises
        ------
        ValueError
            The layer has passed no rows.
        """
        if self._held is None:
            raise ValueError(
                f"the model of transformers {transformers.__version__} has not passed its latents "
                f"to its cache; use 5.15.1 or later, and pass the whole of model_inputs()"
            )
        latent, rope = self._held
        self._held = None
        return torch.cat((latent, rope), dim=-1)[0].transpose(0, 1)

    def layer_of(self, module: Any) -> int:
        """Return the running layer's number; a module that layers share has no own number."""
        own: int | None = module.layer_idx
        if own is not None and own >= 0:
            return own
        if self._layer is None:
            raise ValueError(
                f"{type(module).__name__} of transformers {transformers.__version__} does not pass "
                f"the layer for which it runs; pass the whole of model_inputs()"
            )
        return self._layer

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Return True, so that the model makes no mask for recurrent layers."""
        return True

    def get_conv_state(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a state of a module that is not a recurrent layer."""
        raise ValueError(
            "a module other than the recurrent layers keeps its own state, which kvcore does not "
            "support; keep the model's own attention"
        )

    update_conv_state = get_recurrent_state = update_recurrent_state = get_conv_state

    def update_indexer(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse the keys of an indexer."""
        raise ValueError(
            "an indexer chooses and caches tokens for its layers, which kvcore does not support; "
            "keep the model's own attention"
        )

    def get_seq_length(self, *_: Any) -> int:
        """Return 0: a call has its own positions."""
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """Return only the new tokens: the model makes no mask from the result."""
        return query_length, 0

    def get_query_offset(self, *_: Any) -> int:
        """Return 0."""
        return 0
