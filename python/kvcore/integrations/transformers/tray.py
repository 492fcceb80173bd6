# SPDX-License-Identifier: Apache-2.0
"""What the layers of a model hand to kvcore beside the arguments of their attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
import transformers
from transformers import Cache

__all__ = ["LayerTray", "Mix", "RunMixer"]


class RunMixer(Protocol):
    """Run a recurrent layer over rows of one length each, from the states of a cache."""

    def __call__(self, hidden: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Return [B, T, width] for `hidden` [B, T, width]; the cache has the states behind it."""


#: Takes a recurrent layer, what comes in [1, T, width], and how to run it; returns what goes out.
Mix = Callable[[Any, torch.Tensor, RunMixer], torch.Tensor]


class LayerTray(Cache):
    """Take from each layer what it would put into a cache, for the call that follows.

    A packed batch passes it as the model's cache. Its ``update`` is the only place that sees
    latents and, of an attention that several layers share, which one runs. What it is given it
    hands back: the new tokens.

    Parameters
    ----------
    mix : Mix
        Runs recurrent layers; ``kvcore.integrations.transformers.mixers`` leads them here.
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
        """Keep latent and rope part until the attention call, and return them."""
        self._held = key_states, value_states
        self._layer = layer_idx
        return key_states, value_states

    def take(self) -> torch.Tensor:
        """Hand out the rows [T, 1, rank + rope_dim] of the layer that runs.

        Raises
        ------
        ValueError
            The layer handed over none.
        """
        if self._held is None:
            raise ValueError(
                f"the model of transformers {transformers.__version__} has not handed its latents "
                f"to its cache; versions from 5.15.1 on do, and pass model_inputs() whole"
            )
        latent, rope = self._held
        self._held = None
        return torch.cat((latent, rope), dim=-1)[0].transpose(0, 1)

    def layer_of(self, module: Any) -> int:
        """Return the layer whose attention runs; one that layers share has no number of its own."""
        own: int | None = module.layer_idx
        if own is not None and own >= 0:
            return own
        if self._layer is None:
            raise ValueError(
                f"{type(module).__name__} of transformers {transformers.__version__} does not say "
                f"which layer it runs for; pass model_inputs() whole"
            )
        return self._layer

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        """Return True: no mask is made for recurrent layers."""
        return True

    def get_conv_state(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a state that is not one of a recurrent layer's."""
        raise ValueError(
            "a module beside the recurrent layers keeps a state of its own, which kvcore does not "
            "know; keep the model's own attention"
        )

    update_conv_state = get_recurrent_state = update_recurrent_state = get_conv_state

    def update_indexer(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse keys of an indexer."""
        raise ValueError(
            "an indexer chooses tokens for its layers, and caches them, which kvcore does not; "
            "keep the model's own attention"
        )

    def get_seq_length(self, *_: Any) -> int:
        """Return 0: a call brings its own positions."""
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """Return the new tokens alone: no mask is made of it."""
        return query_length, 0

    def get_query_offset(self, *_: Any) -> int:
        """Return 0."""
        return 0
