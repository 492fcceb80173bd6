# SPDX-License-Identifier: Apache-2.0
"""Prompts as requests, and the results of finished requests."""

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
    """The tokens generated for one sequence of a prompt.

    Attributes
    ----------
    prompt_index : int
        The prompt's index in the call.
    token_ids : list of int
        New tokens only, including the token that ended the sequence.
    cached_tokens : int
        Tokens of the prompt that were in the cache; the whole prompt for each sequence of a prompt
        except the first.
    finish_reason : "length" or "eos"
    """

    prompt_index: int
    token_ids: list[int]
    cached_tokens: int
    finish_reason: FinishReason


@dataclass(slots=True)
class PromptSequence:
    """The prompt and sequence for which a request generates tokens.

    Attributes
    ----------
    prompt_index, number : int
        The prompt's index, and the sequence's number among the prompt's sequences.
    draws : float64 array, or None
        The random numbers for its tokens.
    """

    prompt_index: int
    number: int
    draws: NDArray[np.float64] | None = None


def result_of(request: Request) -> GenerationResult:
    """Return the result of a finished sequence."""
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
    """Check prompts and make a request for each, with siblings for its other sequences.

    Raises
    ------
    TypeError
        A prompt that is no sequence of ints.
    ValueError
        An empty prompt, or a token outside the vocabulary.
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
