# SPDX-License-Identifier: Apache-2.0
"""The kinds of a model's layers, and their rows of K and V, by its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvcore.layers.hf.fields import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    Config,
    Fields,
    count,
    field,
    flag,
    optional_count,
)
from kvcore.layers.kinds import MOST_LAYERS

__all__ = [
    "CHUNKED",
    "FULL",
    "INDEXED",
    "KEEPS",
    "LIKE_PARAMS",
    "MTP_FIELDS",
    "SHARING_FIELDS",
    "SLIDING",
    "STATES",
    "STATE_FIELDS",
    "Row",
    "blocks_of",
    "index_width",
    "layer_heads",
    "layer_kinds",
    "layer_rows",
    "mtp_layers",
    "shared_layers",
]

#: Kinds of layers that keep K and V of all tokens, of a window or of a chunk.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
#: A layer with an indexer. It keeps K and V and the indexer's key of every token.
INDEXED = "indexed_attention"
#: A layer that keeps a state, a layer that keeps K, V and a state, and a layer that keeps nothing.
LINEAR, BOTH, NEITHER = "linear_attention", "hybrid", "mlp"
_BOTH_SLIDING = "hybrid_sliding"

_NAMES = {
    "attention": FULL,
    "full_attention": FULL,
    "indexed_attention": INDEXED,
    "deepseek_sparse_attention": INDEXED,
    "qwen_sparse_attention": INDEXED,
    "sliding_attention": SLIDING,
    "local_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": LINEAR,
    "mamba": LINEAR,
    "recurrent": LINEAR,
    "conv": LINEAR,
    "hybrid": BOTH,
    "hybrid_sliding": _BOTH_SLIDING,
    "mlp": NEITHER,
    "moe": NEITHER,
}
_LETTERS = {"M": LINEAR, "*": FULL, "-": NEITHER, "E": NEITHER}  # of Nemotron-H

#: For each kind that keeps K and V: the tokens whose K and V it keeps.
KEEPS = {
    FULL: FULL,
    INDEXED: FULL,
    SLIDING: SLIDING,
    CHUNKED: CHUNKED,
    BOTH: FULL,
    _BOTH_SLIDING: SLIDING,
}
STATES = {LINEAR, BOTH, _BOTH_SLIDING}

#: Fields of layers that keep a state.
STATE_FIELDS = (
    "state_size",  # Mamba
    "ssm_state_size",
    "mamba_d_state",
    "conv_L_cache",
    "lru_width",
    "linear_num_key_heads",
    "linear_attn_config",
    "attention_hidden_size",  # RWKV
)
# Rarer fields of states; convolutions of encoders also have these fields.
_MORE_STATE_FIELDS = ("number_of_conv_states", "conv_kernel_size", "cca_time0")

# Defaults of n in models in which every n-th layer has full attention and the others a window.
_EVERY = {
    "afmoe": 4,
    "cohere2": 4,
    "exaone4": 4,
    "exaone_moe": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gemma4_unified_text": 6,
    "gpt_oss": 2,
    "olmo3": 4,
    "vaultgemma": 2,
}
_LAST_IS_FULL = {"exaone4", "exaone_moe", "gemma4_text", "gemma4_unified_text"}
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
# Models in which every layer has the window, if the config has a window.
_ALL_WINDOWED = {
    "minimax_m2",
    "ministral",
    "mistral",
    "mixtral",
    "moshi",
    "phi3",
    "phimoe",
    "qwen3_moe",
    "starcoder2",
    "voxtral_realtime_text",
}


# The fields that determine the kind of each layer, and the layers that share K and V.
_LISTS = ("layer_types", "layers_block_type")
_WINDOW_KINDS = (
    *_PATTERNS,
    *("use_sliding_window", "max_window_layers", "sliding_window_layers", "local_layer_ids"),
    *("hybrid_layer_pattern", "prefix_dense_sliding_window_pattern"),
    *("attention_types", "attention_layers"),
)
_STATE_KINDS = (
    *("hybrid_layer_ids", "hybrid_override_pattern", "attn_type_list", "block_types"),
    *("attn_layer_period", "attn_layer_offset", "attn_layer_indices", "full_attn_idxs"),
    *("layer_group_size", "full_attention_interval"),
)
MTP_FIELDS = (
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "mtp_num_hidden_layers",
    "mtp_num_layers",
)
# Models that run all layers several times for a token: the field with the number of passes.
_PASSES = {"ouro": "total_ut_steps"}
_MTP_KINDS = ("mtp_layer_types", "mtp_layers_block_type")


def _ignore_kinds(text: Fields, why: str, but: str) -> None:
    """Note that the fields about kinds of layers, except `but`, do not change the cache."""
    names = (*_LISTS, *_WINDOW_KINDS, *_STATE_KINDS)
    text.ignore(why, *(name for name in names if name != but))
    text.part("linear_attn_config").ignore(why, "full_attn_layers", "kda_layers")


def mtp_layers(text: Fields) -> int:
    """Return the number of MTP layers, which predict further tokens."""
    given = {name: text.get(name) for name in MTP_FIELDS}
    return optional_count({name: n for name, n in given.items() if n != 0}, MTP_FIELDS) or 0


def layer_kinds(text: Fields, layers: int, mtp: int = 0) -> list[str]:
    """Return the kind of each layer.

    Parameters
    ----------
    text : Fields
        The config of the language model.
    layers : int
        Number of layers that every token runs through.
    mtp : int
        Number of MTP layers at the end whose kinds are also returned.

    Raises
    ------
    ValueError
        A kind is unknown, no layer keeps K and V, or the numbers of kinds and layers differ.
    """
    if layers + mtp > MOST_LAYERS:
        raise ValueError(
            f"num_layers is {layers + mtp}, must be at most {MOST_LAYERS} if layers have kinds"
        )
    named = next((name for name in _LISTS if text.get(name)), None)
    behind: list[str] = []
    if named is not None:
        given = text[named]
        padded = layers + mtp_layers(text)
        has_more = isinstance(given, (list, tuple)) and len(given) == padded
        kinds = _of_list(named, given, padded if has_more else layers)
        kinds, behind = kinds[:layers], kinds[layers:]
        _ignore_kinds(text, f"{named} decides", but=named)
    elif text.get("block_configs"):
        kinds = _of_blocks(text, layers)
    else:
        kinds = _RULES.get(str(text.get("model_type")), _by_fields)(text, layers)
    if KEEPS.keys().isdisjoint(kinds):
        raise ValueError(
            f"all layers of {text.get('model_type', 'this model')} (model_type of the config) keep "
            f"states or nothing, so the model has no K and V to keep in pages; keep its states "
            f"without kvcore"
        )
    return kinds * _passes(text) + (behind or _mtp_kinds(text, kinds, mtp))[:mtp]


def _passes(text: Fields) -> int:
    """Return the number of passes of a token through the layers; each pass has its own K and V."""
    name = _PASSES.get(str(text.get("model_type")))
    return 1 if name is None else count(text, (name,))


def _mtp_kinds(text: Fields, kinds: list[str], mtp: int) -> list[str]:
    """Return the kinds of the MTP layers, if the list of kinds does not include them."""
    if not mtp:
        return []
    named = next((name for name in _MTP_KINDS if text.get(name)), None)
    if named is not None:
        given = text[named]
        # One kind for each MTP layer, or the kinds of the blocks in every MTP layer.
        whole = [] if not isinstance(given, (list, tuple)) else given
        found = _of_list(named, given, len(whole) or mtp)
        own = [kind for kind in found if kind in KEEPS or kind in STATES]
        if len(found) == mtp:
            return found
        if len(own) == 1:
            return own * mtp
        raise ValueError(
            f"{named} of the config has {len(found)} entries for {mtp} MTP layers, must have "
            f"{mtp}, or one attention entry"
        )
    keeping = sorted({kind for kind in kinds if kind in KEEPS})
    if len(keeping) > 1:
        raise ValueError(
            f"the config has {mtp} MTP layers of unknown kind: layers before them are "
            f"{' and '.join(keeping)}; give {_LISTS[0]} an entry for each"
        )
    return keeping * mtp


def _of_list(name: str, given: Any, layers: int, names: dict[Any, str] = _NAMES) -> list[str]:
    if not isinstance(given, (list, tuple, str)):
        raise ValueError(f"{name} of the config is {given!r}, must be a list")
    if len(given) != layers:
        raise ValueError(f"{name} of the config has {len(given)} entries, must have {layers}")
    unknown = [kind for kind in given if not isinstance(kind, str | int) or kind not in names]
    if unknown:
        raise ValueError(
            f"{name} of the config holds {unknown[0]!r}, must hold some of "
            f"{', '.join(map(repr, names))}: no group describes other layers"
        )
    return [names[kind] for kind in given]


def _of_blocks(text: Fields, layers: int) -> list[str]:
    """Return the kinds of the blocks of a pruned model (Nemotron-NAS)."""
    kinds = []
    for layer, block in enumerate(blocks_of(text, layers)):
        limited = [name for name in _LIMITS if block.get(name)]
        if limited:
            raise ValueError(
                f"block_configs of the config gives the attention of layer {layer} a "
                f"{limited[0]}, which no group describes; pass groups= of your own"
            )
        kinds.append(NEITHER if any(block.get(name) for name in _NO_ATTENTION) else FULL)
    text.ignore("block_configs decides", *_LISTS, *_WINDOW_KINDS)
    return kinds


_NO_ATTENTION = ("no_op", "replace_with_linear")
_LIMITS = ("window_length", "num_sink_tokens", "sparsify", "is_mamba", "mamba", "llama4")


def blocks_of(text: Fields, layers: int) -> list[Mapping[str, Any]]:
    """Return the attention of each block of ``block_configs``."""
    given = text.get("block_configs")
    found = [each.get("attention") if isinstance(each, Mapping) else None for each in given or ()]
    if len(found) != layers or not all(isinstance(each, Mapping) for each in found):
        raise ValueError(
            f"block_configs of the config has {len(found)} entries, must have {layers} with an "
            f"attention each"
        )
    return [each for each in found if isinstance(each, Mapping)]


def _where(layers: int, is_first: Callable[[int], bool], first: str, other: str) -> list[str]:
    return [first if is_first(i) else other for i in range(layers)]


def _indices(config: Fields, name: str, first: int = 0) -> set[int]:
    """Return the layers that a field lists, counted from 0."""
    given = config.get(name)
    if not isinstance(given, (list, tuple)) or not all(type(each) is int for each in given):
        raise ValueError(f"{name} of the config is {given!r}, must be a list of layers")
    return {each - first for each in given}


# -- windows -------------------------------------------------------------------------------------
def _by_fields(text: Fields, layers: int) -> list[str]:
    """Return the kinds by common fields; ignore a window that no layer of the family has."""
    kind = text.get("model_type")
    fields = (*STATE_FIELDS, *_MORE_STATE_FIELDS)
    states = next((name for name in fields if text.get(name) is not None), None)
    if states is not None:
        raise ValueError(
            f"{states} of the config means that layers of {kind or 'this model'} keep a state, but "
            f"not which layers; the config needs layer_types"
        )
    kinds = _windowed(text, layers)
    if text.get("index_head_dim") is None:
        return kinds
    return [INDEXED if each == FULL else each for each in kinds]


def _windowed(text: Fields, layers: int) -> list[str]:
    kind = text.get("model_type")
    window = optional_count(text, ("sliding_window",)) if text.get("sliding_window") else None
    if window is None or text.get("use_sliding_window") is False:
        text.ignore("no layer has a window", *_WINDOW_KINDS)
        return [FULL] * layers
    if kind in _EVERY or text.get("sliding_window_pattern") is not None:
        return _alternating(text, layers)
    if text.get("use_sliding_window") and text.get("max_window_layers") is not None:
        begin = text["max_window_layers"]
        if kind in ("qwen2_moe", "qwen2_5_moe"):
            return _where(layers, lambda i: i % 2 == 0 and i < begin, SLIDING, FULL)
        if kind != "qwen3_moe":
            return _where(layers, lambda i: i >= begin, SLIDING, FULL)
    if kind in _ALL_WINDOWED:
        text.ignore("every layer has the window", *_WINDOW_KINDS)
        return [SLIDING] * layers
    text.ignore("every layer keeps every token, with a window or without", *_WINDOW_KINDS)
    return [FULL] * layers


def _baichuan(text: Fields, layers: int) -> list[str]:
    # Each layer convolves K and V over the tokens, so the last K and V of a request are a state.
    windowed = _indices(text, "sliding_window_layers")
    return _where(layers, windowed.__contains__, _BOTH_SLIDING, BOTH)


def _alternating(text: Fields, layers: int) -> list[str]:
    kind = str(text.get("model_type"))
    name = next((name for name in _PATTERNS if text.get(name) is not None), _PATTERNS[0])
    pattern = text.get(name, _EVERY.get(kind))
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        kinds = _where(layers, lambda i: pattern[i % len(pattern)] == "L", SLIDING, FULL)
    elif isinstance(pattern, list):
        kinds = _of_list(name, pattern, layers, {True: SLIDING, False: FULL} | _NAMES)
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 1:
        kinds = _where(layers, lambda i: (i + 1) % pattern == 0, FULL, SLIDING)
    else:
        raise ValueError(
            f"{name} of the config is {pattern!r}, must be an int of at least 1, a str of L and G, "
            f"or a list with a bool per layer"
        )
    return [*kinds[:-1], FULL] if kind in _LAST_IS_FULL else kinds


def _llama4(text: Fields, layers: int) -> list[str]:
    if text.get("attention_chunk_size") is None:
        return [FULL] * layers
    if text.get("no_rope_layers"):
        return _of_list("no_rope_layers", text["no_rope_layers"], layers, {1: CHUNKED, 0: FULL})
    interval = optional_count(text, ("no_rope_layer_interval",)) or 4
    return _where(layers, lambda i: (i + 1) % interval == 0, FULL, CHUNKED)


def _mimo(text: Fields, layers: int) -> list[str]:
    if text.get("hybrid_layer_pattern"):
        pattern = text["hybrid_layer_pattern"]
        return _of_list("hybrid_layer_pattern", pattern, layers, {1: SLIDING, 0: FULL})
    return _by_fields(text, layers)


# -- states --------------------------------------------------------------------------------------
def _jamba(text: Fields, layers: int) -> list[str]:
    period = optional_count(text, ("attn_layer_period",)) or 8
    offset = text.get("attn_layer_offset", 4)
    return _where(layers, lambda i: i % period == offset, FULL, LINEAR)


def _bamba(text: Fields, layers: int) -> list[str]:
    found = _indices(text, "attn_layer_indices") if text.get("attn_layer_indices") else set()
    return _where(layers, found.__contains__, FULL, LINEAR)


def _lfm2(text: Fields, layers: int) -> list[str]:
    if text.get("full_attn_idxs") is None:
        return [FULL] * layers
    return _where(layers, _indices(text, "full_attn_idxs").__contains__, FULL, LINEAR)


def _kimi(text: Fields, layers: int) -> list[str]:
    own = text.part("linear_attn_config")
    full = _indices(own, "full_attn_layers", first=1)
    own.ignore("full_attn_layers decides", "kda_layers")
    return _where(layers, full.__contains__, FULL, LINEAR)


def _nemotron(text: Fields, layers: int) -> list[str]:
    name = "hybrid_override_pattern"
    return _of_list(name, text.get(name), layers, _LETTERS)


def _minimax(text: Fields, layers: int) -> list[str]:
    if text.get("attn_type_list"):
        return _of_list("attn_type_list", text["attn_type_list"], layers, {1: FULL, 0: LINEAR})
    return _where(layers, lambda i: i % 2 == 0, FULL, LINEAR)


def _minimax_m2(text: Fields, layers: int) -> list[str]:
    return (_minimax if text.get("attn_type_list") else _by_fields)(text, layers)


def _recurrent_gemma(text: Fields, layers: int) -> list[str]:
    pattern = text.get("block_types") or ["recurrent", "recurrent", "attention"]
    repeated = (list(pattern) * layers)[:layers]
    return _of_list("block_types", repeated, layers, {"attention": SLIDING, "recurrent": LINEAR})


def _bailing(text: Fields, layers: int) -> list[str]:
    group = count(text, ("layer_group_size",))
    return _where(layers, lambda i: (i + 1) % group == 0, FULL, LINEAR)


def _gated_delta(text: Fields, layers: int) -> list[str]:
    interval = optional_count(text, ("full_attention_interval",)) or 4
    return _where(layers, lambda i: (i + 1) % interval == 0, FULL, LINEAR)


def _all_states(_: Fields, layers: int) -> list[str]:
    return [LINEAR] * layers


def _all_both(_: Fields, layers: int) -> list[str]:
    return [BOTH] * layers


_RULES: dict[str, Callable[[Fields, int], list[str]]] = {
    "baichuan_m1": _baichuan,
    "bailing_hybrid": _bailing,
    "bamba": _bamba,
    "falcon_h1": _all_both,
    "falcon_mamba": _all_states,
    "granitemoehybrid": _all_states,
    "jamba": _jamba,
    "kimi_linear": _kimi,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "llama4_text": _llama4,
    "mamba": _all_states,
    "mamba2": _all_states,
    "mimo_v2": _mimo,
    "mimo_v2_flash": _mimo,
    "minimax": _minimax,
    "minimax_m2": _minimax_m2,
    "minimax_text_01": _minimax,
    "nemotron_h": _nemotron,
    "qwen3_5_moe_text": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_next": _gated_delta,
    "recurrent_gemma": _recurrent_gemma,
    "rwkv": _all_states,
    "xlstm": _all_states,
}


# -- layers that read another's K and V ----------------------------------------------------------
SHARING_FIELDS = ("num_kv_shared_layers", "kv_source_layers", "use_cla", "cla_share_factor")


def shared_layers(text: Fields, kinds: list[str]) -> dict[int, int]:
    """Return, for each layer without K and V of its own, the layer whose K and V it reads."""
    every = _sharing(text)
    if every > 1:
        owners = {layer: layer - layer % every for layer in range(len(kinds)) if layer % every}
        other = next((i for i, owner in owners.items() if kinds[i] != kinds[owner]), None)
        if other is not None:
            raise ValueError(
                f"use_cla of the config lets layer {other} ({kinds[other]}) read the K and V of "
                f"layer {owners[other]} ({kinds[owners[other]]}), must be of one kind"
            )
        return owners
    sources = text.get("kv_source_layers")
    if sources is not None:
        is_list = isinstance(sources, (list, tuple)) and len(sources) == len(kinds)
        if not is_list or not all(type(each) is int for each in sources):
            raise ValueError(
                f"kv_source_layers of the config is {sources!r}, must have a layer for each of "
                f"the {len(kinds)}"
            )
        return {layer: owner for layer, owner in enumerate(sources) if layer != owner}
    if not text.get("num_kv_shared_layers"):
        return {}
    shared = count(text, ("num_kv_shared_layers",))
    own = len(kinds) - shared
    last = {kind: layer for layer, kind in enumerate(kinds[: max(0, own)])}
    missing = sorted(set(kinds[max(0, own) :]) - set(last))
    if missing:
        raise ValueError(
            f"num_kv_shared_layers of the config is {shared} of {len(kinds)} layers, which leaves "
            f"no layer of {missing[0]} to read from"
        )
    return {layer: last[kinds[layer]] for layer in range(own, len(kinds))}


def _sharing(text: Fields) -> int:
    """Return the number of layers that share K and V, by Hunyuan's fields."""
    if flag(text, "use_cla", default=False):
        return count(text, ("cla_share_factor",))
    text.ignore("use_cla is off", "cla_share_factor")
    return 1


