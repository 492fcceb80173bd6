# SPDX-License-Identifier: Apache-2.0
"""Attend over the pages of a batch, and merge partial results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, SupportsIndex

import numpy as np

from kvcore.backends.arrays import host_array
from kvcore.backends.host import HOST
from kvcore.backends.protocol import AttentionRequest, Place
from kvcore.backends.selection import any_array
from kvcore.native.contexts import RaggedKVCacheInputs, call_array_viewer
from kvcore.ops.batch import LayerPools, PagedBatch, layer_pools
from kvcore.ops.layer_pools import place_of_layer
from kvcore.ops.nvfp4_calls import global_scales_of
from kvcore.ops.options import Options, array_at, documents_options, offsets_at
from kvcore.results import SharedPrefix
from kvcore.support.arguments import flag, integer, pair_of

__all__ = ["attention", "cascade_attention", "merge_states"]

# Types of queries and of result arrays. No array is kept after the call returns.
_host_view = call_array_viewer(host_array)


@documents_options
def attention(
    inputs: RaggedKVCacheInputs | PagedBatch,
    layer: SupportsIndex,
    q: Any,
    row_offsets: Any,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: SupportsIndex | None = None,
    chunk: SupportsIndex | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    return_lse: bool = False,
    out: Any = None,
    v_head_dim: SupportsIndex | None = None,
    splits: SupportsIndex | None = None,
    scratch: Any = None,
    stream: Any = None,
    threads: int = 1,
) -> Any:
    """Attend over the cached and the new tokens of each row, without copying their pages.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
        The inputs that ``fetch`` returned, or the caller's own pools. The K and V of this step are
        already in their pages (``append``).
    layer : int
    q : array float32, float16 or bfloat16 [tokens, q_heads, head_dim]
        An array of any DLPack library, on the pool's device. All axes but the last may be strided,
        as in a fused QKV. ``q_heads`` is a multiple of the pool's heads; head h reads K and V of
        head ``h // (q_heads // heads)``.
    row_offsets : integers [B + 1]
        Row b's new tokens are ``row_offsets[b] .. row_offsets[b + 1]``; token j of the row has
        position ``cache_lengths[b] + j``.
    scale : float, optional
        Factor of the products of q and K; ``head_dim ** -0.5`` by default. For MLA pass the scale
        of the model.
    causal : bool
        Whether a token sees only itself and the earlier tokens of its row.
    window : int, optional
        Number of tokens that a token sees: itself and the ``window - 1`` before it. Without
        `causal` a token also sees all later tokens.
    chunk : int, optional
        Tokens of a chunk, as in Llama 4: the token at position p sees the tokens from
        ``p // chunk * chunk`` on. Without `causal` it also sees the later tokens of its chunk. With
        a window and chunks, a token sees the tokens that both allow. By default window and chunk
        are those of the layer's group, if the manager has groups. For a layer of a group they may
        only be narrower, and `chunk` must divide the group's chunk.
    soft_cap : float, optional
        Scores become ``soft_cap * tanh(score / soft_cap)``.
    sinks : array float32, float16 or bfloat16 [q_heads], optional
        One extra score per head, which takes weight and has no value.
    return_lse : bool
        Whether to also return the logarithms of the sums of exponentials.
    out : array [tokens, q_heads, v_head_dim], optional
        Array for the result, in q's dtype, with a contiguous last axis. With `return_lse` it may
        also be a pair: this array, and an array for the logarithms, float32 [tokens, q_heads] in C
        order.
    v_head_dim : int, optional
        Number of leading elements of a value to use; all by default. DeepSeek's latent rows of 576
        elements have values of 512.
    splits : int, optional
        On GPUs: into how many parts, up to 64, a row's tokens are divided; the parts are read in
        parallel. By default as many as the GPU can run at once, if rows have room for enough
        tokens. The same number of splits gives the same bytes.
    scratch : array float32, optional
        On GPUs: memory for the results of the splits; see ``attention_scratch``.

    Returns
    -------
    o : array [tokens, q_heads, v_head_dim]
        In q's dtype and library, or `out`. Zeros for a token that sees nothing.
    lse : array float32 [tokens, q_heads]
        With `return_lse`: natural logarithms, sinks included; -inf for a token that sees nothing.
        In q's library, or the second array of `out`.

    Raises
    ------
    IndexError
        A layer that does not exist, or a position without a page that a token of its row sees.
    ValueError
        Shapes that do not fit, a window or chunk below 1 or wider than the layer keeps, a soft cap
        that is not above 0, a scale or sink that is not finite, an `out` that is read-only or
        overlaps an input, a pair whose arrays overlap.
    TypeError
        A wrong dtype; a pair as `out` without `return_lse`.
    KVCacheError
        Arrays on a GPU without Triton: "attention on GPUs unavailable: " and the reason.

    Notes
    -----
    All arguments are checked before `out` is written. Scores, weights and sums are float32, and the
    result is the same for every number of threads. The call reads the K and V that a row's tokens
    see once; if many query heads share them, the multiplications take longer than the reads. K and
    V that no token of a row sees are not read, and their table entries are not looked up: these
    entries may hold any value, as the entries before a window.

    On a GPU weights have the dtype of `q`. Arrays on the GPU are not read back for checks: a
    position without a page is skipped, and rows may end before `q` does; the rest of the output is
    not written. The call allocates nothing if `out` is given (a pair with `return_lse`), and
    `scratch` if there are splits.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import PagedBatch, ops
    >>> pool = np.arange(6, dtype=np.float32).reshape(3, 1, 1, 2)  # three pages of a token
    >>> table, cached = np.array([[2, 0]], np.uint32), np.array([1], np.uint32)
    >>> ops.attention(PagedBatch(pool, pool, table, cached), 0, np.zeros((1, 1, 2), np.float32),
    ...               np.array([0, 1], np.uint32)).tolist()
    [[[2.0, 3.0]]]
    """
    rule = scale, causal, window, chunk, soft_cap, sinks
    results = v_head_dim, return_lse, out
    gpu = stream, splits, scratch
    return _attend(inputs, layer, q, row_offsets, rule, ((), 0), results, gpu, threads)


def cascade_attention(
    inputs: RaggedKVCacheInputs | PagedBatch,
    layer: SupportsIndex,
    q: Any,
    row_offsets: Any,
    shared: Sequence[SharedPrefix],
    *,
    replica: SupportsIndex = 0,
    scale: float | None = None,
    causal: bool = True,
    window: SupportsIndex | None = None,
    chunk: SupportsIndex | None = None,
    soft_cap: float | None = None,
    sinks: Any = None,
    return_lse: bool = False,
    out: Any = None,
    v_head_dim: SupportsIndex | None = None,
    splits: SupportsIndex | None = None,
    scratch: Any = None,
    stream: Any = None,
    threads: int = 1,
) -> Any:
    """Attend as ``attention`` does, and read pages that rows share once for all of these rows.

    Parameters
    ----------
    inputs, layer, q, row_offsets
        As for ``attention``.
    shared : sequence of SharedPrefix
        The result of ``manager.shared_prefixes(batch)`` after the ``fetch`` of `inputs`. A group
        may contain another group.
    replica : int
        The replica of `inputs`; groups of other replicas are ignored.
    scale, causal, window, chunk, soft_cap, sinks, return_lse, out, v_head_dim
    splits, scratch, stream, threads
        As for ``attention``.

    Returns
    -------
    o, lse
        As ``attention`` returns them, except for the rounding of float32 sums.

    Raises
    ------
    IndexError
        Row indices that the batch does not have or that do not ascend; as for ``attention``.
    ValueError
        Rows of a group whose tables name different pages for the shared tokens, more shared tokens
        than a row has cached, groups that overlap without containing each other; as for
        ``attention``.
    TypeError
        Groups that are not SharedPrefix; as for ``attention``.

    Notes
    -----
    The check of the groups compares their rows of the table. With a window or chunks, rows share
    only the tokens that all of them see: the shortest row of a group reads these tokens for the
    others.
    """
    rule = scale, causal, window, chunk, soft_cap, sinks
    results = v_head_dim, return_lse, out
    gpu = stream, splits, scratch
    return _attend(inputs, layer, q, row_offsets, rule, (shared, replica), results, gpu, threads)


@documents_options
def merge_states(
    o_a: Any,
    lse_a: Any,
    o_b: Any,
    lse_b: Any,
    *,
    out: tuple[Any, Any] | None = None,
    stream: Any = None,
    threads: int = 1,
) -> tuple[Any, Any]:
    """Merge two partial attentions over different keys into one attention over all keys.

    Parameters
    ----------
    o_a, o_b : array float32, float16 or bfloat16 [..., v_head_dim]
        Results; an array that is not in C order is copied first.
    lse_a, lse_b : array float32 [...]
        Natural logarithms of their sums of exponentials; -inf or +inf marks an empty result, whose
        elements are ignored.
    out : (array, array), optional
        Arrays for the result and the logarithms, in C order: separate arrays, or ``(o_a, lse_a)``.

    Returns
    -------
    o : array [..., v_head_dim]
    lse : array float32 [...]
        In the library of `o_a`, or `out`. Two empty results give zeros and -inf.

    Raises
    ------
    ValueError
        Shapes that differ, an `out` that is read-only, strided or overlaps in another way.
    TypeError
        A wrong dtype.

    Notes
    -----
    Reads both results and writes the merged result once.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore import ops
    >>> one, two = np.float32([[0.0]]), np.float32([[4.0]])
    >>> o, lse = ops.merge_states(one, np.float32([0.0]), two, np.log(np.float32([3.0])))
    >>> o.tolist(), np.exp(lse).round(4).tolist()
    ([[3.0]], [4.0])
    """
    names = ("o_a", "lse_a", "o_b", "lse_b")
    given = {n: any_array(x, n) for n, x in zip(names, (o_a, lse_a, o_b, lse_b), strict=True)}
    options = Options(stream, threads, out)
    place = options.place(given)
    states = [place.contiguous(array) for array in given.values()]
    if out is None:
        targets = [place.empty(array.shape, array.dtype) for array in states[:2]]
    else:
        both = pair_of("out", out)
        targets = [array_at(place, array, f"out[{i}]") for i, array in enumerate(both)]
    place.kernels.merge_states(*states, *targets, *place.launch_args(options.threads))
    return options.result(place, o_a, *targets)  # type: ignore[no-any-return]


def _limited(pools: LayerPools, layer: SupportsIndex, window: Any, chunk: Any) -> tuple[Any, Any]:
    """Return window and chunk within the tokens that the layer's group keeps."""
    if pools.window is not None:
        window = pools.window if window is None else integer("window", window)
        if window > pools.window:
            raise ValueError(
                f"window is {window}, layer {layer} keeps {pools.window} tokens; pass a window "
                f"up to that, or None"
            )
    if pools.chunk is not None:
        chunk = pools.chunk if chunk is None else integer("chunk", chunk)
        if chunk > 0 and pools.chunk % chunk:
            raise ValueError(
                f"chunk is {chunk}, layer {layer} keeps chunks of {pools.chunk} tokens; pass a "
                f"chunk that divides them, or None"
            )
    return window, chunk


