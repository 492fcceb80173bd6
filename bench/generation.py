# SPDX-License-Identifier: Apache-2.0
"""Models, prompts and rows that the benches of Hugging Face models share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers

from harness import Row, plain_row

PAGE = 16

Answers = list[list[int]]


def random_model(family: str, **config: Any) -> Any:
    """Build a causal model in f32 with random weights and without an end token."""
    torch.manual_seed(0)
    shape = getattr(transformers, f"{family}Config")(
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **config,
    )
    return transformers.AutoModelForCausalLM.from_config(shape).eval()


def small_llama(heads: int = 5) -> Any:
    """Build a Llama of 11 million parameters."""
    return random_model(
        "Llama",
        vocab_size=4096,
        hidden_size=320,
        intermediate_size=896,
        num_hidden_layers=8,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
    )


def random_tokens(model: Any, count: int, seed: int) -> list[int]:
    """Draw tokens from the vocabulary of a model, without the padding token."""
    drawn = np.random.default_rng(seed).integers(1, model.config.vocab_size, count)
    found: list[int] = drawn.tolist()
    return found


def in_turns(ways: Mapping[str, Callable[[], Answers]], rounds: int) -> dict[str, list[float]]:
    """Run all ways in turn, with equal answers; return the seconds of each way in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    expected: Answers = []
    for _ in range(rounds):
        for name, way in ways.items():
            start = perf_counter()
            answers = way()
            seconds[name].append(perf_counter() - start)
            expected = expected or answers
            if answers != expected:
                raise AssertionError(f"{name} generates other tokens than {next(iter(ways))}")
    return seconds


def rate_row(key: str, work: str, tokens: int, seconds: Sequence[float], **more: Any) -> Row:
    """Build a row of tokens per second, from the seconds of each round."""
    rates = [tokens / each for each in seconds]
    return plain_row(
        key,
        work,
        statistics.median(rates),
        "tokens/s",
        n=len(rates),
        note=f"best {max(rates):,.0f}",
        **more,
    )
