# SPDX-License-Identifier: Apache-2.0
"""Chained content keys of pages: the names of pages outside of one process.

A key is SHA-256 of canonical CBOR, so equal pages have equal keys in every process, on every
machine and in every language. A manager does not need these keys to reuse its own pages.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from kvcore.context import ContextLike
from kvcore.groups import AttentionGroup, Bundle, State, bundles
from kvcore.layers.packing import row_widths
from kvcore.native.tree import SCHEME_VERSION, KeyChain, digest_of, page_key, page_keys, root_key
from kvcore.params import KVCacheParams, require_params
from kvcore.support.arguments import renamed

__all__ = [
    "SCHEME_VERSION",
    "KeyChain",
    "context_keys",
    "format_fingerprint",
    "page_key",
    "page_keys",
    "root_key",
]


@renamed(context="ctx")
def context_keys(
    ctx: ContextLike,
    page_size: int,
    *,
    seed: str | bytes | int | None = None,
    scheme: Literal["kvcore", "vllm"] = "kvcore",
) -> list[bytes]:
    """Return the keys of the complete pages of a request.

    Parameters
    ----------
    ctx : TextGenerationContext, or an object like it
        The keys depend on its tokens up to ``end_idx``, its ``extra_key``, ``cache_salt`` and
        ``extra_keys``.
    page_size : int
        Tokens per page.
    seed, scheme
        As in ``page_keys``.

    Returns
    -------
    list of bytes [32]

    Raises
    ------
    ValueError, TypeError
        As in ``page_keys``; or `ctx` is not a context.

    Notes
    -----
    Cost: O(tokens). A ``KeyChain`` computes only the keys of new tokens.

    Examples
    --------
    >>> from kvcore import TextGenerationContext
    >>> from kvcore.keys import context_keys, page_keys
    >>> context = TextGenerationContext("r1", [1, 2, 3, 4, 5], cache_salt="tenant")
    >>> context_keys(context, 2) == page_keys([1, 2, 3, 4], 2, cache_salt="tenant")
    True
    """
    if not hasattr(ctx, "tokens"):
        raise TypeError(f"ctx is a {type(ctx).__name__}, must have tokens")
    tokens, extra_keys = ctx.tokens, getattr(ctx, "extra_keys", None)
    end = getattr(ctx, "end_idx", len(tokens))
    if end < len(tokens):  # the arrays of other context classes may be longer than their tokens
        tokens = tokens[:end]
        extra_keys = [key for key in extra_keys or () if key[0] < end]
    return page_keys(
        tokens,
        page_size,
        extra_key=getattr(ctx, "extra_key", None),
        cache_salt=getattr(ctx, "cache_salt", None),
        extra_keys=extra_keys,
        seed=seed,
        scheme=scheme,
    )


def format_fingerprint(params: KVCacheParams, model_id: str, *, layout: str = "NHD") -> bytes:
    """Return a fingerprint of the page format; with equal fingerprints, managers can share pages.

    Parameters
    ----------
    params : KVCacheParams
        Params with or without groups. Settings that change no byte of a device's pages do not
        change the fingerprint, for example the number of replicas.
    model_id : str
        The name of the weights and of their revision.
    layout : str
        The name of the order of a page's elements.

    Returns
    -------
    bytes [32]
        The fingerprint is the same in every process. It changes with the model, dtype, page size,
        layers, heads, widths, windows, scales, tensor parallel devices, layout and
        ``SCHEME_VERSION``.

    Raises
    ------
    TypeError
        `params` is not a KVCacheParams, or a name is not a str.

    Examples
    --------
    >>> from kvcore import KVCacheParams
    >>> from kvcore.keys import format_fingerprint
    >>> params = KVCacheParams("bfloat16", n_kv_heads=8, head_dim=128, num_layers=32, page_size=16)
    >>> format_fingerprint(params, "meta-llama/Llama-3.1-8B@0e9e39f").hex()[:16]
    'f3b220d25936849a'
    """
    require_params(params)
    for name, value in (("model_id", model_id), ("layout", layout)):
        if not isinstance(value, str):
            raise TypeError(f"{name} is a {type(value).__name__}, must be a str")
    return digest_of(
        [
            "kvcore format",
            SCHEME_VERSION,
            model_id,
            layout,
            params.dtype,
            params.page_size,
            params.num_layers,
            params.layers_per_page,
            params.kv_dim,
            params.tensor_parallel_degree,
            params.kv_scale_granularity,
            [_bundle(params, bundle) for bundle in bundles(params)],
            [_state(state) for state in params.state_groups],
        ]
    )


def _bundle(params: KVCacheParams, bundle: Bundle) -> list[Any]:
    group = bundle.group
    heads = 1 if params.is_mla else group.n_kv_heads or params.n_kv_heads
    return [
        type(group).__name__,
        *(getattr(group, name) for name in _own_fields(group)),
        list(bundle.layers),
        bundle.page_size,
        heads,
        list(row_widths(params, group)),
    ]


def _own_fields(group: AttentionGroup) -> list[str]:
    """Return the fields that only this class of group has: its window or chunk."""
    common = {field.name for field in fields(AttentionGroup)}
    return [field.name for field in fields(group) if field.name not in common]


def _state(state: State) -> list[Any]:
    # "by name": the arrays are ordered by name. Earlier versions kept the order of the params.
    arrays = [[name, list(shape), dtype] for name, (shape, dtype) in state.arrays.items()]
    return [list(state.layers), "by name", arrays]
