# SPDX-License-Identifier: Apache-2.0
"""The arguments of one attention call other than q, k and v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers

__all__ = ["AttentionRule", "query_scales", "rule_of"]

# Arguments that some models pass and that do not change the attention.
_NOISE = frozenset(
    {
        "cache_position",
        "kvcore_batch",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "token_type_ids",
        "use_cache",
    }
)
_MEANT = frozenset({"is_causal", "s_aux", "sliding_window", "softcap"})
_KNOWN = _NOISE | _MEANT


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """The rule by which a layer attends.

    Attributes
    ----------
    scale : float, or None
        The factor of the products of q and k; None means ``head_dim ** -0.5``.
    window : int, or None
        Tokens that a token sees: itself and the ``window - 1`` tokens before it.
    chunk : int, or None
        Tokens of a chunk: a token sees itself and the earlier tokens of its own chunk.
    soft_cap : float, or None
        Scores become ``soft_cap * tanh(score / soft_cap)``.
    sinks : tensor [q_heads], or None
        A score for each head, which takes weight and has no value.
    """

    scale: float | None = None
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None


def rule_of(
    module: torch.nn.Module, scaling: float | None, dropout: float, kwargs: dict[str, Any]
) -> AttentionRule:
    """Read the arguments of an attention call.

    Raises
    ------
    ValueError
        Dropout, attention that is not causal, or an argument that kvcore does not support and that
        may change the result: a tensor or a number.
    """
    if dropout:
        raise ValueError(f"attention dropout is {dropout}, must be 0; call model.eval() first")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(
            f"{type(module).__name__} also attends to later tokens (is_causal=False), "
            f"kvcore's attention is causal; keep the model's own attention"
        )
    for name in kwargs.keys() - _KNOWN:
        _refuse_meaning(module, name, kwargs[name])
    window = kwargs["sliding_window"] if "sliding_window" in kwargs else config_window(module)
    cap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    own = None if sinks is None else sinks.detach()
    return AttentionRule(scaling, window, config_chunk(module), cap, own)


def config_chunk(module: torch.nn.Module) -> int | None:
    """Return the chunk of a layer from the config, because no model passes it."""
    config: Any = getattr(module, "config", None)
    types: Any = getattr(config, "layer_types", None) or ()
    if "chunked_attention" not in types or types[module.layer_idx] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)


def config_window(module: torch.nn.Module) -> int | None:
    """Return the window of a layer from the config, for a model that does not pass it."""
    config: Any = getattr(module, "config", None)
    window: int | None = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if window is None or types is None:
        return window
    return window if types[module.layer_idx] == "sliding_attention" else None


def _refuse_meaning(module: torch.nn.Module, name: str, value: Any) -> None:
    if value is None or isinstance(value, (bool, str)):
        return
    raise ValueError(
        f"{type(module).__name__} of transformers {transformers.__version__} passes {name} "
        f"({type(value).__name__}) to its attention, which kvcore does not support; "
        f"keep the model's own attention"
    )


def query_scales(module: Any, positions: torch.Tensor) -> torch.Tensor | None:
    """Return the missing factor of the queries of packed rows, [T, 1, 1], or None.

    Layers of Llama 4 without rope scale each query by its position, and use the position in the
    call. In a packed batch that is not the position in the row; the factor corrects the difference.
    """
    if getattr(module, "use_rope", True) or not getattr(module, "attn_temperature_tuning", False):
        return None
    taken = _temperature(module, torch.arange(len(positions), device=positions.device))
    return (_temperature(module, positions) / taken)[:, None, None]


def _temperature(module: Any, places: torch.Tensor) -> torch.Tensor:
    steps = torch.floor((places.float() + 1.0) / module.floor_scale)
    return torch.log1p(steps) * float(module.attn_scale) + 1.0
