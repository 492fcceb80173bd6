# SPDX-License-Identifier: Apache-2.0
"""Configs of every decoder of the transformers library, with an unknown field."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest

from conftest import require

require("torch")
require("transformers")

from hf_decoders import decoders, whole_configs  # noqa: E402
from kvcore import KVCacheParams  # noqa: E402
from kvcore.layers.hf.defaults import CLASS_DEFAULTS  # noqa: E402
from kvcore.layers.hf.fields import KV_HEADS  # noqa: E402

#: Classes whose defaults are refused although their layers keep K and V, and the reasons.
REFUSED = {
    "bart": "cross attention",
    "bigbird_pegasus": "cross attention",
    "blenderbot": "cross attention",
    "blenderbot-small": "cross attention",
    "dory": "several times",
    "dots3_note": "latent rows differ",
    "dots3_note_text": "latent rows differ",
    "florence2": "cross attention",
    "gemma4_unified_assistant": "no layer of full_attention to read from",
    "glm4_moe": "not a multiple of the 96",
    "glm4v_moe": "not a multiple of the 96",
    "glm5_next": "qk_rope_head_dim of the config is 0",
    "hy_v4": "must agree within 5 %",
    "hy_v4_vl": "must agree within 5 %",
    "inkling2": "the arrays of the states",
    "inkling2_loop": "the arrays of the states",
    "inkling2_loop_text": "the arrays of the states",
    "inkling2_text": "the arrays of the states",
    "inkling_mm_model": "the arrays of the states",
    "inkling_text": "the arrays of the states",
    "kosmos-2": "lacks num_hidden_layers",
    "kosmos-2.5": "lacks num_hidden_layers",
    "marian": "cross attention",
    "mbart": "cross attention",
    "mistral_large4": "must agree within 5 %",
    "mllama": "cross attention",
    "musicgen": "cross attention",
    "musicgen_melody": "cross attention",
    "mvp": "cross attention",
    "pegasus": "cross attention",
    "pix2struct": "cross attention",
    "plbart": "cross attention",
    "pp_formulanet": "cross attention",
    "prophetnet": "cross attention",
    "qwen3_omni_moe_thinker": "not a multiple of the 28",
    "qwen4_exp": "which no row holds",
    "qwen4_exp_text": "which no row holds",
    "reformer": "attn_layers of the config",
    "t5gemma2": "cross attention",
    "trocr": "lacks num_hidden_layers",
    "udop": "cross attention",
    "vision-encoder-decoder": "cross attention",
    "whisper": "cross attention",
    "xglm": "lacks num_attention_heads",
    "xlm": "lacks hidden_size",
    "zaya": "the arrays of the states",
}
STATES_ALONE = "keep states or nothing"

#: Words about the cache, and the words that may surround them.
WORDS = (
    *("kv", "kv_heads", "key_value", "cache", "cache_dtype", "latent", "head_groups", "gqa"),
    *("query_groups", "head_width", "share", "shared_layers", "sharing", "cross_layer", "reuse"),
    *("compress", "compression", "pool", "index", "indexer", "conv", "loop", "loops", "recurrent"),
    *("recurrence", "recursion", "depth", "cycles", "repeat", "window", "sliding", "swa", "local"),
    *("global", "chunk", "sparse", "sink", "stride", "state", "ssm", "linear", "hybrid", "layers"),
)
BEFORE = ("", "num_", "n_", "use_", "max_", "attn_", "new_")
BEHIND = ("", "_size", "_factor", "_ratio", "_per_layer", "_map", "_v2")
VALUES: tuple[Any, ...] = (0, 1, 7, 0.5, True, False, "all", [0, 1], {"a": 1})
HARMLESS = (
    *("brand_new_flag", "rope_theta_v2", "hidden_drop", "router_noise", "tokenizer_kind"),
    *("vision_kwargs", "moe_shared_gain", "embedding_gain", "attention_dropout_v2", "loss_weight"),
)


def read(fields: dict[str, Any], **rest: Any) -> KVCacheParams:
    return KVCacheParams.from_hf_config(fields, "bfloat16", page_size=16, **rest)


@functools.cache
def taken() -> dict[str, tuple[dict[str, Any], KVCacheParams]]:
    """Return the classes whose defaults are read, with their fields."""
    found = {}
    for kind, config in whole_configs().items():
        fields = config.to_dict()
        try:
            found[kind] = fields, read(fields)
        except ValueError:
            continue
    return found


def test_no_class_is_refused_but_those_that_keep_something_else() -> None:
    """Whole configs and configs of their language models need no assumption."""
    wrong = {}
    for kind, whole in whole_configs().items():
        for fields in (whole.to_dict(), decoders()[kind].to_dict()):
            try:
                read(fields)
            except ValueError as error:
                text = str(error)
                if STATES_ALONE not in text and REFUSED.get(kind, "?") not in text:
                    wrong[kind] = text
    assert wrong == {}


def test_class_with_an_unknown_field_of_the_cache_is_refused() -> None:
    drawn = random.Random(20_261_127)
    silent = {}
    for kind, (fields, _) in taken().items():
        for inside in (None, *(name for name in ("text_config",) if fields.get(name))):
            name = drawn.choice(BEFORE) + drawn.choice(WORDS) + drawn.choice(BEHIND)
            place = fields if inside is None else fields[inside]
            if name in place or name in KV_HEADS:
                continue
            changed = {**place, name: drawn.choice(VALUES)}
            config = changed if inside is None else {**fields, inside: changed}
            try:
                read(config)
                silent[kind] = changed[name], name
            except ValueError as error:
                if name not in str(error):
                    silent[kind] = str(error), name
            read(config, assume={name if inside is None else f"{inside}.{name}": "ignored"})
    assert silent == {}


def test_every_word_is_one_of_the_cache() -> None:
    fields, plain = taken()["llama"]
    silent = []
    for word in WORDS:
        for before in BEFORE:
            for behind in BEHIND:
                name = before + word + behind
                if name == "use_cache":
                    continue
                try:
                    if read({**fields, name: 3}) == plain:
                        silent.append(name)
                except ValueError as error:
                    if name not in str(error):
                        silent.append(name)
    assert silent == []


def test_class_with_a_harmless_field_is_taken() -> None:
    drawn = random.Random(7)
    for fields, plain in taken().values():
        assert read({**fields, drawn.choice(HARMLESS): drawn.choice(VALUES)}) == plain


# -- the defaults of a class ---------------------------------------------------------------------
def test_defaults_are_those_of_the_classes() -> None:
    wrong = {}
    for kind, config in decoders().items():
        known = CLASS_DEFAULTS.get(config.model_type)
        for name, value in (known or {}).items():
            own = getattr(type(config), name, dataclasses.MISSING)
            if own != value:
                wrong[kind, name] = (own, value)
    assert wrong == {}
    assert len(CLASS_DEFAULTS) > 150


@pytest.mark.parametrize("is_nested", [False, True])
def test_field_that_a_config_leaves_to_its_class_costs_nothing(is_nested: bool) -> None:
    """Without a field, a config is refused, or its cache is at least as large."""
    smaller = {}
    for kind, config in decoders().items():
        fields = config.to_dict()
        try:
            whole = read(fields).bytes_per_token
        except ValueError:
            continue
        for name, value in CLASS_DEFAULTS.get(config.model_type, {}).items():
            if fields.get(name) != value:
                continue
            silent = {key: value for key, value in fields.items() if key != name}
            try:
                made = read({"text_config": silent} if is_nested else silent).bytes_per_token
            except ValueError:
                continue
            if made < whole:
                smaller[kind, name] = (made, whole)
    assert smaller == {}
