# SPDX-License-Identifier: Apache-2.0
"""Makes the tiny random models that the tests of a real engine serve.

    python vllm_engine_models.py FOLDER NAME...

Weights are drawn from a fixed seed. Each model has a tokenizer of one word per token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512
SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def make(name: str) -> Any:
    """Return a model of a family, with random weights."""
    import torch
    import transformers as hf

    torch.manual_seed(27)
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**SHARED))
    if name == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**SHARED))
    if name == "gemma3":
        kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
        more = {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 128,
                "query_pre_attn_scalar": 32}  # fmt: skip
        return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SHARED | more))
    if name == "mistral":
        return hf.MistralForCausalLM(hf.MistralConfig(**SHARED, sliding_window=128))
    if name == "deepseek":
        latent = {"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 512,
                  "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
                  "first_k_dense_replace": 3, "moe_intermediate_size": 64, "n_routed_experts": 2,
                  "n_shared_experts": 1, "num_experts_per_tok": 1, "head_dim": 64}  # fmt: skip
        return hf.DeepseekV2ForCausalLM(hf.DeepseekV2Config(**SHARED | latent))
    raise ValueError(f"no model {name!r}")


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are the words t0, t1, ..."""
    words = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    named = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0", "unk_token": "t0"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named})
    )


def main() -> None:
    """Write each model to a folder of the same name in the first argument's folder."""
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        model = make(name)
        # With weights of this size the answers depend on all earlier tokens.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.12)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder)
        write_tokenizer(folder)


if __name__ == "__main__":
    main()
