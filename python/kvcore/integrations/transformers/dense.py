# SPDX-License-Identifier: Apache-2.0
"""Attention over the k and v of the call itself, for calls without a packed batch."""

from __future__ import annotations

import torch

from kvcore.integrations.transformers.rules import AttentionRule

__all__ = ["dense_attention"]


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    rule: AttentionRule,
) -> torch.Tensor:
    """Attend causally; the last query and the last key have the same position.

    Parameters
    ----------
    query : tensor [B, q_heads, T, head_dim]
    key, value : tensor [B, heads, S, head_dim] and [B, heads, S, v_head_dim]
    mask : bool tensor [B, S], bool or float tensor [B, 1, T, S], or None
        [B, S] is the padding. [B, 1, T, S] is the full mask: `rule` adds no window and no chunks.
    rule : AttentionRule

    Returns
    -------
    tensor [B, T, q_heads, v_head_dim]
        Rows that see no token are zeros.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    scores = torch.matmul(query, key.transpose(2, 3)).float() * scale
    if rule.soft_cap is not None:
        scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
    scores = scores + _bias(scores, mask, rule)
    weights = _softmax(scores, rule.sinks).to(value.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


def _bias(scores: torch.Tensor, mask: torch.Tensor | None, rule: AttentionRule) -> torch.Tensor:
    """Return the tensor to add to the scores: 0 for visible tokens, -inf for the others."""
    if mask is not None and mask.ndim == 4 and mask.dtype != torch.bool:
        return mask[..., : scores.shape[-1]]
    if mask is not None and mask.ndim == 4:
        seen = mask[..., : scores.shape[-1]]
    else:
        seen = _causal(scores, rule)
        if mask is not None:
            seen = seen & mask[:, None, None, :].bool()
    return torch.zeros_like(scores[:1, :1]).masked_fill(~seen, -torch.inf)


def _causal(scores: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    queries, keys = scores.shape[-2:]
    keys_at = torch.arange(keys, device=scores.device)
    queries_at = keys_at[keys - queries :, None]
    seen = queries_at >= keys_at
    if rule.window is not None:
        seen = seen & (queries_at - keys_at < rule.window)
    if rule.chunk is not None:  # without a mask, key 0 is token 0
        seen = seen & (queries_at // rule.chunk == keys_at // rule.chunk)
    return seen


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return weights if sinks is None else weights[..., :-1]
