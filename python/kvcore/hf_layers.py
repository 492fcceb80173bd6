# SPDX-License-Identifier: Apache-2.0
"""What each layer of a model keeps, by its Hugging Face config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcore.groups.checks import MOST_LAYERS
from kvcore.hf_fields import Config, count, optional_count, part

__all__ = [
    "CHUNKED",
    "FULL",
    "KEEPS",
    "SLIDING",
    "STATES",
    "STATE_FIELDS",
    "layer_kinds",
    "shared_layers",
]

#: Kinds of layers that keep K and V: all of them, of a window or of a chunk.
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
#: One that keeps a state, one that keeps both, one that keeps neither.
LINEAR, BOTH, NEITHER = "linear_attention", "hybrid", "mlp"
_BOTH_SLIDING = "hybrid_sliding"

_NAMES = {
    "attention": FULL,
    "full_attention": FULL,
    # The keys of their indexers are not K and V, and not counted.
    "indexed_attention": FULL,
    "deepseek_sparse_attention": FULL,
    "qwen_sparse_attention": FULL,
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

#: Which K and V those keep that do.
KEEPS = {FULL: FULL, SLIDING: SLIDING, CHUNKED: CHUNKED, BOTH: FULL, _BOTH_SLIDING: SLIDING}
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
# Rarer ones, which convolutions of encoders have too.
_MORE_STATE_FIELDS = ("number_of_conv_states", "conv_kernel_size", "cca_time0")

# Every n-th layer attends to everything, the others have a window: what n is by default.
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
# Every layer has the window, where there is one.
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


def layer_kinds(text: Config, layers: int) -> list[str]:
    """Return the kind of each layer.

    Raises
    ------
    ValueError
            A kind of layer that keeps something else, none that keeps K and V, more or fewer kinds
        than layers.
    """
    if layers > MOST_LAYERS:
        raise ValueError(
            f"num_layers is {layers}, must be at most {MOST_LAYERS} where layers are told apart"
        )
    named = next((name for name in ("layer_types", "layers_block_type") if text.get(name)), None)
    if named is not None:
        kinds = _of_list(named, text[named], layers)
    else:
        kinds = _RULES.get(str(text.get("model_type")), _by_fields)(text, layers)
    if KEEPS.keys().isdisjoint(kinds):
        raise ValueError(
            f"all layers of {text.get('model_type', 'this model')} keep states or nothing: it has "
            f"no K and V to keep in pages, and kvcore no use for it; keep its states yourself"
        )
    return kinds


def _of_list(name: str, given: Any, layers: int, names: dict[Any, str] = _NAMES) -> list[str]:
    if not isinstance(given, (list, tuple, str)):
        raise ValueError(f"{name} of the config is {given!r}, must be a list")
    if len(given) != layers:
        raise ValueError(f"{name} of the config has {len(given)} entries, must have {layers}")
    unknown = [kind for kind in given if not isinstance(kind, str | int) or kind not in names]
    if unknown:
        raise ValueError(
            f"{name} of the config holds {unknown[0]!r}, must hold some of "
            f"{', '.join(map(repr, names))}: what other layers keep is in no group"
        )
    return [names[kind] for kind in given]


def _where(layers: int, is_first: Callable[[int], bool], first: str, other: str) -> list[str]:
    return [first if is_first(i) else other for i in range(layers)]


def _indices(config: Config, name: str, first: int = 0) -> set[int]:
    """Return the layers that a field lists, counted from 0."""
    given = config.get(name)
    if not isinstance(given, (list, tuple)) or not all(type(each) is int for each in given):
        raise ValueError(f"{name} of the config is {given!r}, must be a list of layers")
    return {each - first for each in given}


# -- windows -------------------------------------------------------------------------------------
def _by_fields(text: Config, layers: int) -> list[str]:
    """Tell by the fields that many families have; a window that nobody claims counts as none."""
    kind = text.get("model_type")
    fields = (*STATE_FIELDS, *_MORE_STATE_FIELDS)
    states = next((name for name in fields if text.get(name) is not None), None)
    if states is not None:
        raise ValueError(
            f"{states} of the config says that layers of {kind or 'this model'} keep a state, and "
            f"nothing which; the config needs layer_types"
        )
    window = optional_count(text, ("sliding_window",)) if text.get("sliding_window") else None
    if window is None or text.get("use_sliding_window") is False:
        return [FULL] * layers
    if kind in _EVERY or text.get("sliding_window_pattern") is not None:
        return _alternating(text, layers)
    if text.get("use_sliding_window") and text.get("max_window_layers") is not None:
        begin = text["max_window_layers"]
        if kind in ("qwen2_moe", "qwen2_5_moe"):
            return _where(layers, lambda i: i % 2 == 0 and i < begin, SLIDING, FULL)
        if kind != "qwen3_moe":
            return _where(layers, lambda i: i >= begin, SLIDING, FULL)
    return [SLIDING if kind in _ALL_WINDOWED else FULL] * layers


def _alternating(text: Config, layers: int) -> list[str]:
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


def _llama4(text: Config, layers: int) -> list[str]:
    if text.get("attention_chunk_size") is None:
        return [FULL] * layers
    if text.get("no_rope_layers"):
        return _of_list("no_rope_layers", text["no_rope_layers"], layers, {1: CHUNKED, 0: FULL})
    interval = optional_count(text, ("no_rope_layer_interval",)) or 4
    return _where(layers, lambda i: (i + 1) % interval == 0, FULL, CHUNKED)


def _mimo(text: Config, layers: int) -> list[str]:
    if text.get("hybrid_layer_pattern"):
        pattern = text["hybrid_layer_pattern"]
        return _of_list("hybrid_layer_pattern", pattern, layers, {1: SLIDING, 0: FULL})
    return _by_fields(text, layers)


# -- states --------------------------------------------------------------------------------------
def _jamba(text: Config, layers: int) -> list[str]:
    period = optional_count(text, ("attn_layer_period",)) or 8
    offset = text.get("attn_layer_offset", 4)
    return _where(layers, lambda i: i % period == offset, FULL, LINEAR)


def _bamba(text: Config, layers: int) -> list[str]:
    found = _indices(text, "attn_layer_indices") if text.get("attn_layer_indices") else set()
    return _where(layers, found.__contains__, FULL, LINEAR)


def _lfm2(text: Config, layers: int) -> list[str]:
    if text.get("full_attn_idxs") is None:
        return [FULL] * layers
    return _where(layers, _indices(text, "full_attn_idxs").__contains__, FULL, LINEAR)


def _kimi(text: Config, layers: int) -> list[str]:
    full = _indices(part(text, "linear_attn_config"), "full_attn_layers", first=1)
    return _where(layers, full.__contains__, FULL, LINEAR)


def _nemotron(text: Config, layers: int) -> list[str]:
    name = "hybrid_override_pattern"
    return _of_list(name, text.get(name), layers, _LETTERS)


def _minimax(text: Config, layers: int) -> list[str]:
    if text.get("attn_type_list"):
        return _of_list("attn_type_list", text["attn_type_list"], layers, {1: FULL, 0: LINEAR})
    return _where(layers, lambda i: i % 2 == 0, FULL, LINEAR)


def _recurrent_gemma(text: Config, layers: int) -> list[str]:
    pattern = text.get("block_types") or ["recurrent", "recurrent", "attention"]
    repeated = (list(pattern) * layers)[:layers]
    return _of_list("block_types", repeated, layers, {"attention": SLIDING, "recurrent": LINEAR})


def _bailing(text: Config, layers: int) -> list[str]:
    group = count(text, ("layer_group_size",))
    return _where(layers, lambda i: (i + 1) % group == 0, FULL, LINEAR)


def _gated_delta(text: Config, layers: int) -> list[str]:
    interval = optional_count(text, ("full_attention_interval",)) or 4
    return _where(layers, lambda i: (i + 1) % interval == 0, FULL, LINEAR)


def _all_states(_: Config, layers: int) -> list[str]:
    return [LINEAR] * layers


def _all_both(_: Config, layers: int) -> list[str]:
    return [BOTH] * layers


_RULES: dict[str, Callable[[Config, int], list[str]]] = {
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
    "minimax_text_01": _minimax,
    "nemotron_h": _nemotron,
    "qwen3_5_moe_text": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_next": _gated_delta,
    "recurrent_gemma": _recurrent_gemma,
    "rwkv": _all_states,
}


# -- layers that read another's K and V ----------------------------------------------------------
def shared_layers(text: Config, kinds: list[str]) -> dict[int, int]:
    """Return for each layer that keeps nothing of its own the one whose K and V it reads."""
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
            f"none of {missing[0]} to read from"
        )
    return {layer: last[kinds[layer]] for layer in range(own, len(kinds))}
