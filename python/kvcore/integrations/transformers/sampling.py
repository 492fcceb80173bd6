# SPDX-License-Identifier: Apache-2.0
"""The choice of the next tokens from logits."""

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

    Each sequence has its own random numbers, from the seed, the prompt and the sequence's number.
    So its tokens do not depend on the other sequences, their order or preemptions.

    Parameters
    ----------
    do_sample : bool
        Draw; otherwise take the likeliest token.
    temperature : float
        Divides the logits.
    seed : int, optional
        By default, drawn from torch's generator, which ``torch.manual_seed`` sets.

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
        """Draw the random numbers of a prompt's sequences."""
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
            The request of each row.

        Returns
        -------
        int32 [rows]
            The tokens, in host memory; the host waits for them.
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
