# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers, and the generation modes that a cache must serve."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from conftest import require

torch = require("torch")
transformers = require("transformers")

from kvcore.integrations.transformers.names import CACHE  # noqa: E402

VOCABULARY = 199
NEW = 14

# The weights are wide, so attention changes the output. The heads are not tied to the embeddings,
# because Gemma would otherwise repeat its input.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_WINDOW = {"sliding_window": 7}
_MIXED = _WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = _MIXED | {"head_dim": 12, "query_pre_attn_scalar": 12}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", _WINDOW),
    "gemma2": ("Gemma2Config", _GEMMA | {"attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "gpt_oss": ("GptOssConfig", _MIXED | _EXPERTS | {"head_dim": 16}),
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
}
#: Models with layers that keep a state: a cache of only K and V cannot serve them.
_STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("Lfm2Config", {"full_attn_idxs": [1]}),
}
FAMILIES = list(_FAMILIES)


def make_config(family: str, **changes: Any) -> Any:
    name, own = (_FAMILIES | _STATEFUL)[family]
    return getattr(transformers, name)(**(_COMMON | own | changes))


@functools.cache
def make_model(family: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    # Up to transformers 5.17 Gemma2 selects sdpa by default, which ignores its soft cap.
    how = {"attn_implementation": "eager"} if family == "gemma2" else {}
    return transformers.AutoModelForCausalLM.from_config(make_config(family), **how).eval()


def helper_of(model: Any) -> Any:
    """Return an assistant model that sometimes drafts the tokens of `model`.

    Its windows are never full: up to transformers 5.17 an assistant's cache with full windows
    cannot be cropped.
    """
    config = copy.deepcopy(model.config)
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = 200
    helper = type(model)(config).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for own, its in zip(helper.parameters(), model.parameters(), strict=True):
            own.copy_(its + 0.02 * torch.randn_like(its))
    return helper


def prompts(rows: int = 3, tokens: int = 11, seed: int = 3) -> Any:
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=seeded(seed))


def seeded(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


def padded(ids: Any) -> tuple[Any, Any]:
    """Return the ids with 4 padding tokens before the first row and 1 before the second, a mask."""
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :1] = 0
    return ids * mask, mask


def generate(model: Any, ids: Any, cache: Any, **how: Any) -> Any:
    how = {"do_sample": False, "max_new_tokens": NEW, "attention_mask": torch.ones_like(ids)} | how
    return model.generate(ids, **{CACHE: cache}, **how)


# -- generation modes: (model, empty cache) -> token ids -----------------------------------------
def greedy(model: Any, cache: Any) -> Any:
    ids, mask = padded(prompts())
    return generate(model, ids, cache, attention_mask=mask)


def beams(model: Any, cache: Any) -> Any:
    ids, mask = padded(prompts(2))
    return generate(model, ids, cache, attention_mask=mask, num_beams=4)


def beams_returned(model: Any, cache: Any) -> Any:
    ids, mask = padded(prompts(2))
    how = {"num_beams": 3, "num_return_sequences": 2}
    return generate(model, ids, cache, attention_mask=mask, **how)


def sampling(model: Any, cache: Any) -> Any:
    torch.manual_seed(4)
    return generate(model, prompts(2), cache, do_sample=True, num_return_sequences=3)


def chunked_prefill(model: Any, cache: Any) -> Any:
    ids, mask = padded(prompts())
    return generate(model, ids, cache, attention_mask=mask, prefill_chunk_size=4)


def lookup(model: Any, cache: Any) -> Any:
    ids = prompts(1, 6).repeat(1, 3)
    return generate(model, ids, cache, prompt_lookup_num_tokens=3, max_new_tokens=2 * NEW)


def assisted(model: Any, cache: Any) -> Any:
    return generate(model, prompts(1), cache, assistant_model=helper_of(model))


def turns(model: Any, cache: Any) -> Any:
    """Run three turns of a conversation: each continues the tokens of the turn before."""
    ids = prompts(2)
    for turn in range(3):
        ids = generate(model, ids, cache, max_new_tokens=6)
        ids = torch.cat([ids, prompts(2, 4, seed=10 + turn)], dim=1)
    return ids


def selected(model: Any, cache: Any) -> Any:
    """Select and repeat rows of a filled cache, in another order; then run each row separately."""
    ids = prompts(2)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([4, 1, 3, 0]))
        taken = ids.repeat_interleave(3, dim=0)[[4, 1, 3, 0]]
        last = prompts(4, 1, seed=5)
        for _ in range(NEW):
            taken = torch.cat([taken, last], dim=1)
            last = model(last, **{CACHE: cache}).logits[:, -1:].argmax(-1)
    return taken


MODES: dict[str, Callable[[Any, Any], Any]] = {
    way.__name__: way
    for way in (
        greedy,
        beams,
        beams_returned,
        sampling,
        chunked_prefill,
        lookup,
        assisted,
        turns,
        selected,
    )
}


@functools.cache
def expected(family: str, mode: str) -> Any:
    """Return the tokens that transformers generates with its own cache."""
    model = make_model(family)
    return MODES[mode](model, transformers.DynamicCache(config=model.config))


def held_pages(cache: Any) -> int:
    """Return the number of pages in use, which must all belong to the rows."""
    manager = cache.manager
    manager.check_integrity()
    pages: int = manager.total_num_pages - manager.num_free_blocks
    return pages
