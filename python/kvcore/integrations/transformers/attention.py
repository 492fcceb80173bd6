# SPDX-License-Identifier: Apache-2.0
"""The attention implementation "kvcore" of transformers."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvcore.integrations.transformers.dense import dense_attention
from kvcore.integrations.transformers.rules import rule_of

__all__ = ["MASK_WINDOWS", "NAME", "attention_forward", "padding_mask", "register"]

NAME = "kvcore"

#: If set, collects the windows and chunk sizes of the masks that a model asks for.
MASK_WINDOWS: ContextVar[set[int] | None] = ContextVar("MASK_WINDOWS", default=None)


def register() -> None:
    """Register "kvcore" for ``attn_implementation=`` and ``model.set_attn_implementation``."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, padding_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend for one layer of a model, with the signature that transformers calls.

    If the model is called with ``kvcore_batch=``, the new k and v go into their pages and the
    queries attend over all pages of their rows. Otherwise they attend over the k and v of the call.

    Parameters
    ----------
    module : Module
        The layer's attention: its ``layer_idx`` names the layer of the pool.
    query, key, value : tensor [1, heads, T, head_dim]
        T new tokens of all rows of a packed batch; [B, heads, T or S, head_dim] without a batch.
    attention_mask : tensor, optional
        None for a packed batch: its pages define the tokens that a query sees.
    scaling, dropout, **kwargs
        As the model passes them.

    Returns
    -------
    out : tensor [1 or B, T, q_heads, v_head_dim]
    weights : None

    Raises
    ------
    ValueError
        A mask in a packed batch, or an argument in `kwargs` that kvcore does not support.
    """
    rule = rule_of(module, scaling, dropout, kwargs)
    batch = kwargs.get("kvcore_batch")
    if batch is None:
        return dense_attention(query, key, value, attention_mask, rule), None
    if attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} passes an attention mask of its own, which a packed batch "
            f"cannot apply; keep the model's own attention"
        )
    return batch.attend(module, query, key, value, rule), None


def padding_mask(
    *_: Any,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: Any = None,
    device: torch.device | None = None,
    **__: Any,
) -> torch.Tensor | None:
    """Return the caller's padding mask: ``attention_forward`` itself adds the causal mask.

    A row's chunks begin after its padding. So layers with chunks get the full mask if there is
    padding, or if the keys do not begin with the first token.

    Raises
    ------
    ValueError
        The model needs more than causal attention: tokens of an image that see each other, rows
        packed by their positions, or its own masks. Or the last query and the last key have
        different positions, as with a static cache.
    """
    if not allow_is_causal_skip:
        raise ValueError(
            "the model asks for an attention mask of its own, beyond causal and padding, which "
            "kvcore's attention cannot apply; keep the model's own attention"
        )
    windows = MASK_WINDOWS.get()
    if windows is not None and local_size is not None:
        windows.add(local_size)
    if int(q_offset) + q_length != kv_offset + kv_length:
        raise ValueError(
            f"the keys end at {kv_offset + kv_length}, the queries at {int(q_offset) + q_length}, "
            f"must be the same for kvcore's attention; use a dynamic cache"
        )
    padding = None
    if attention_mask is not None:
        padding = attention_mask[:, kv_offset : kv_offset + kv_length]
    is_chunked = local_size is not None and _has_chunks(config)
    if mask_function is None or not is_chunked or (padding is None and kv_offset == 0):
        return padding
    queries = int(q_offset) + torch.arange(q_length, device=device)[:, None]
    rows = torch.arange(1 if padding is None else len(padding), device=device)
    keys = kv_offset + torch.arange(kv_length, device=device)
    seen: torch.Tensor = mask_function(rows[:, None, None, None], 0, queries, keys)
    return seen if padding is None else seen & padding[:, None, None, :].bool()


def _has_chunks(config: Any) -> bool:
    return "chunked_attention" in (getattr(config, "layer_types", None) or ())
