# SPDX-License-Identifier: Apache-2.0
"""Refuse fields of a config that no rule reads and that may change the cache."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from kvcore.layers.hf.fields import Fields, Notes

__all__ = ["looks_cached", "refuse_unread", "without_assumed"]

#: Words in the names of fields that change a cache. A rule has to read a field whose name matches.
_CACHED = re.compile(
    r"""
    kv | key_?value | cache | latent                                    # what is kept
    | head | group | mqa | gqa | mha | multi_?query                     # in rows of how many heads
    | (?:^|_)(?:k|v|dk|dv|key|keys|value|values|mla|mem|n_?rep)(?:_|$)
    | (?:attn|attention|(?:^|_)qk)_?(?:dim|size|width|hidden|inner|dtype|bits|precision|quant)
    | shar(?:e|ing) | reuse | cross | (?:^|_)cla(?:_|$) | yoco          # whose it is
    | self_?decoder | (?:source|owner)_?layer
    | compress | pool | index | indic | topk_?block | block_?topk       # what stands for several
    | token_?merg | anchor | landmark | (?:^|_)(?:clsa|dsa|nsa|csa|hca|moba|ring)(?:_|$)
    | window | sliding | swa | local | global | chunk | sparse | sink   # how long it is kept
    | strid | dilat | (?:^|_)span | block_?size | stream | evict | retain | look_?back | budget
    | (?:^|_)band | (?:meta|memory|prefix|persistent|register)_tokens
    | loop | recur | cycle | repeat | unroll | iterat | iters | universal   # how often it is made
    | prelude | ponder | (?:^|_)(?:ut|pass|passes|steps|rounds|depth|coda)(?:_|$)
    | conv(?!ers|ert) | state | ssm | mamba | rnn | lru | rwkv | delta  # what is kept in its place
    | retention | linear | hybrid | gdn | kda | gla | memory | kernel_size
    | retnet | hyena | titan | (?:^|_)(?:ttt|fir)(?:_|$)
    | (?:attn|attention)_?free | (?:^|_)(?:no|skip|without)_(?:attn|attention)
    | layers | (?:layer|attn|attention|block)_?(?:type|kind|pattern)    # in which layers
    | layer_?(?:group|map|id|repeat|count|num|list|mult) | block_?(?:config|override|map)
    | (?:^|_)(?:blocks|stages|stacks)(?:_|$)
    | (?:attn|attention)_?(?:layer|period|offset|every|interval|mode|method|schedule|map)
    | mtp | nextn | draft | eagle | medusa | speculat
    """,
    re.VERBOSE,
)
# A field with any of these words is about the cache, unless its whole name is known.
_KV = re.compile(r"(?<!q)(?<!rw)kv|cache|key_?value")
_PLAIN_WORDS = re.compile(
    _KV.pattern + r"|cross|compress|window|sliding|loop|recur|latent|index|shar.*lay"
)

#: Names that match and do not change a cache, by reason.
_NAMES: dict[str, tuple[str, ...]] = {
    "how it is run, not what is kept": (
        *("use_cache", "cache_implementation", "use_cache_kernel", "chunk_size_feed_forward"),
        *("use_kv_cache", "use_memory_efficient_attention", "memory_efficient_attention"),
        *(
            "chunk_size_lm_head",
            "top_k",
            "output_hidden_states",
            "return_last_states",
            "num_beam_groups",
        ),
        *("keys_to_ignore_at_inference", "for_llm_compressor", "use_mamba_kernels", "use_mambapy"),
        *("use_mem_eff_path", "mamba_chunk_size", "max_inference_chunksize"),
    ),
    "experts": (
        *("n_group", "topk_group", "group_limited_greedy", "shared_intermediate_size"),
        *("mlp_layer_types", "mlp_only_layers", "num_dense_layers", "first_k_dense_replace"),
        *("decoder_sparse_step", "moe_layer_start_index", "moe_layer_end_index"),
        *("moe_latent_size", "heads_per_ngram", "interleave_moe_layer_step"),
    ),
    "embeddings and heads of the vocabulary": (
        *("lm_head", "rm_head", "lm_head_multiplier", "freeze_lm_head", "add_classification_head"),
        *("enable_lm_head_fp32", "pool_type"),
        *("use_embedding_sharing", "share_encoder_decoder_embeddings", "use_shared_embeddings"),
        *("shared_input_output_embedding", "share_embeddings_and_output_weights", "tie_lm_head"),
        *("share_input_output_layers", "classification_head", "value_head"),
    ),
    "how K and V are computed, not how large they are": (
        *("attention_layer_norm_with_affine", "max_attn_value", "pad_key_length"),
        *("key_multiplier", "attention_value_scale", "scale_attn_by_inverse_layer_idx"),
        *("apply_query_key_layer_scaling", "scale_depth", "clip_qkv", "interleaved_qkv"),
        *("num_attention_heads_per_layer", "share_q_dim", "n_layers_per_attn_res_block"),
        *("add_bias_linear", "ple_conv_kernel_size", "block_group_size", "mlp_hidden_act"),
    ),
    "how a state is computed, not how large it is": (
        *("ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers", "mamba_dt_rank"),
        *("mamba_norm_before_gate", "mamba_inner_layernorms", "mamba_use_mlp"),
        *("linear_attn_alpha_factor", "linear_attn_beta_factor", "linear_a_log_max"),
        *("linear_a_log_min", "linear_allow_neg_eigval", "linear_dt_init_floor", "linear_dt_max"),
        *("linear_dt_min", "linear_lower_bound", "kda_lower_bound", "kda_safe_gate"),
        "layernorm_linear_attention_alpha",
    ),
    "of images, video and sound": (
        *("insert_layer_id", "drop_vision_last_layer", "max_value_projector_patch_to_query_dict"),
        *("do_pooling", "projector_pooling_ratio", "use_mean_pooling", "double_latent"),
        *("latent_query_num", "seconds_per_chunk", "cross_attention_frequency", "pooling"),
        *("embd_layer", "deepstack_visual_indexes", "window_kernel_size", "hidden_stride"),
        "merge_kernel_size",
    ),
    "pruned, frozen or trained": (
        *("freeze_text_layers", "freeze_vision_layers", "layers_to_transform"),
        *("unfreeze_layers", "freeze_layers"),
    ),
}
#: Patterns of whole names that match and do not change a cache, by reason. They do not apply to
#: names with a word of `_KV`.
_OF_OTHERS: dict[str, str] = {
    "of images, video and sound": (
        r"(?:vision|visual|vit|image|img|video|audio|speech|speaker|mm|spatial|vq|qformer|perceiver"
        r"|projector|resampler|aligner|depth_decoder|protein|talker|code2wav|token2wav|gen_vision"
        r"|gen_head|gen_aligner|high_res|deepstack)(?:_.*)?|.*_(?:vision|audio)_config"
        r"|.*_(?:processor|lora)|text_encoder|audio_encoder"
    ),
    "ids of tokens": (
        r".*_token_(?:index|ids?)|(?:pad|ignore|mask|unk|bos|eos)_index|.*token_indices"
    ),
}
#: More patterns of this kind. They do not apply to names with a word of `_PLAIN_WORDS`.
_PATTERNS: dict[str, str] = {
    "experts": r".*(?:expert|moe|router|routed).*",
    "positions": r"(?!qk_).*(?:rope|rotary|nope).*|max_position.*",
    "weights, norms and training": (
        r".*_(?:bias|dropout|eps|epsilon|init|init_value|init_std|prob|pdrop|act|activation|norm"
        r"|layer_?norm|alpha|embds?)|(?:layer_?norm|init|aux|z)_.*|.*(?:layerdrop|layer_?scale).*"
    ),
}
#: Names that match and do not change a cache in models of one type.
_OF_MODELS: dict[str, tuple[str, ...]] = {
    "arctic": ("enc_index",),
    "big_bird": ("attention_type", "block_size", "num_random_blocks"),
    "cohere2": ("order_of_interleaved_layers",),
    "dbrx": ("ffn_config",),
    "doge": ("keep_window_size",),
    "evolla": ("aligner_num_add_layers",),
    "gpt_neo": ("window_size",),
    "hrm_text": ("H_cycles", "L_cycles", "L_bp_cycles", "num_layers_per_stack"),
    "idefics": ("cross_layer_interval",),
    "llada": ("block_type",),
    "minimax": ("block_size",),
    "modernbert-decoder": ("local_attention",),
    "molmo2": ("adapter_config",),
    "nemotron_h": ("chunk_size",),
    "openelm": ("num_gqa_groups", "qkv_multipliers"),
    "phi3small": (
        *("blocksparse_block_size", "blocksparse_homo_head_pattern", "blocksparse_vert_stride"),
        *("blocksparse_num_local_blocks", "blocksparse_triton_kernel_block_size"),
        "dense_attention_every_n_layers",
    ),
    "xlnet": ("attn_type", "mem_len"),
    "zamba": ("attention_hidden_size",),
    "zamba2": (
        *("num_mem_blocks", "use_mem_rope", "use_shared_attention_adapter", "kv_channels"),
        *("mamba_expand", "attention_hidden_size", "chunk_size"),
    ),
}
#: Fields that do not change a cache if they have this value.
_OFF: dict[str, Any] = {
    "use_cache_quantization": False,
    "compression_ratio": 1,
    "sliding_window_size": -1,
}
#: In this object only a name with a word of `_KV` is about the cache.
_QUANTIZATION = re.compile(r"(?:^|\.)quantization_config\.")

_WHOLE_NAMES = {name: why for why, names in _NAMES.items() for name in names}
_MTP = re.compile(r"(?:^|_)(?:mtp|nextn)(?:_|$)")


def looks_cached(name: str) -> bool:
    """Return true if a field with this name may change the cache."""
    return _CACHED.search(_spelled(name)) is not None


def _spelled(name: str) -> str:
    """Return a name in lower case, with underscores between its words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()


