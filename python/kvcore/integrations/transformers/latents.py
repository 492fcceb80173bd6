# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: one row per token in the pages, expanded never.

A query times the expanded key is the query times the expanding matrix, times the latent; so the
matrix goes to the query, and that of the values to the result (arXiv:2405.04434, 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import Cache

__all__ = ["LatentLayer", "LatentTray", "keeps_latents"]


def keeps_latents(module: torch.nn.Module) -> bool:
    """Tell whether a layer hands its latents to the cache before it expands them."""
    return hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")


class LatentTray(Cache):
    """Take the latents of a step from each layer, for the attention call that follows.

    A packed batch passes it as ``past_key_values``, whose ``update`` is the only place that sees
    latents. What it is given it hands back: the new tokens.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep latent and rope part until the attention call, and return them."""
        self._held = key_states, value_states
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
                f"to past_key_values; versions from 5.15.1 on do, and pass model_inputs() whole"
            )
        latent, rope = self._held
        self._held = None
        return torch.cat((latent, rope), dim=-1)[0].transpose(0, 1)

    def get_seq_length(self, *_: Any) -> int:
        """Return 0: a call brings its own positions."""
        return 0

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """Return the new tokens alone: no mask is made of it."""
        return query_length, 0

    def get_query_offset(self, *_: Any) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """Hold one layer's expanding matrices.

    Attributes
    ----------
    to_keys : tensor [heads, nope_dim, rank]
    to_values : tensor [heads, rank, v_head_dim]
    """

    to_keys: torch.Tensor
    to_values: torch.Tensor

    @classmethod
    def of(cls, module: Any) -> LatentLayer:
        """View the matrices of an attention module.

        Raises
        ------
        ValueError
            ``kv_b_proj`` is no plain linear layer, such as a quantised one.
        """
        weight: Any = getattr(module.kv_b_proj, "weight", None)
        nope, width = module.qk_nope_head_dim, module.qk_nope_head_dim + module.v_head_dim
        shape = (module.num_heads * width, module.kv_lora_rank)
        plain = isinstance(weight, torch.Tensor) and weight.is_floating_point()
        if not plain or tuple(weight.shape) != shape or module.kv_b_proj.bias is not None:
            raise ValueError(
                f"kv_b_proj of {type(module).__name__} is a {type(module.kv_b_proj).__name__}, "
                f"must be a Linear without bias of shape {shape}; keep the model's own attention"
            )
        both = weight.detach().view(module.num_heads, width, module.kv_lora_rank)
        return cls(both[:, :nope], both[:, nope:].transpose(1, 2))

    def query(self, query: torch.Tensor) -> torch.Tensor:
        """Turn queries [heads, T, nope + rope_dim] to latent ones [T, heads, rank + rope_dim]."""
        nope = self.to_keys.shape[1]
        latent = torch.bmm(query[..., :nope], self.to_keys)
        return torch.cat((latent, query[..., nope:]), dim=-1).transpose(0, 1)

    def values(self, out: torch.Tensor) -> torch.Tensor:
        """Turn attended latents [T, heads, rank] to values [T, heads, v_head_dim]."""
        return torch.bmm(out.transpose(0, 1), self.to_values).transpose(0, 1)