def _small(place: Place, given: Any, name: str) -> Any:
    """Return a small array, which may come from the host, as a view on the call's device."""
    if place is HOST:
        return host_array(given, name)
    array = any_array(given, name)
    return array if isinstance(array, np.ndarray) else place.checked(array, name)


def _attend(
    inputs: RaggedKVCacheInputs | PagedBatch,
    layer: SupportsIndex,
    q: Any,
    row_offsets: Any,
    rule: tuple[Any, ...],
    groups: tuple[Any, Any],
    results: tuple[Any, Any, Any],
    gpu: tuple[Any, Any, Any],
    threads: int,
) -> Any:
    pools = layer_pools(inputs, layer)
    scale, causal, window, chunk, soft_cap, sinks = rule
    v_head_dim, return_lse, out = results
    stream, splits, scratch = gpu
    given, given_lse = out, None
    if isinstance(out, tuple | list):
        given, given_lse = _pair_of_targets(out, return_lse)
    place = place_of_layer(pools, stream, (), (q, row_offsets, sinks, given, given_lse, scratch))
    see = _host_view if place is HOST else partial(array_at, place)
    if pools.window is not None or pools.chunk is not None:
        window, chunk = _limited(pools, layer, window, chunk)
    request = AttentionRequest(
        pools.parts,
        None if pools.global_scales is None else global_scales_of(pools, place),
        v_head_dim,
        (pools.lookup_table, pools.cache_lengths, offsets_at(place, row_offsets)),
        see(q, "q"),
        (
            scale,
            causal,
            window,
            chunk,
            soft_cap,
            None if sinks is None else _small(place, sinks, "sinks"),
        ),
        groups,
        None if given is None else see(given, "out"),
        None if given_lse is None else see(given_lse, "out[1]"),
        return_lse,
        threads,
        splits,
        None if scratch is None or place is HOST else see(scratch, "scratch"),
    )
    o, lse = place.attention(request)
    result = place.in_library_of(q, o) if given is None else given
    if lse is None:
        return result
    return result, place.in_library_of(q, lse) if given_lse is None else given_lse


def _pair_of_targets(out: tuple[Any, ...] | list[Any], return_lse: Any) -> tuple[Any, Any]:
    """Return the caller's arrays for the result and for the logarithms."""
    if not flag("return_lse", return_lse):
        raise TypeError(
            f"out is a {type(out).__name__}, must be an array; a pair of arrays needs "
            f"return_lse=True"
        )
    pair = pair_of("out", out)
    for i, array in enumerate(pair):
        if array is None:
            raise TypeError(f"out[{i}] is None, must be an array; or pass no pair")
    return pair