def _reason(name: str, value: Any, models: Container[str], *, mtp: bool) -> str | None:
    """Return the reason why a field does not change the cache; None without a known reason."""
    spelled = _spelled(name)
    if spelled in _WHOLE_NAMES:
        return _WHOLE_NAMES[spelled]
    if any(name in names and model in models for model, names in _OF_MODELS.items()):
        return "known of this type of model"
    if name in _OFF and value == _OFF[name]:
        return "off"
    if not mtp and _MTP.search(spelled):
        return "of MTP layers, which are not counted"
    for word, patterns in ((_KV, _OF_OTHERS), (_PLAIN_WORDS, _PATTERNS)):
        if not word.search(spelled):
            found = (why for why, known in patterns.items() if re.fullmatch(known, spelled))
            why = next(found, None)
            if why is not None:
                return why
    return None


# -- fields that the caller leaves out -----------------------------------------------------------
def without_assumed(
    config: Mapping[str, Any], assume: Mapping[str, str] | None
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return a config without the fields that the caller ignores, and their names.

    Raises
    ------
    TypeError
        `assume` is not a mapping.
    ValueError
        A value is not "ignored", or the config lacks a field.
    """
    if assume is None:
        return config, ()
    if not isinstance(assume, Mapping):
        raise TypeError(
            f"assume is a {type(assume).__name__}, must be a mapping of a field's name to 'ignored'"
        )
    for name, what in assume.items():
        if what != "ignored":
            raise ValueError(f"assume says {what!r} of {name!r}, must say 'ignored'")
        config = _without(config, str(name), str(name).split("."))
    return config, tuple(map(str, assume))


def _without(fields: Mapping[str, Any], name: str, path: list[str]) -> Mapping[str, Any]:
    inside = fields.get(path[0]) if isinstance(fields, Mapping) else None
    if not isinstance(fields, Mapping) or path[0] not in fields:
        raise ValueError(
            f"assume names {name!r}, which the config does not have; remove it, or write the name "
            f"as in the error about the field"
        )
    rest = {key: value for key, value in fields.items() if key != path[0]}
    return rest if len(path) == 1 else rest | {path[0]: _without(inside or {}, name, path[1:])}


# -- fields that no rule reads -------------------------------------------------------------------
def refuse_unread(config: Mapping[str, Any], notes: Notes, text: Fields, *, mtp: bool) -> None:
    """Refuse a config with fields that no rule read and that may change the cache.

    Parameters
    ----------
    config : mapping
        The whole config.
    notes : Notes
        The fields that were read. The call adds the fields whose names suggest the cache, but that
        do not change it, to `ignored`.
    text : Fields
        The config of the language model.
    mtp : bool
        True if MTP layers are counted.

    Raises
    ------
    ValueError
        A field that no rule read may change the cache.
    """
    unread = dict(_unread(config, notes, text, mtp=mtp))
    if not unread:
        return
    given = ", ".join(f"{name} of the config is {_SHORT.repr(unread[name])}" for name in unread)
    assume = ", ".join(f"{name!r}: 'ignored'" for name in unread)
    options = " ".join(f"--assume {name}" for name in unread)
    it = "it" if len(unread) == 1 else "them"
    raise ValueError(
        f"{given}: by the name this may change the cache, and kvcore has no rule for {it}; give "
        f"KVCacheParams the numbers, or, if the cache is the same without {it}, pass "
        f"assume={{{assume}}} (kvcore plan {options})"
    )


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def _unread(
    config: Mapping[str, Any], notes: Notes, text: Fields, *, mtp: bool
) -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of the fields that no rule read and that may change the cache."""
    models = {str(value) for name, value in notes.read.items() if name.endswith("model_type")}
    entered = _objects_of((*notes.read, text.path))
    objects = [("", config)]
    for path, fields in objects:  # the loop appends the objects in the fields
        for key, value in fields.items():
            name, full = str(key), f"{path}{key}"
            if full in notes.ignored or (full in notes.read and full not in entered):
                continue
            if _QUANTIZATION.search(full):
                looks, why = _KV.search(_spelled(name)) is not None, None
            else:
                looks, why = looks_cached(name), _reason(name, value, models, mtp=mtp)
            if why is None and not path and text.path and text.holds(name, value):
                why = "as in the language model"
            if why is not None:
                if looks:
                    notes.ignored[full] = why
            elif looks and full not in entered and not _says_nothing(value):
                yield full, value
            else:
                objects.extend(_objects(full, value))


def _objects_of(names: Iterable[str]) -> set[str]:
    """Return the paths of all objects that contain the fields."""
    found: set[str] = set()
    for name in names:
        parts = name.split(".")
        found.update(".".join(parts[:i]) for i in range(1, len(parts)))
    return found


def _says_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple, Mapping, str)) and len(value) == 0)


def _objects(name: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects in a field, with their paths."""
    if isinstance(value, Mapping):
        yield f"{name}.", value
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            if isinstance(each, Mapping):
                yield f"{name}[{i}].", each
