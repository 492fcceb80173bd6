# SPDX-License-Identifier: Apache-2.0
"""Configs of the models in vLLM's scheduler tests, as a local cache of the hub has them.

The tests never load weights; they need a config that defines the model family. These are small
models of the same families.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "torch_dtype": "float16",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "torch_dtype": "float16",
    "text_config": {
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "vocab_size": 32064,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
QWEN_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "hidden_size": 2048,
        "max_position_embeddings": 128000,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
}
QWEN_NEXT = QWEN3 | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
}
#: A tokenizer of one word: the tests pass token ids.
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"},
}
MODELS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": OPT,
    "facebook/opt-350m": OPT | {"hidden_size": 1024, "num_attention_heads": 16},
    "llava-hf/llava-1.5-7b-hf": LLAVA,
    "Qwen/Qwen2.5-VL-3B-Instruct": QWEN_VL,
    "Qwen/Qwen3-0.6B": QWEN3,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": QWEN_NEXT,
}
REVISION = "0" * 40


def write_hub(folder: Path) -> None:
    """Write a cache of the hub with the configs of `MODELS`, for ``HF_HUB_CACHE``."""
    for name, config in MODELS.items():
        model = folder / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (snapshot / "config.json").write_text(json.dumps(config))
        (snapshot / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        (snapshot / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"})
        )
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(REVISION)


def describe_models() -> None:
    """Make vLLM derive a model class's properties from its name: the classes need kernels."""
    from vllm.model_executor.models import registry

    described = {
        "attn_type": "decoder",
        "default_seq_pooling_type": "LAST",
        "default_tok_pooling_type": "ALL",
        "score_type": "bi-encoder",
        "is_text_generation_model": True,
        "supports_pp": True,
        "supports_lora": True,
        "supported_video_pruning_methods": (),
    }

    def inspect_model_cls(self: Any) -> Any:
        name = self.class_name
        flags: dict[str, Any] = dict.fromkeys(registry._ModelInfo.__annotations__, False)
        flags |= described | {"architecture": name}
        flags["supports_multimodal"] = name.endswith("ForConditionalGeneration")
        flags["is_hybrid"] = flags["has_inner_state"] = "Next" in name
        return registry._ModelInfo(**flags)

    registry._LazyRegisteredModel.inspect_model_cls = inspect_model_cls


def describe_images() -> None:
    """Make vLLM size its encoder cache for images of 576 tokens: real processors need weights."""
    from vllm.config import ModelConfig
    from vllm.v1.core.encoder_cache_manager import compute_mm_encoder_budget
    from vllm.v1.core.sched import scheduler

    def budget(config: Any, registry: object) -> SimpleNamespace:
        most = {"image": 576}
        compute, cache = compute_mm_encoder_budget(config.scheduler_config, most)
        return SimpleNamespace(
            encoder_compute_budget=compute, encoder_cache_size=cache, mm_max_toks_per_item=most
        )

    ModelConfig.supports_multimodal_inputs = property(lambda self: self.is_multimodal_model)
    scheduler.MultiModalBudget = budget
