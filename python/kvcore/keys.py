# SPDX-License-Identifier: Apache-2.0
"""Chained content keys of pages: their names outside of one process.

A key is SHA-256 of canonical CBOR, so that equal pages have equal keys in every process, on every
machine and in every language. Nothing here is needed to reuse pages within a manager.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from kvcore.context import ContextLike
from kvcore.groups import AttentionGroup, Bundle, State, bundles
from kvcore.layers.packing import row_widths
from kvcore.native.tree import SCHEME_VERSION, KeyChain, digest_of, page_key, page_keys, root_key
from kvcore.params import KVCacheParams, require_params

__all__ = [
    "SCHEME_VERSION",
    "KeyChain",
    "context_keys",
    "format_fingerprint",
    "page_key",
    "page_keys",
    "root_key",
]


def context_keys(
    context: ContextLike,
    page_size: int,
    *,
    seed: str | bytes | int | None = None,
    scheme: Literal["kvcore", "vllm"] = "kvcore",
) -> list[bytes]:
    """Return the keys of the complete pages of a request.

    Parameters
    ----------
    context : TextGenerationContext, or an object like it
        Its tokens up to ``end_idx``, ``extra_key``, ``cache_salt`` and ``extra_keys`` count.
    page_size : int
        Tokens per page.
    seed, scheme
        As of ``page_keys``.

    Returns
    -------
    list of bytes [32]

    Raises
    ------
    ValueError, TypeError
        As of ``page_keys``; no context.

    Notes
    -----
    Costs O(tokens). A ``KeyChain`` goes on from the tokens it has.

    Examples
    --------
    >>> from kvcore import TextGenerationContext
    >>> from kvcore.keys import context_keys, page_keys
    >>> context = TextGenerationContext("r1", [1, 2, 3, 4, 5], cache_salt="tenant")
    >>> context_keys(context, 2) == page_keys([1, 2, 3, 4], 2, cache_salt="tenant")
    True
    """
    if not hasattr(context, "tokens"):
        raise TypeError(f"context is a {type(context).__name__}, must be one: it has no tokens")
    tokens, extra_keys = context.tokens, getattr(context, "extra_keys", None)
    end = getattr(context, "end_idx", len(tokens))
    if end < len(tokens):  # contexts of other classes may have room behind what they hold
        tokens = tokens[:end]
        extra_keys = [key for key in extra_keys or () if key[0] < end]
    return page_keys(
        tokens,
        page_size,
        extra_key=getattr(context, "extra_key", None),
        cache_salt=getattr(context, "cache_salt", None),
        extra_keys=extra_keys,
        seed=seed,
        scheme=scheme,
    )


def format_fingerprint(params: KVCacheParams, model_id: str, *, layout: str = "NHD") -> bytes:
    """Return what tells the bytes of pages apart: whose pages a store may serve to whom.

    Parameters
    ----------
    params : KVCacheParams
        With groups or without. What changes no byte of a page on a device counts for nothing, such
        as the number of replicas.
    model_id : str
        Names the weights, and the revision of them.
    layout : str
        Names the order of the elements of a page.

    Returns
    -------
    bytes [32]
        The same in every process; another one where the model, dtype, page size, layers, heads,
        widths, windows, scales, tensor parallel devices, layout or ``SCHEME_VERSION`` differ.

    Raises
    ------
    TypeError
        No KVCacheParams, a name that is no str.

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
    """Return what a kind of group has beside what all have: its window or chunk."""
    common = {field.name for field in fields(AttentionGroup)}
    return [field.name for field in fields(group) if field.name not in common]


def _state(state: State) -> list[Any]:
    # "by name" is the order of their bytes, which once was the order in which they were given.
    arrays = [[name, list(shape), dtype] for name, (shape, dtype) in state.arrays.items()]
    return [list(state.layers), "by name", arrays]
