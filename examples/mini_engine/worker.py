# SPDX-License-Identifier: Apache-2.0
"""A worker runs steps: it has a rank of the model, and the pool of its heads."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcore import KVCacheParams, RaggedKVCacheInputs, ops
from kvcore.pools import shard_shapes
from mini_engine.model import Floats, Llama, SumUp


class Served(NamedTuple):
    """The model, and the size of its pool."""

    folder: Path
    params: KVCacheParams
    num_pages: int


class Step(NamedTuple):
    """The message from the scheduler to a worker: B rows with T new tokens, for S sequences."""

    inputs: RaggedKVCacheInputs  # page ids and lengths; the pool is the worker's
    copies: NDArray[np.int32]  # [n, 4]: replica, source page, destination page, tokens
    packed: ops.Packed  # the T tokens and their positions
    rows: NDArray[np.int64]  # [S]: the row whose last logits give a sequence's next token
    temperatures: Floats  # [S]: 0 chooses the likeliest token
    seeds: list[tuple[int, ...]]  # [S]: seed of the noise for this token


class Choice(NamedTuple):
    """The best token of a part of the vocabulary for each sequence, and its score."""

    tokens: NDArray[np.int64]
    scores: Floats


class Worker:
    """Own the pages of a rank's heads, and run steps in the order of their arrival."""

    def __init__(self, model: Served, rank: int = 0, sum_up: SumUp = lambda x: x) -> None:
        (shape,) = shard_shapes(model.params, model.num_pages)
        self.pool = np.zeros(shape, np.float32)
        self.model = Llama(model.folder, rank, model.params.n_devices, sum_up)

    def run(self, step: Step) -> Choice:
        """Run a step's tokens, and choose from this rank's part of the vocabulary."""
        for _, source, target, tokens in step.copies.tolist():  # in this order, before the kernels
            self.pool[target, :, :, :tokens] = self.pool[source, :, :, :tokens]
        wanted = step.packed.last_rows[step.rows]
        scores = self.model(step.inputs.with_pool(self.pool), step.packed, wanted)
        for n in np.flatnonzero(step.temperatures):
            # With Gumbel noise, the best score is a draw from the softmax over the vocabulary, and
            # no rank needs the scores of another rank. All ranks draw the same noise.
            generator = np.random.default_rng(step.seeds[n])
            noise = generator.standard_exponential(self.model.config.vocabulary)
            scores[n] = scores[n] / step.temperatures[n] - np.log(noise[self.model.vocabulary])
        best = scores.argmax(axis=1)
        return Choice(self.model.vocabulary[best], scores[np.arange(len(best)), best])


def best_of(choices: list[Choice]) -> NDArray[np.int64]:
    """Return the next token of each sequence: the best of the ranks' best tokens."""
    winner = np.argmax([choice.scores for choice in choices], axis=0)
    tokens: NDArray[np.int64] = np.choose(winner, [choice.tokens for choice in choices])
    return tokens
