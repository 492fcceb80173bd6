# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention: the pages hold one latent row per token, which is never expanded.

A query times the expanded key is the query times the expanding matrix, times the latent. So the
keys' matrix is applied to the query, and the values' matrix to the result (arXiv:2405.04434,
2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["LatentLayer", "keeps_latents"]


def keeps_latents(module: torch.nn.Module) -> bool:
    """Return true if a layer passes its latents to the cache before it expands them."""
    return hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """The expanding matrices of one layer.

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
            ``kv_b_proj`` is no plain linear layer, for example a quantised layer.
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
        """Turn queries [heads, T, nope + rope_dim] to latents [T, heads, rank + rope_dim]."""
        nope = self.to_keys.shape[1]
        latent = torch.bmm(query[..., :nope], self.to_keys)
        return torch.cat((latent, query[..., nope:]), dim=-1).transpose(0, 1)

    def values(self, out: torch.Tensor) -> torch.Tensor:
        """Turn attended latents [T, heads, rank] to values [T, heads, v_head_dim]."""
        return torch.bmm(out.transpose(0, 1), self.to_values).transpose(0, 1)
