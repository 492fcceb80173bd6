# SPDX-License-Identifier: Apache-2.0
"""A request into a manager: checked first, then claimed, written, and found by others."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.extra_keys import normalized
from kvcore._hot.moves import begin_at, mark_of
from kvcore.backends.selection import place_of
from kvcore.context import ContextLike, TextGenerationContext
from kvcore.snapshots.exporting import extra_keys_of
from kvcore.snapshots.rows import LayerRows, Pools
from kvcore.snapshots.sequences import SavedSequence, check_sequence
from kvcore.support.dtypes import numpy_dtype

__all__ = ["import_sequence"]

#: What every element of a dtype is exactly in.
_HOLD = {
    "float16": ("float32",),
    "bfloat16": ("float32",),
    "float8_e4m3fn": ("float16", "bfloat16", "float32"),
    "float8_e5m2": ("float16", "bfloat16", "float32"),
}


def import_sequence(
    pools: Pools,
    context: TextGenerationContext | ContextLike,
    saved: SavedSequence,
    replica_idx: int | str | None,
    model: str | None,
) -> bool:
    """Give a request the pages of a file; see ``PagedKVCacheManager.import_sequence``."""
    pools.require("import")
    check_sequence(saved)
    layers = pools.layers(saved.written)
    _check_model(saved, model)
    _check_layout(pools, saved, layers)
    _check_context(context, saved)
    request_id, active = context.request_id, context.active_idx
    pools.engine.external_claim(request_id, replica_idx)  # type: ignore[arg-type]
    try:
        fits = begin_at(pools.engine, context, saved.written, _name_space(saved, layers))
        if fits:
            _write(pools, context, saved, layers)
            pools.engine.step([context])
    except BaseException:
        _undo(pools, context, active)
        raise
    if not fits:
        pools.engine.release(request_id)
    return fits


def _undo(pools: Pools, context: Any, active: int) -> None:
    """Have a request that failed be as it was, unless another thread has released it."""
    if pools.engine.contains(context.request_id):
        pools.engine.release(context.request_id)
    context.start_idx = 0
    context.active_idx = active


def _name_space(saved: SavedSequence, layers: dict[int, LayerRows]) -> bytes | None:
    """Return a namespace that nobody else has where pages lack tokens that others would read.

    The file may begin within a page of this manager's: what is in front of it is read by nobody but
    a request that hits fewer tokens.
    """
    is_whole = all(saved.layers[layer].first <= rows.first for layer, rows in layers.items())
    return None if is_whole else b"kvcore.import" + os.urandom(16)


# ---- what fits -------------------------------------------------------------------------------


def _refuse(what: str, found: object, wanted: object, remedy: str) -> ValueError:
    return ValueError(f"the saved request has {what} {found}, must be {wanted}; {remedy}")


def _check_model(saved: SavedSequence, model: str | None) -> None:
    if model is not None and saved.model != model:
        raise _refuse("model", repr(saved.model), repr(model), "import it where that model runs")


def _check_layout(pools: Pools, saved: SavedSequence, layers: dict[int, LayerRows]) -> None:
    params = pools.params
    remedy = "import it into a manager for the same model"
    if saved.layers.keys() != layers.keys():
        raise _refuse("layers", _brief(saved.layers), _brief(layers), remedy)
    is_scaled = saved.kv_scale_granularity is not None or params.kv_scale_granularity is not None
    if saved.dtype != params.dtype and (
        is_scaled or params.dtype not in _HOLD.get(saved.dtype, ())
    ):
        others = ", ".join(_HOLD.get(saved.dtype, ())) if not is_scaled else ""
        wanted = f"{params.dtype}, as the pool" + (f" (it fits in {others})" if others else "")
        raise _refuse("dtype", saved.dtype, wanted, "nothing is rounded")
    if saved.kv_scale_granularity != params.kv_scale_granularity:
        raise _refuse(
            "kv_scale_granularity",
            saved.kv_scale_granularity,
            params.kv_scale_granularity,
            "scales are not made anew",
        )
    for layer, rows in layers.items():
        _check_layer(pools, saved, layer, rows)
    _check_states(pools, saved)


def _brief(layers: Any) -> str:
    names = sorted(layers)
    return f"{len(names)} ({', '.join(map(str, names[:8]))}{', ...' if len(names) > 8 else ''})"


def _check_layer(pools: Pools, saved: SavedSequence, layer: int, rows: LayerRows) -> None:
    found, own = saved.layers[layer], pools.saved_layer(rows)
    if (found.heads, found.widths) != (own.heads, own.widths):
        raise _refuse(
            f"heads and widths of layer {layer}",
            (found.heads, found.widths),
            (own.heads, own.widths),
            "import it into a manager for the same model",
        )
    if found.first > rows.skipped and rows.skipped < saved.written:
        raise _refuse(
            f"tokens of layer {layer} from",
            found.first,
            f"at most {rows.skipped}, which this manager reads",
            "give that layer the same window here",
        )


def _check_states(pools: Pools, saved: SavedSequence) -> None:
    wanted = pools.saved_states()
    if saved.states != wanted:
        raise _refuse("states", saved.states, wanted, "import it where the same model runs")
    degree = pools.params.tensor_parallel_degree
    if wanted and saved.tensor_parallel_degree != degree:
        raise _refuse(
            "states of tensor parallel degree",
            saved.tensor_parallel_degree,
            degree,
            "how states are split is the model's; use the same degree",
        )


def _check_context(context: Any, saved: SavedSequence) -> None:
    n = saved.written
    name = f"request {context.request_id!r}"
    if context.start_idx != 0:
        raise ValueError(
            f"{name} has start_idx {context.start_idx}, must be 0 to be imported; set it to 0, or "
            f"make a context with read_sequence(data).context(request_id)"
        )
    if context.end_idx <= n:
        raise ValueError(
            f"{name} has {context.end_idx} tokens, must have more than the {n} that are written in "
            f"the saved request; extend it by the token that runs next"
        )
    tokens = np.asarray(context.tokens)[:n]
    if not np.array_equal(tokens, saved.tokens[:n]):
        at = int((tokens != saved.tokens[:n]).argmax())
        raise ValueError(
            f"token {at} of {name} is {tokens[at]}, must be {saved.tokens[at]} as in the saved "
            f"request; import it with the same tokens"
        )
    for field in ("extra_key", "cache_salt"):
        own, found = getattr(context, field, None), getattr(saved, field)
        if own != found:
            raise ValueError(
                f"{name} has {field} {own!r}, must be {found!r} as the saved request; K and V of "
                f"another namespace are others"
            )
    if _keys(extra_keys_of(context), n) != _keys(saved.extra_keys, n):
        raise ValueError(
            f"{name} has other extra keys in its first {n} tokens than the saved request; import "
            f"it with the same"
        )


def _keys(keys: Any, n: int) -> tuple[tuple[int, int, bytes], ...]:
    return normalized([key for key in keys if key[0] < n], n)


# ---- what is written -------------------------------------------------------------------------


def _write(pools: Pools, context: Any, saved: SavedSequence, layers: dict[int, LayerRows]) -> None:
    mark = mark_of(pools.engine, context.request_id)
    dtype = numpy_dtype(pools.params.dtype)
    pages: dict[int, list[int]] = {}
    pools.enter(mark.replica)
    for layer, rows in layers.items():
        first = max(rows.first, saved.layers[layer].first)
        bundle = rows.place.bundle
        if first >= saved.written:
            continue
        if bundle not in pages:
            pages[bundle] = pools.engine.get_req_blocks(context.request_id, bundle)
        tensors = {
            name: _rows_of(saved, f"layers.{layer}.{name}", first - saved.layers[layer].first)
            for name, _, _ in pools.parts(rows)
        }
        if saved.dtype != pools.params.dtype:
            tensors = {name: array.astype(dtype) for name, array in tensors.items()}
        pools.write(mark.replica, layer, rows, pages[bundle], first, tensors)
    for name, arrays in pools.state_rows(mark.replica, mark.slot):
        for array, content in zip(arrays, saved.tensors[name], strict=True):
            place = place_of(None, {name: array})
            place.copy_into(array, content)
            place.wait()


def _rows_of(saved: SavedSequence, name: str, begin: int) -> NDArray[Any]:
    return saved.tensors[name][begin:]
