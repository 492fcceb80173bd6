# SPDX-License-Identifier: Apache-2.0
"""The row of K and V in each layer, by a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.layers.hf.fields import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    Config,
    count,
    field,
    optional_count,
)
from kvcore.layers.hf.layers import INDEXED, KEEPS, SLIDING, blocks_of
from kvcore.layers.hf.reading import Fields

__all__ = ["LIKE_PARAMS", "Row", "index_width", "layer_heads", "layer_rows"]

#: K/V heads, width of K and width of V of a layer; None where it is that of the params.
Row = tuple[int | None, int | None, int | None]
LIKE_PARAMS: Row = (None, None, None)

_PER_LAYER = ("num_key_value_heads_per_layer", *KV_HEADS)
_ROW_FIELDS = ("num_key_value_heads", "head_dim", "v_head_dim")
_SLIDING_KV_HEADS = ("swa_num_key_value_heads", "num_swa_key_value_heads")
_SLIDING_HEADS = ("swa_num_attention_heads", "num_swa_attention_heads")
# Layers with a window have this many times the K/V heads, if the config does not give them.
_SLIDING_TIMES = {"mimo_v2_flash": 2}
_INDEX_FIELDS = (
    *("index_head_dim", "index_n_heads", "index_topk", "indexer_types", "index_block_size"),
    *("index_topk_blocks", "index_local_blocks", "indexer_n_heads", "indexer_kv_heads"),
    *("indexer_head_dim", "indexer_budget", "indexer_compress_ratio"),
)


def layer_rows(text: Fields, shape: Mapping[str, Any], kinds: list[str]) -> list[Row]:
    """Return for each layer what differs from the shape.

    Parameters
    ----------
    text : Fields
        The config of the language model.
    shape : mapping
        Fields of KVCacheParams: n_kv_heads, head_dim, v_head_dim, is_mla.
    kinds : list of str
        Of each layer.

    Raises
    ------
    ValueError
        A field is out of range, or a layer keeps what no row holds.
    """
    if INDEXED not in kinds:
        text.ignore("no layer has an indexer", *_INDEX_FIELDS)
    if shape["is_mla"]:
        return _latent_rows(text, shape["head_dim"], kinds)
    if INDEXED in kinds:
        named = next((name for name in _INDEX_FIELDS if text.get(name)), "layer_types")
        raise ValueError(
            f"{named} of the config: layers of {text.get('model_type', 'this model')} keep the key "
            f"of an indexer beside K and V of {shape['n_kv_heads']} heads, which no row holds; "
            f"give KVCacheParams the numbers"
        )
    heads = layer_heads(text, len(kinds))
    uniform = (shape["n_kv_heads"], shape["head_dim"], shape.get("v_head_dim"))
    given = [LIKE_PARAMS] * len(kinds)
    for layer, kind in enumerate(kinds):
        own, *widths = _row(
            text, layer, kind, (heads[layer] if heads else uniform[0], *uniform[1:])
        )
        given[layer] = (
            None if own == uniform[0] else own,
            *((None, None) if tuple(widths) == uniform[1:] else widths),
        )
    return given


# -- latent rows ---------------------------------------------------------------------------------
def index_width(text: Fields) -> int:
    """Return the elements of an indexer's key."""
    return count(text, ("index_head_dim",))


def _latent_rows(text: Fields, width: int, kinds: list[str]) -> list[Row]:
    """Return the rows of latents; that of the shape includes the key of an indexer, if any."""
    if text.get("per_layer_config"):
        raise ValueError(
            "per_layer_config of the config makes latent rows differ, which kvcore does not "
            "keep in one pool; pass groups= of your own"
        )
    rows = list(zip(_lacking_keys(text, kinds), _lacking_positions(text, len(kinds)), strict=True))
    return [(None, width - sum(lacks), None) if any(lacks) else LIKE_PARAMS for lacks in rows]


def _lacking_positions(text: Fields, layers: int) -> list[int]:
    """Return for each layer the elements of positions that its rows do not have."""
    with_rope = text.get("no_rope_layers") or [1] * layers  # 0: a layer without positions
    if not isinstance(with_rope, (list, tuple)) or len(with_rope) != layers:
        raise ValueError(
            f"no_rope_layers of the config is {with_rope!r}, must have 0 or 1 for each of the "
            f"{layers} layers"
        )
    width = count(text, ("qk_rope_head_dim",))
    return [0 if has_rope else width for has_rope in with_rope]


def _lacking_keys(text: Fields, kinds: list[str]) -> list[int]:
    """Return for each layer the elements of an indexer's key that its rows do not have."""
    if INDEXED not in kinds:
        return [0] * len(kinds)
    text.ignore("it chooses tokens, and keeps nothing", "index_n_heads", "index_topk")
    width = index_width(text)
    return [0 if has_key else width for has_key in _own_indexers(text, kinds)]


