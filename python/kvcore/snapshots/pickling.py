# SPDX-License-Identifier: Apache-2.0
"""Pickles and copies of contexts and inputs: their saved states, and the way back."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import numpy as np

from kvcore.layers.layer_map import LayerMap
from kvcore.native.contexts import RaggedKVCacheInputs, TextGenerationContext
from kvcore.support.arguments import integer

__all__ = ["context_state", "inputs_state", "make_context", "make_inputs"]

#: Limit on how many tokens past the last token an extra key of a saved context may end. These
#: tokens are added for the constructor and removed again. The limit exceeds the tokens of any image
#: or video, and is low enough that a bad file cannot allocate much memory.
_MOST_BEHIND = 1 << 20

#: Version of the states below. It rises when their fields change.
VERSION = 2

_TERMS = ("extra_key", "cache_salt", "priority", "ttl", "retention", "tenant", "returns_in")
_CONTEXT = {"request_id", "tokens", "start_idx", "active_idx", "extra_keys", *_TERMS}
_INPUTS = {
    *("cache_lengths", "lookup_table", "max_lengths", "tables", "states", "layers", "row_offsets"),
}


def _checked_state(state: Any, names: set[str], what: str) -> dict[str, Any]:
    """Return the fields of a state; ValueError for a state of another version."""
    version = state.get("version") if isinstance(state, dict) else None
    if version != VERSION:
        raise ValueError(
            f"the saved {what} of version {version!r}, must be of version {VERSION}; "
            f"save and load with the same version of kvcore"
        )
    if state.keys() != names | {"version"}:
        wrong = sorted(map(str, state.keys() ^ (names | {"version"})))
        raise ValueError(
            f"the saved {what} of version {VERSION} with extra or missing fields: "
            f"{', '.join(wrong)}; it was changed, or kvcore did not write it"
        )
    return {name: state[name] for name in names}


def context_state(context: TextGenerationContext) -> dict[str, Any]:
    """Return the state of a context: tokens, indices, keys and terms, but not its claim."""
    fields = {name: getattr(context, name) for name in _CONTEXT - {"tokens"}}
    return fields | {"version": VERSION, "tokens": np.array(context.tokens)}


def make_context(state: dict[str, Any]) -> TextGenerationContext:
    """Make a context from its state.

    Raises
    ------
    ValueError, TypeError
        The state has another version or other fields, or the constructor refuses a value.
    """
    fields = _checked_state(state, _CONTEXT, "context is")
    tokens, start, active = fields["tokens"], fields["start_idx"], fields["active_idx"]
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        raise TypeError("the saved context has bad tokens, must be int32 [n]; it was changed")
    start, active = integer("start_idx", start), integer("active_idx", active)
    if not 0 <= start < active <= len(tokens):
        raise ValueError(
            f"the saved context has start_idx {start}, active_idx {active} and {len(tokens)} "
            f"tokens, must be 0 <= start_idx < active_idx <= tokens; it was changed"
        )
    context = TextGenerationContext(
        fields["request_id"],
        _with_room(tokens, fields["extra_keys"]),
        extra_keys=fields["extra_keys"],
        **{name: fields[name] for name in _TERMS},
    )
    context.rewind(len(tokens))
    if start > 0:
        context.active_idx = start
        context.update(0)  # as after a chunk: adds no token
    context.active_idx = active
    return context


def _with_room(tokens: Any, extra_keys: Any) -> Any:
    """Append tokens if an extra key ends after the last token, as with a truncated image."""
    if not isinstance(extra_keys, tuple | list):
        return tokens
    ends = [key[0] + key[1] for key in extra_keys if _is_key(key) and key[0] < len(tokens)]
    reach = max([len(tokens), *ends])
    if reach > len(tokens) + _MOST_BEHIND:
        raise ValueError(
            f"the saved context has an extra key up to token {reach} and {len(tokens)} tokens, "
            f"must reach at most {_MOST_BEHIND} past them; make it with all tokens of the key"
        )
    return np.concatenate([tokens, np.zeros(reach - len(tokens), np.int32)])


def _is_key(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 3 and all(type(each) is int for each in key[:2])


def inputs_state(inputs: RaggedKVCacheInputs) -> dict[str, Any]:
    """Return the state of inputs without a pool: tables, lengths, slots.

    Raises
    ------
    TypeError
        The inputs have a pool.
    """
    if inputs.blocks is not None or inputs.kv_scales is not None:
        raise TypeError(
            "inputs with a pool cannot be pickled, the pool is memory of this process; make the "
            "manager with blocks=None, and set its pool with inputs.with_pool(blocks) where the "
            "inputs arrive"
        )
    try:
        offsets = inputs.row_offsets
    except AttributeError:
        offsets = None
    return {
        "version": VERSION,
        "cache_lengths": np.array(inputs.cache_lengths),
        "lookup_table": np.array(inputs.lookup_table),
        "max_lengths": np.array(inputs.max_lengths),
        "tables": tuple(map(np.array, inputs.tables[1:])),
        "states": tuple(map(np.array, inputs.states)),
        "layers": inputs._layers,  # noqa: SLF001
        "row_offsets": offsets,
    }


def make_inputs(state: dict[str, Any]) -> RaggedKVCacheInputs:
    """Make inputs without a pool from their state.

    Raises
    ------
    ValueError, TypeError
        The state has another version, other fields, or arrays of another shape or dtype.
    """
    fields = _checked_state(state, _INPUTS, "inputs are")
    lengths = _array(fields, "cache_lengths", lambda shape: len(shape) == 1)
    rows = len(lengths)
    table = _array(fields, "lookup_table", lambda shape: len(shape) == 2 and shape[0] == rows)
    most = _array(fields, "max_lengths", lambda shape: len(shape) == 2 and shape[1] == 2)
    for name in ("tables", "states"):
        if not isinstance(fields[name], tuple):
            raise TypeError(f"the saved inputs have {name} not in a tuple; they were changed")
    more = dict(enumerate(fields["tables"])) | {-1 - i: s for i, s in enumerate(fields["states"])}
    for key in more:
        kind, ndim = (np.uint32, 2) if key >= 0 else (np.int32, 1)
        _array(more, key, lambda s, n=ndim: len(s) == n and s[0] == rows, kind)  # type: ignore[misc]
    layers = fields["layers"]
    if layers is not None and not isinstance(layers, LayerMap):
        raise TypeError(f"the saved inputs have layers of {type(layers)}; they were changed")
    if fields["row_offsets"] is not None:
        _array(fields, "row_offsets", lambda shape: shape == (rows + 1,))
    return RaggedKVCacheInputs(
        None,
        lengths,
        table,
        most,
        tables=(table, *fields["tables"]) if layers is not None else None,
        layers=layers,
        states=fields["states"] or None,
        row_offsets=fields["row_offsets"],
    )


def _array(
    fields: Any, name: Any, fits: Callable[[tuple[int, ...]], bool], dtype: Any = np.uint32
) -> Any:
    array = fields[name]
    if not isinstance(array, np.ndarray) or array.dtype != dtype or not fits(array.shape):
        raise TypeError(
            f"the saved inputs have {name} of another shape or dtype; they were changed"
        )
    return array


def _reduce_context(context: TextGenerationContext) -> tuple[Any, ...]:
    return make_context, (context_state(context),)


def _reduce_inputs(inputs: RaggedKVCacheInputs) -> tuple[Any, ...]:
    return make_inputs, (inputs_state(inputs),)


copyreg.pickle(TextGenerationContext, _reduce_context)
copyreg.pickle(RaggedKVCacheInputs, _reduce_inputs)
