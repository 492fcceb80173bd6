# SPDX-License-Identifier: Apache-2.0
"""Measure whether one replay finds more tokens than another by more than the noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["least_lead"]

_BLOCKS = 50
_SAMPLES = 2_000
_PERCENT = 2.5  # the lower end of an interval of 95 %


def least_lead(hits: Sequence[int], others: Sequence[int], prompts: NDArray[np.int64]) -> float:
    """Return the least lead in token hit rate that the traffic supports.

    Two replays of the same requests are compared pair by pair. The requests are cut into up to 50
    blocks of consecutive requests, because neighbours depend on each other. Each of 2,000 samples
    draws the same number of blocks with replacement, with a fixed seed, and compares the hit rates
    of the drawn blocks (a paired block bootstrap).

    Parameters
    ----------
    hits, others : sequence of int
        Prompt tokens found for each request by the two replays; negative for a refused request.
    prompts : numpy.ndarray
        int64, prompt tokens of each request.

    Returns
    -------
    float
        The lower end of the interval of 95 % of the difference between the hit rates. If it is
        above 0, the first replay is better by more than the noise.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcore.apps.replay.noise import least_lead
    >>> prompts = np.full(1_000, 100)
    >>> least_lead([60] * 1_000, [50] * 1_000, prompts)
    0.1
    >>> least_lead([60, 40] * 500, [40, 60] * 500, prompts)
    0.0
    """
    blocks = min(_BLOCKS, len(prompts))
    edges = np.linspace(0, len(prompts), blocks + 1).astype(np.int64)[:-1]
    tokens = _sums(prompts, edges)
    leads = _sums(np.maximum(hits, 0), edges) - _sums(np.maximum(others, 0), edges)
    drawn = np.random.default_rng(0).integers(0, blocks, (_SAMPLES, blocks))
    lead = leads[drawn].sum(axis=1) / np.maximum(tokens[drawn].sum(axis=1), 1)
    return round(float(np.percentile(lead, _PERCENT)), 6)


def _sums(values: Any, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.add.reduceat(np.asarray(values, np.int64), edges)
    return found
