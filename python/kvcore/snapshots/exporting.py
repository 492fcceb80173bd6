# SPDX-License-Identifier: Apache-2.0
"""A request out of a manager: what it has written, copied while others go on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.extra_keys import normalized
from kvcore._hot.moves import Mark, mark_of
from kvcore.backends.selection import place_of
from kvcore.errors import KVCacheError
from kvcore.snapshots.rows import Pools
from kvcore.snapshots.sequences import SavedSequence

__all__ = ["export_sequence"]

_TRIES = 16  # of a copy, while other threads go on with the request


def export_sequence(pools: Pools, request_id: Hashable, model: str | None) -> SavedSequence:
    """Copy what a request has written; see ``PagedKVCacheManager.export_sequence``.

    Notes
    -----
    Nothing is held meanwhile, so that nobody's call fails for it. Marks in front of the copy and
    behind it tell whether its pages were the request's all the time; else it is done again.
    """
    pools.require("export")
    for _ in range(_TRIES):
        mark = mark_of(pools.engine, request_id)
        written = _require_written(request_id, mark)
        try:
            saved = _saved(pools, request_id, mark, written, model)
        except IndexError:  # a page that was there is left
            if mark_of(pools.engine, request_id).stamp != mark.stamp:
                continue
            raise ValueError(
                f"request {request_id!r} has {written} tokens written, but windows have given back "
                f"pages that are read from there on; set start_idx no further back than truncate "
                f"may go"
            ) from None
        if mark_of(pools.engine, request_id).stamp == mark.stamp:
            return saved
    raise KVCacheError(
        f"request {request_id!r} was stepped {_TRIES} times while it was exported; export it "
        f"between two steps"
    )


def _require_written(request_id: Hashable, mark: Mark) -> int:
    """Return the tokens to export, as ``fork`` counts them."""
    context = mark.context
    written = 0 if context is None else min(mark.written, int(context.start_idx))
    if written < 1:
        raise ValueError(
            f"request {request_id!r} has 0 tokens written, must have at least 1 to be exported; "
            f"step it first, or claim it anew where it goes on"
        )
    if mark.slot >= 0 and mark.stands_at != written:
        at = "further on" if mark.stands_at < 0 else f"at token {mark.stands_at}"
        raise ValueError(
            f"request {request_id!r} has {written} tokens written, but its state stands {at}; "
            f"export it between step and fetch"
        )
    return written


def _saved(
    pools: Pools, request_id: Hashable, mark: Mark, written: int, model: str | None
) -> SavedSequence:
    context, params = mark.context, pools.params
    tokens = np.array(context.tokens, np.int32)[: int(context.end_idx)]
    layers = pools.layers(written)
    given = [key for key in extra_keys_of(context) if key[0] < len(tokens)]
    return SavedSequence(
        tokens=tokens,
        written=written,
        start_idx=int(context.start_idx),
        active_idx=int(context.active_idx),
        extra_key=getattr(context, "extra_key", None),
        cache_salt=getattr(context, "cache_salt", None),
        extra_keys=normalized(given, len(tokens)),
        model=model,
        dtype=params.dtype,
        page_size=params.page_size,
        kv_scale_granularity=params.kv_scale_granularity,
        tensor_parallel_degree=params.tensor_parallel_degree,
        layers={layer: pools.saved_layer(rows) for layer, rows in layers.items()},
        states=pools.saved_states(),
        tensors=_tensors(pools, request_id, mark, written),
    )


def extra_keys_of(context: Any) -> list[tuple[int, int, bytes]]:
    """Return the extra keys of a context of any class."""
    return list(getattr(context, "extra_keys", None) or ())


def _tensors(
    pools: Pools, request_id: Hashable, mark: Mark, written: int
) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    pages: dict[int, list[int]] = {}
    pools.enter(mark.replica)
    for layer, rows in pools.layers(written).items():
        bundle = rows.place.bundle
        if bundle not in pages:
            pages[bundle] = pools.engine.get_req_blocks(request_id, bundle)
        if rows.first >= written:
            continue
        for name, array in pools.read(mark.replica, layer, rows, pages[bundle], written).items():
            found[f"layers.{layer}.{name}"] = array
    if mark.slot >= 0:
        for name, arrays in pools.state_rows(mark.replica, mark.slot):
            found[name] = np.stack([place_of(None, {name: a}).to_host(a) for a in arrays])
    return found
