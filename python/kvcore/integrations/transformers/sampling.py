# SPDX-License-Identifier: Apache-2.0
"""The next tokens out of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvcore.scheduler import Request

__all__ = ["Sampler"]


class Sampler:
    """Choose the next token of each row.

    Every sequence has random numbers of its own, by seed, prompt and sequence, so that what runs
    beside it, in which order and how often it was preempted, changes nothing.

    Parameters
    ----------
    do_sample : bool
        Draw; the likeliest token otherwise.
    temperature : float
        Divides the logits.
    seed : int, optional
        Out of torch's generator by default, which ``torch.manual_seed`` sets.

    Raises
    ------
    ValueError
        A temperature that is not above 0.
    """

    def __init__(self, *, do_sample: bool, temperature: float, seed: int | None) -> None:
        if do_sample and not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(
                f"temperature is {temperature}, must be above 0; do_sample=False takes the "
                f"likeliest token"
            )
        self._temperature = temperature if do_sample else None
        drawn = do_sample and seed is None
        self._seed = int(torch.randint(2**63 - 1, ())) if drawn else seed or 0

    def prepare(self, request: Request) -> None:
        """Give a prompt's sequences their random numbers."""
        if self._temperature is None:
            return
        for each in (request, *request.siblings):
            whose = each.owner
            numbers = np.random.default_rng([self._seed, whose.prompt_index, whose.number])
            whose.draws = numbers.random(each.left)

    def choose(self, logits: torch.Tensor, requests: Sequence[Request]) -> NDArray[np.int32]:
        """Return a token per row.

        Parameters
        ----------
        logits : tensor [rows, vocabulary]
        requests : sequence of Request
            Whose next tokens they tell.

        Returns
        -------
        int32 [rows]
            In host memory, for which the host waits.
        """
        logits = logits.float()
        if self._temperature is None:
            tokens = logits.argmax(dim=-1)
        else:
            heights = torch.softmax(logits / self._temperature, dim=-1).double().cumsum(dim=-1)
            drawn = [r.owner.draws[r.context.end_idx - r.num_prompt] for r in requests]
            draws = torch.tensor(drawn, dtype=torch.float64, device=logits.device)
            marks = draws[:, None] * heights[:, -1:]
            tokens = torch.searchsorted(heights, marks, right=True)[:, 0]
            tokens = tokens.clamp_max(logits.shape[-1] - 1)
        return tokens.cpu().numpy().astype(np.int32)