# ---- rows of K and V -----------------------------------------------------------------------------


#: K/V heads, width of K and width of V of a layer; None for the value of the params.
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
    """Return the row of each layer; a value is None if it equals the value of the shape.

    Parameters
    ----------
    text : Fields
        The config of the language model.
    shape : mapping
        Fields of KVCacheParams: n_kv_heads, head_dim, v_head_dim, is_mla.
    kinds : list of str
        The kind of each layer.

    Raises
    ------
    ValueError
        A field is out of range, or no row can hold the tensors of a layer.
    """
    if INDEXED not in kinds:
        text.ignore("no layer has an indexer", *_INDEX_FIELDS)
    if shape["is_mla"]:
        return _latent_rows(text, shape["head_dim"], kinds)
    if INDEXED in kinds:
        named = next((name for name in _INDEX_FIELDS if text.get(name)), "layer_types")
        raise ValueError(
            f"{named} of the config: layers of {text.get('model_type', 'this model')} keep the key "
            f"of an indexer and K and V of {shape['n_kv_heads']} heads, which no row holds; give "
            f"KVCacheParams the numbers"
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
    """Return the latent rows; the width of the shape includes the key of an indexer, if any."""
    if text.get("per_layer_config"):
        raise ValueError(
            "per_layer_config of the config makes latent rows differ, which one pool cannot hold; "
            "pass groups= of your own"
        )
    rows = list(zip(_lacking_keys(text, kinds), _lacking_positions(text, len(kinds)), strict=True))
    return [(None, width - sum(lacks), None) if any(lacks) else LIKE_PARAMS for lacks in rows]


def _lacking_positions(text: Fields, layers: int) -> list[int]:
    """Return the number of position elements that the rows of each layer lack."""
    with_rope = text.get("no_rope_layers") or [1] * layers  # 0: a layer without positions
    if not isinstance(with_rope, (list, tuple)) or len(with_rope) != layers:
        raise ValueError(
            f"no_rope_layers of the config is {with_rope!r}, must have 0 or 1 for each of the "
            f"{layers} layers"
        )
    width = count(text, ("qk_rope_head_dim",))
    return [0 if has_rope else width for has_rope in with_rope]


def _lacking_keys(text: Fields, kinds: list[str]) -> list[int]:
    """Return the number of indexer-key elements that the rows of each layer lack."""
    if INDEXED not in kinds:
        return [0] * len(kinds)
    text.ignore("it chooses tokens, and keeps nothing", "index_n_heads", "index_topk")
    width = index_width(text)
    return [0 if has_key else width for has_key in _own_indexers(text, kinds)]


def _own_indexers(text: Fields, kinds: list[str]) -> list[bool]:
    """Return true for each layer with an indexer; other layers use the indexer before them."""
    named = text.get("indexer_types")
    if named is None:
        return [kind == INDEXED for kind in kinds]
    is_list = isinstance(named, (list, tuple)) and len(named) <= len(kinds)
    if not is_list or not set(named) <= {"full", "shared"}:
        raise ValueError(
            f"indexer_types of the config is {named!r}, must be a list of 'full' and 'shared' for "
            f"{len(kinds)} layers"
        )
    # The list does not have the MTP layers; each MTP layer has an indexer.
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
        return width  # all heads have this width
    hidden = count(text, HIDDEN)
    if hidden % heads != 0:
        raise ValueError(
            f"{field(text, HIDDEN)[0]} of the config is {hidden}, not a multiple of the {heads} "
            f"of {field(text, _SLIDING_HEADS)[0]}; the config needs swa_head_dim"
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
                    f"must give {', '.join(_ROW_FIELDS)}: no group describes other layers"
                )
            return dict(fields)
    return {}
