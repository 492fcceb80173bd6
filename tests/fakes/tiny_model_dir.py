# SPDX-License-Identifier: Apache-2.0
"""Folders with a tiny model and its tokenizer, in the form of a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cache_models import make_config
from conftest import require

torch = require("torch")
transformers = require("transformers")
tokenizers = require("tokenizers")

WORDS = [f"w{i}" for i in range(120)]
SPECIAL = ["<pad>", "<unk>", "<end>", "<user>", "<bot>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<user> ' if m['role'] == 'user' else '<bot> ' }}{{ m['content'] + ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<bot>' }}{% endif %}"
)


def word_tokenizer(*, chat_template: str | None = None) -> Any:
    """Return a tokenizer of one token per word, so a decoded text encodes to the same tokens."""
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return _fast(made, chat_template)


def byte_tokenizer() -> Any:
    """Return a tokenizer of one token per byte, so most characters take several tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *alphabet])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return _fast(made, None)


def _fast(made: Any, chat_template: str | None) -> Any:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="<end>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def write_folder(folder: Path, tokenizer: Any, family: str = "llama", **changes: Any) -> Any:
    """Save a model for the tokenizer's vocabulary, and the tokenizer; return the model."""
    torch.manual_seed(0)
    config = make_config(family, vocab_size=len(tokenizer), **changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
