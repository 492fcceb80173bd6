# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers, and their outputs without kvcore.

The weights are wide, so attention matters. The embeddings are not tied, because a tied tiny model
only repeats its input. Windows are shorter than the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import transformers

VOCABULARY = 199
WINDOW = 7

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HALVES = ["sliding_attention", "full_attention"] * 2

#: Family: name of the classes, fields of the config.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "qwen2": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _HALVES,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _HALVES,
            "query_pre_attn_scalar": 9,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": _HALVES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "cohere2": ("Cohere2", {"sliding_window": WINDOW, "layer_types": _HALVES}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"attention_multiplier": 0.4, "logits_scaling": 0.5}),
    "gpt2": ("GPT2", {}),
    "deepseek-v2": ("DeepseekV2", _MLA),
    "deepseek-v3": ("DeepseekV3", _MLA),
    "llama4": (
        "Llama4",
        {
            "head_dim": 16,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 80,
            "floor_scale": 80,
            "intermediate_size_mlp": 64,
        },
    ),
    "phimoe": (
        "Phimoe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            **_MOE,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
            "shared_expert_intermediate_size": 32,
        },
    ),
}

_PER_LAYER_INPUTS = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
_GEMMA_4 = _PER_LAYER_INPUTS | {"sliding_window": WINDOW, "head_dim": 8, "global_head_dim": 16}
_WINDOWS = {"sliding_window": WINDOW, "layer_types": _HALVES}

#: More families, in which some layers do not keep all tokens.
GROUPED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4-chunks": (
        "Llama4",
        FAMILIES["llama4"][1] | {"attention_chunk_size": 8, "floor_scale": 6},
    ),
    "gemma3n": (
        "Gemma3n",
        _PER_LAYER_INPUTS
        | {
            "head_dim": 16,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 6,
        },
    ),
    "gemma4": ("Gemma4", _GEMMA_4 | {"layer_types": _HALVES, "num_kv_shared_layers": 0}),
    "gemma4-shared": (
        "Gemma4",
        _GEMMA_4 | {"num_hidden_layers": 8, "layer_types": _HALVES * 2, "num_kv_shared_layers": 4},
    ),
    "olmo3": ("Olmo3", _WINDOWS),
    "qwen3-windows": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": WINDOW}),
    "exaone4": ("Exaone4", _WINDOWS),
    "ministral": ("Ministral", _WINDOWS | {"head_dim": 16}),
    "smollm3": ("SmolLM3", _WINDOWS | {"use_sliding_window": True}),
    "vaultgemma": ("VaultGemma", _WINDOWS | {"head_dim": 16, "query_pre_attn_scalar": 5}),
}

_MAMBA = {"mamba_d_state": 6, "mamba_dt_rank": 4}
_MAMBA_2 = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6}
_DELTA = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_MANY = {**_MOE, "shared_expert_intermediate_size": 32}
_BLOCKS = {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 32}

#: Families whose layers keep states: name of the classes, fields of the config.
STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-h1": ("FalconH1", {"mamba_d_ssm": 96, "head_dim": 16, **_MAMBA_2}),
    "bamba": ("Bamba", {"attn_layer_indices": [1], **_MAMBA_2}),
    "qwen3-next": ("Qwen3Next", {**_DELTA, **_MANY}),
    "jamba": (
        "Jamba",
        {**_MAMBA, "attn_layer_period": 4, "attn_layer_offset": 1, "num_experts": 2},
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": ["mamba", "moe", "attention", "mamba"],
            "head_dim": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            **_MAMBA_2,
        },
    ),
    "zamba": ("Zamba", {**_BLOCKS, **_MAMBA, "n_mamba_heads": 2, "attention_hidden_size": 128}),
    "zamba2": (
        "Zamba2",
        {
            **_BLOCKS,
            "hybrid_layer_ids": [1, 3],
            "mamba_d_state": 6,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
    "lfm2": ("Lfm2", {"full_attn_idxs": [1, 3]}),
    "lfm2-moe": (
        "Lfm2Moe",
        {**_MOE, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    ),
    "lfm3": (
        "Lfm3",
        {
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
            "sliding_window": WINDOW,
            "head_dim": 16,
        },
    ),
    "olmo-hybrid": ("OlmoHybrid", {**_DELTA, "linear_num_key_heads": 4}),
    "qwen3.5": ("Qwen3_5", _DELTA),
    "qwen3.5-moe": ("Qwen3_5Moe", {**_DELTA, **_MANY}),
    "kimi-linear": (
        "KimiLinear",
        {
            **_MLA,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "mlp_layer_types": ["dense"] * 4,
        },
    ),
    "bailing-hybrid": (
        "BailingHybrid",
        {
            **_MLA,
            "num_hidden_layers": 6,
            "head_dim": 8,
            "q_lora_rank": 24,
            "num_experts": 4,
        },
    ),
}
_TEXT = {"Gemma3", "Gemma3n", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe"}


def exists(family: str) -> bool:
    """Return true if this transformers version has a family and passes packed batches through."""
    name, _ = STATEFUL[family]
    if not hasattr(transformers, f"{name}ForCausalLM"):
        return False
    # Before 5.17 Falcon-H1 cannot pass foreign arguments to its layers.
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    return name != "FalconH1" or version >= (5, 17)


def build(family: str, seed: int = 0, **fields: Any) -> Any:
    """Make a model of a family in f32 on the CPU that never ends its answers."""
    name, own = (FAMILIES | GROUPED | STATEFUL)[family]
    kind = f"{name}Text" if name in _TEXT else name
    config = getattr(transformers, f"{kind}Config")(**(_COMMON | own | fields))
    torch.manual_seed(seed)
    maker = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    model = getattr(transformers, maker)(config).eval()
    if name == "Gemma2":
        model.set_attn_implementation("eager")  # transformers' other implementations ignore the cap
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "A_log" in parameter_name:
                parameter.uniform_(-4.0, -1.0)  # states that outlast a chunk
            elif parameter.ndim >= 2:
                parameter.normal_(0.0, 0.25)
            elif "sinks" in parameter_name:
                parameter.uniform_(-1.0, 3.0)
            elif "norm" not in parameter_name and "ln" not in parameter_name:
                parameter.normal_(0.0, 0.1)
    return model


@cache
def model_of(family: str) -> Any:
    """Return the model of a family that all tests share; tests must not change it."""
    return build(family)


def prompts_of(shared: int = 33, longest: int = 53, seed: int = 1) -> list[list[int]]:
    """Return prompts of 1 to `longest` tokens, half of them with a common prefix."""
    numbers = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = torch.randint(1, VOCABULARY, (count,), generator=numbers).tolist()
        return drawn

    prefix = tokens(shared)
    alone = [tokens(n) for n in (1, 7, 16, 30)]
    return alone + [prefix + tokens(n) for n in (1, 5, longest - shared)]


def plain(model: Any, prompts: Sequence[list[int]], new: int) -> list[list[int]]:
    """Return the greedy output of model.generate for each prompt separately."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


@cache
def expected_of(family: str, new: int) -> list[list[int]]:
    """Return ``plain`` of a family's shared model for ``prompts_of()``."""
    return plain(model_of(family), prompts_of(), new)
