# SPDX-License-Identifier: Apache-2.0
"""A model whose K, V and states are digests of all tokens before them; it checks its reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore import PagedKVCacheManager, TextGenerationContext, ops

__all__ = ["DigestModel"]

_MODULUS = 1_000_003  # exact in float32


def _digests(tokens: Sequence[int], weights: int) -> NDArray[np.float32]:
    """Return a number for each prefix; the empty prefix is first."""
    found = [weights]
    for token in tokens:
        found.append((found[-1] * 31 + int(token) + 7) % _MODULUS)
    return np.array(found, np.float32)


class DigestModel:
    """Run batches of one replica: layers write all computed tokens and read all tokens in reach.

    Models with other `weights` write other values.
    """

    def __init__(self, manager: PagedKVCacheManager, weights: int = 1) -> None:
        self.manager, self._weights = manager, weights
        self.params = manager.params
        self.layers = [(layer, g) for g in self.params.attention_groups for layer in g.layers]
        self.read = 0  # positions

    def run(self, inputs: Any, batch: Sequence[TextGenerationContext], more: Any = ()) -> None:
        """Run the chunks of a batch.

        `more` lists for each row the tokens that later steps append.
        """
        more = more or [[] for _ in batch]
        for row, (context, rest) in enumerate(zip(batch, more, strict=True)):
            written = [*context.tokens[: context.active_idx].tolist(), *rest]
            digests = _digests(written, self._weights)
            start = context.start_idx
            for layer, group in self.layers:
                first = group.skipped_tokens(start)
                self._attend(inputs, row, layer, (first, start), digests[1:])
            self._recur(inputs, row, start, digests)

    def _attend(
        self, inputs: Any, row: int, layer: int, bounds: tuple[int, int], values: Any
    ) -> None:
        first, start = bounds
        pools = ops.batch.layer_pools(inputs, layer)
        for part, pool in enumerate(pools.pools):
            positions = np.arange(first, len(values))
            pages, at = divmod(positions, pool.shape[1])
            pages = pools.lookup_table[row, pages].astype(np.int64)
            assert np.all(pages < self.manager.total_num_pages), ("a hole is read", layer, bounds)
            wanted = values[first:] + np.float32(2 * layer + part)
            new = start - first
            pool[pages[new:], at[new:]] = wanted[new:, None, None]
            found = pool[pages, at]
            assert np.all(found == wanted[:, None, None]), ("wrong contents", layer, bounds)
            self.read += len(positions)

    def _recur(self, inputs: Any, row: int, start: int, digests: Any) -> None:
        for index, group in enumerate(self.manager.states):
            slot = int(inputs.states[index][row])
            for number, arrays in enumerate(group.values()):
                state = arrays[0][slot]
                wanted = digests[start] + np.float32(10 * index + number)
                assert start == 0 or np.all(state == wanted), ("wrong state", index, start)
                state[...] = digests[-1] + np.float32(10 * index + number)
