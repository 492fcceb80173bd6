# SPDX-License-Identifier: Apache-2.0
"""Prompts in, results out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from kvcore import TextGenerationContext

__all__ = ["GenerationResult", "Request", "read_prompts"]

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


class Request:
    """Follow one sequence from its prompt to its result.

    Attributes
    ----------
    rank : tuple of int
        Prompt and sequence: lower ones go first.
    context : TextGenerationContext
    left : int
        Tokens still to generate, at most.
    siblings : list of Request
        Sequences that go on from the same prompt once it is computed.
    cached : int
        Tokens of the prompt that were cached; -1 before it was admitted.
    draws : float64 array, or None
        The random numbers of its tokens.
    last : int
        The token generated last.
    reason : "length", "eos" or None
        Why it has ended.
    """

    __slots__ = (
        "cached",
        "context",
        "draws",
        "last",
        "left",
        "num_prompt",
        "rank",
        "reason",
        "siblings",
    )

    def __init__(
        self, run: str, rank: tuple[int, int], tokens: NDArray[np.int32], left: int
    ) -> None:
        self.rank = rank
        self.context = TextGenerationContext((run, *rank), tokens)
        self.num_prompt = len(tokens)
        self.left = left
        self.siblings: list[Request] = []
        self.cached = -1
        self.draws: NDArray[np.float64] | None = None
        self.last = -1
        self.reason: FinishReason | None = None

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return self.context.end_idx - self.num_prompt

    def take(self, token: int, eos: frozenset[int]) -> None:
        """Count a token that was generated."""
        self.last = token
        self.left -= 1
        if token in eos:
            self.reason = "eos"
        elif self.left == 0:
            self.reason = "length"

    def result(self) -> GenerationResult:
        """Sum up a sequence that has ended."""
        tokens = self.context.tokens[self.num_prompt :].tolist()
        return GenerationResult(self.rank[0], tokens, self.cached, self.reason or "length")


def read_prompts(
    prompts: Iterable[Any], vocabulary: int, max_new_tokens: int, copies: int
) -> list[Request]:
    """Check prompts and make a request of each.

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
        leader, *rest = (Request(run, (i, n), tokens, max_new_tokens) for n in range(copies))
        leader.siblings = rest
        first.append(leader)
    return first


def _tokens(prompt: Sequence[int] | Any, index: int, vocabulary: int) -> NDArray[np.int32]:
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