def _own_indexers(text: Fields, kinds: list[str]) -> list[bool]:
    """Return for each layer whether it has an indexer; the others use the one before."""
    named = text.get("indexer_types")
    if named is None:
        return [kind == INDEXED for kind in kinds]
    is_list = isinstance(named, (list, tuple)) and len(named) <= len(kinds)
    if not is_list or not set(named) <= {"full", "shared"}:
        raise ValueError(
            f"indexer_types of the config is {named!r}, must be a list of 'full' and 'shared' for "
            f"{len(kinds)} layers"
        )
    # The list leaves out the MTP layers, which have an indexer each.
    own = [each == "full" for each in named] + [True] * (len(kinds) - len(named))
    return [kind == INDEXED and has_key for kind, has_key in zip(kinds, own, strict=True)]


# -- rows of heads -------------------------------------------------------------------------------
def layer_heads(text: Fields, layers: int) -> list[int] | None:
    """Return the K/V heads of each layer; None if the config does not list them."""
    name, given = field(text, _PER_LAYER)
    if text.get("block_configs"):
        found = [_of_block(text, block) for block in blocks_of(text, layers)]
        return [heads or max(each or 1 for each in found) for heads in found]
    if not isinstance(given, (list, tuple)):
        return None
    if not all(type(each) is int and each >= 1 for each in given):
        raise ValueError(f"{name} of the config is {given!r}, must be ints of at least 1")
    if len(given) != layers:
        raise ValueError(
            f"{name} of the config is {given!r}: it has {len(given)} entries, must have {layers}"
        )
    return list(given)


def _of_block(text: Fields, block: Config) -> int | None:
    """Return the K/V heads of a block; None for a block without attention."""
    groups = optional_count(block, ("n_heads_in_group",))
    if groups is None:
        return optional_count(block, ("num_key_value_heads",))
    heads = count(text, HEADS)
    if heads % groups != 0:
        raise ValueError(
            f"block_configs of the config has an n_heads_in_group of {groups}, must divide the "
            f"{heads} of {field(text, HEADS)[0]}"
        )
    return heads // groups


def _row(text: Fields, layer: int, kind: str, uniform: Row) -> Row:
    heads, head_dim, v_head_dim = uniform
    if KEEPS.get(kind) == SLIDING:
        times = _SLIDING_TIMES.get(str(text.get("model_type")), 1)
        heads = optional_count(text, _SLIDING_KV_HEADS) or times * (heads or 1)
        head_dim = _sliding_width(text) or head_dim
        v_head_dim = optional_count(text, ("swa_v_head_dim",)) or v_head_dim
    elif kind in KEEPS:
        head_dim = optional_count(text, ("global_head_dim",)) or head_dim
        if text.get("attention_k_eq_v", True):
            heads = optional_count(text, ("num_global_key_value_heads",)) or heads
    changed = _of_layer(text, layer)
    return (
        optional_count(changed, ("num_key_value_heads",)) or heads,
        optional_count(changed, ("head_dim",)) or head_dim,
        optional_count(changed, ("v_head_dim",)) or v_head_dim,
    )


def _sliding_width(text: Fields) -> int | None:
    """Return the width of a head in layers with a window, if these have another number of heads."""
    width, heads = optional_count(text, ("swa_head_dim",)), optional_count(text, _SLIDING_HEADS)
    if width is not None or heads is None or optional_count(text, HEAD_DIM) is not None:
        return width  # heads of one width, whatever their number
    hidden = count(text, HIDDEN)
    if hidden % heads != 0:
        raise ValueError(
            f"{field(text, HIDDEN)[0]} of the config is {hidden}, no multiple of the {heads} of "
            f"{field(text, _SLIDING_HEADS)[0]}; such a config needs swa_head_dim"
        )
    return hidden // heads


def _of_layer(text: Fields, layer: int) -> Config:
    """Return the fields that the config gives for one layer."""
    changed = text.get("per_layer_config") or {}
    if not isinstance(changed, Mapping):
        raise ValueError(f"per_layer_config of the config is {changed!r}, must be an object")
    for name, fields in changed.items():
        if str(name).isdecimal() and int(name) == layer:
            unknown = set(fields) - {*_ROW_FIELDS, "num_attention_heads"}
            if unknown:
                raise ValueError(
                    f"per_layer_config of the config gives layer {layer} a {sorted(unknown)[0]}, "
                    f"must give {', '.join(_ROW_FIELDS)}: other layers are in no group"
                )
            return dict(fields)
    return {}
