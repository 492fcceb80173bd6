# SPDX-License-Identifier: Apache-2.0
"""Prompts in, results out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from kvcore import TextGenerationContext
from kvcore.scheduler import Request

__all__ = ["GenerationResult", "PromptSequence", "read_prompts", "result_of"]

FinishReason = Literal["length", "eos"]


@dataclass(frozen=True)
class GenerationResult:
    """Hold what was generated for a prompt.

    Attributes
    ----------
    prompt_index : int
        Place of the prompt in the call.
    token_ids : list of int
        New tokens only; the one that ended the sequence included.
    cached_tokens : int
        Tokens of the prompt that were in the cache; for all but the first sequence of a prompt
        the whole prompt.
    finish_reason : "length" or "eos"
    """

    prompt_index: int
    token_ids: list[int]
    cached_tokens: int
    finish_reason: FinishReason


@dataclass(slots=True)
class PromptSequence:
    """Say whose tokens a request generates.

    Attributes
    ----------
    prompt_index, number : int
        The prompt, and which of its sequences.
    draws : float64 array, or None
        The random numbers of its tokens.
    """

    prompt_index: int
    number: int
    draws: NDArray[np.float64] | None = None


def result_of(request: Request) -> GenerationResult:
    """Sum up a sequence that has ended."""
    tokens = request.context.tokens[request.num_prompt :].tolist()
    reason: FinishReason = "eos" if request.finish_reason == "stop" else "length"
    return GenerationResult(request.owner.prompt_index, tokens, request.cached_tokens, reason)


def read_prompts(
    prompts: Iterable[Any],
    vocabulary: int,
    max_new_tokens: int,
    copies: int,
    eos: frozenset[int] = frozenset(),
) -> list[Request]:
    """Check prompts and make a request of each, with siblings for its other sequences.

    Raises
    ------
    TypeError
        Prompts that are no sequences of ints.
    ValueError
        An empty prompt, a token outside the vocabulary.
    """
    run = f"generate-{uuid4().hex[:8]}"
    first = []
    for i, prompt in enumerate(prompts):
        tokens = _tokens(prompt, i, vocabulary)
        leader, *rest = (
            Request(
                TextGenerationContext((run, i, n), tokens),
                max_new_tokens,
                stop_tokens=eos,
                owner=PromptSequence(i, n),
            )
            for n in range(copies)
        )
        leader.siblings = rest
        first.append(leader)
    return first


def _tokens(prompt: Any, index: int, vocabulary: int) -> NDArray[np.int32]:
    tokens = np.asarray(prompt)
    if tokens.size == 0:
        raise ValueError(f"prompt {index} is empty, must hold at least one token")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TypeError(
            f"prompt {index} is {type(prompt).__name__} of dtype {tokens.dtype} with {tokens.ndim} "
            f"axes, must be a list of token ids; prompts is a list of such lists"
        )
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError(
            f"prompt {index} holds token {tokens.min() if tokens.min() < 0 else tokens.max()}, "
            f"must be 0 .. {vocabulary - 1}, the model's vocabulary"
        )
    return tokens.astype(np.int32)
