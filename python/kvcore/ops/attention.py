# SPDX-License-Identifier: Apache-2.0
"""Attention over the pages of a batch, and the merge of partial results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from kvcore.backends.arrays import host_array
from kvcore.backends.host import HOST
from kvcore.backends.protocol import AttentionRequest, Place
from kvcore.backends.selection import any_array
from kvcore.native.contexts import RaggedKVCacheInputs, call_array_viewer
from kvcore.ops.batch import LayerPools, PagedBatch, layer_pools
from kvcore.ops.nvfp4_calls import global_scales_of
from kvcore.ops.options import Options, array_at, documents_options, offsets_at
from kvcore.results import SharedPrefix
from kvcore.support.arguments import flag, integer, pair_of

__all__ = ["attention", "cascade_attention", "merge_states"]

# Of queries, and of arrays for results: nothing keeps those behind a call.
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
    """Attend over the cached and the new tokens of each row, where they lie.

    Parameters
    ----------
    inputs : RaggedKVCacheInputs or PagedBatch
        What ``fetch`` handed out, or the caller's own pools. K and V of this step are in their
        pages already (``append``).
    layer : int
    q : array float32, float16 or bfloat16 [tokens, q_heads, head_dim]
        Of any library with DLPack, where the pool is; axes but the last may be strided, as those of
        a fused QKV are. ``q_heads`` is a multiple of the pool's heads; head h reads K and V of head
        ``h // (q_heads // heads)``.
    row_offsets : integers [B + 1]
        Row b's new tokens are ``row_offsets[b] .. row_offsets[b + 1]``; the j-th stands at position
        ``cache_lengths[b] + j``.
    scale : float, optional
        Of the products of q and K; ``head_dim ** -0.5`` by default. For MLA pass the model's own.
    causal : bool
        Whether a token sees only itself and what stands before it in its row.
    window : int, optional
        Tokens that a token sees: itself and the ``window - 1`` before it; without `causal` also
        what stands behind it.
    chunk : int, optional
        Tokens of a chunk, as Llama 4 has them: the token at position p sees those from
        ``p // chunk * chunk`` on. Without `causal` also what stands behind it in its chunk. With
        a window it sees what both let it see. Window and chunk are by default those of the layer's
        group, where the manager has groups; there they may only be narrower, and a chunk one that
        divides the group's.
    soft_cap : float, optional
        Scores become ``soft_cap * tanh(score / soft_cap)``.
    sinks : array float32, float16 or bfloat16 [q_heads], optional
        A score of each head that takes weight and has no value.
    return_lse : bool
        Whether to return the logarithms of the sums of exponentials as well.
    out : array [tokens, q_heads, v_head_dim], optional
        Where the result goes: of q's dtype, last axis contiguous. With `return_lse` also a pair:
        this array, and one for the logarithms, float32 [tokens, q_heads] in C order.
    v_head_dim : int, optional
        Elements of a value to use, the first ones; all by default. DeepSeek's latent rows of 576
        elements have values of 512.
    splits : int, optional
        On GPUs: parts of up to 64 that the tokens of a row are read in side by side. By default as
        many as the GPU has room for, if rows have room for enough tokens. The same number gives the
        same bytes.
    scratch : array float32, optional
        On GPUs: memory for the results of splits; see ``attention_scratch``.

    Returns
    -------
    o : array [tokens, q_heads, v_head_dim]
        In q's dtype and library, or `out`. Zeros for a token that sees nothing.
    lse : array float32 [tokens, q_heads]
        With `return_lse`: natural logarithms, sinks included; -inf for a token that sees nothing.
        In q's library, or the second one of `out`.

    Raises
    ------
    IndexError
        A layer that does not exist, or a position without a page that a token of its row sees.
    ValueError
        Shapes that do not fit, a window or chunk below 1 or wider than the layer keeps, a soft cap
        that is not above 0, a scale or sink that is not finite, an `out` that is read-only or
        overlaps what is read, a pair whose arrays overlap.
    TypeError
        Another dtype; a pair as `out` without `return_lse`.
    KVCacheError
        Arrays on a GPU, and no Triton: "attention on GPUs unavailable: " and why.

    Notes
    -----
    Everything is checked before `out` is written. Scores, weights and sums are float32, and the
    result is the same for every number of threads. On a GPU weights have the dtype of `q`, what
    lies there is not read back to be checked, a position without a page is skipped, and rows may
    end before `q` does: what is behind them is not written. With `out`, a pair where there are
    logarithms, and `scratch`, where there are splits, nothing is allocated there. Costs reading the
    K and V that a row's tokens see once or, where many query heads share them, their
    multiplications. What no token of a row sees is neither read nor looked up: there the table may
    hold anything, as behind a window.

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
    options = Options(stream, threads, out)
    rule = _Rule(scale, causal, window, chunk, soft_cap, sinks)
    wanted = _Wanted(v_head_dim, return_lse, splits, scratch)
    return _attend(inputs, layer, q, row_offsets, rule, ((), 0), wanted, options)


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
    """Attend as ``attention`` does, reading what rows share once for all of them.

    Parameters
    ----------
    inputs, layer, q, row_offsets
        As for ``attention``.
    shared : sequence of SharedPrefix
        What ``manager.shared_prefixes(batch)`` returns after the ``fetch`` of `inputs`. Groups may
        lie in each other.
    replica : int
        The replica that `inputs` are of: groups of others are left out.
    scale, causal, window, chunk, soft_cap, sinks, return_lse, out, v_head_dim
    splits, scratch, stream, threads
        As for ``attention``.

    Returns
    -------
    o, lse
        As ``attention`` returns them, but for the rounding of float32 sums.

    Raises
    ------
    IndexError
        Rows that the batch does not have or that are not ascending; as for ``attention``.
    ValueError
        Rows whose tables name different pages for what they see, tokens that a row has not cached,
        groups that overlap without one lying in the other; as for ``attention``.
    TypeError
        Groups that are no SharedPrefix; as for ``attention``.

    Notes
    -----
    Checking the groups costs comparing their rows of the table. With a window or chunks, rows share
    what both of them see: the row that is not as long reads it for the others.
    """
    options = Options(stream, threads, out)
    rule = _Rule(scale, causal, window, chunk, soft_cap, sinks)
    wanted = _Wanted(v_head_dim, return_lse, splits, scratch)
    return _attend(inputs, layer, q, row_offsets, rule, (shared, replica), wanted, options)


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
    """Merge two partial attentions over different keys into the one over all of them.

    Parameters
    ----------
    o_a, o_b : array float32, float16 or bfloat16 [..., v_head_dim]
        Results; copied first where they are not in C order.
    lse_a, lse_b : array float32 [...]
        Natural logarithms of their sums of exponentials; -inf or +inf marks an empty one, whose
        elements do not count.
    out : (array, array), optional
        Where result and logarithms go, in C order: arrays of their own, or ``(o_a, lse_a)``.

    Returns
    -------
    o : array [..., v_head_dim]
    lse : array float32 [...]
        In the library of `o_a`, or `out`. Two empty ones give zeros and -inf.

    Raises
    ------
    ValueError
        Shapes that differ, an `out` that is read-only, strided or overlaps in another way.
    TypeError
        Another dtype.

    Notes
    -----
    Costs reading both and writing the result.

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


class _Rule(NamedTuple):
    """What a token sees, and how scores become weights."""

    scale: Any
    causal: Any
    window: Any
    chunk: Any
    soft_cap: Any
    sinks: Any

    def of(self, pools: LayerPools, layer: SupportsIndex) -> _Rule:
        """Return the rule of a layer, which sees no more than its group keeps."""
        if pools.window is None and pools.chunk is None:
            return self
        window, chunk = self.window, self.chunk
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
        return self._replace(window=window, chunk=chunk)


class _Wanted(NamedTuple):
    """What is to be returned, and how a GPU gets there."""

    v_head_dim: Any
    return_lse: Any
    splits: Any
    scratch: Any


def _small(place: Place, given: Any, name: str) -> Any:
    """See an array that may come from the host wherever the call runs."""
    if place is HOST:
        return host_array(given, name)
    array = any_array(given, name)
    return array if isinstance(array, np.ndarray) else place.checked(array, name)


def _attend(
    inputs: RaggedKVCacheInputs | PagedBatch,
    layer: SupportsIndex,
    q: Any,
    row_offsets: Any,
    rule: _Rule,
    groups: tuple[Any, Any],
    wanted: _Wanted,
    options: Options,
) -> Any:
    pools = layer_pools(inputs, layer)
    given, given_lse = _targets(options.out, wanted.return_lse)
    beside = q, row_offsets, rule.sinks, given, given_lse, wanted.scratch
    place = pools.place(options, beside=beside)
    see = _host_view if place is HOST else partial(array_at, place)
    sinks = None if rule.sinks is None else _small(place, rule.sinks, "sinks")
    request = AttentionRequest(
        pools.parts(),
        global_scales_of(pools, place),
        wanted.v_head_dim,
        (pools.lookup_table, pools.cache_lengths, offsets_at(place, row_offsets)),
        see(q, "q"),
        rule.of(pools, layer)._replace(sinks=sinks),
        groups,
        None if given is None else see(given, "out"),
        None if given_lse is None else see(given_lse, "out[1]"),
        wanted.return_lse,
        options.threads,
        wanted.splits,
        None if wanted.scratch is None or place is HOST else see(wanted.scratch, "scratch"),
    )
    o, lse = place.attention(request)
    result = place.in_library_of(q, o) if given is None else given
    if lse is None:
        return result
    return result, place.in_library_of(q, lse) if given_lse is None else given_lse


def _targets(out: Any, return_lse: Any) -> tuple[Any, Any]:
    """Return the caller's arrays for the result and for the logarithms, or None."""
    if not isinstance(out, tuple | list):
        return out, None
    if not flag("return_lse", return_lse):
        raise TypeError(
            f"out is a {type(out).__name__}, must be an array; a pair of arrays goes with "
            f"return_lse=True"
        )
    pair = pair_of("out", out)
    for i, array in enumerate(pair):
        if array is None:
            raise TypeError(f"out[{i}] is None, must be an array; or pass no pair")
    return pair
