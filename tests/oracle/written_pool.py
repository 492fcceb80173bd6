# SPDX-License-Identifier: Apache-2.0
"""A pool whose slots encode the prefix that they were written for, and batches that run on it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import kvcore
from same_arrays import assert_same


def codes(context: Any) -> npt.NDArray[np.float32]:
    """Return one number per token that depends on all tokens and extra keys up to it."""
    tokens = np.asarray(context.tokens, np.int32)
    starts = [tokens[: n + 1].tobytes() for n in range(len(tokens))]
    for key in sorted(set(getattr(context, "extra_keys", None) or ())):
        starts[key[0] :] = [start + repr(key).encode() for start in starts[key[0] :]]
    return np.array([zlib.crc32(start) % (1 << 24) for start in starts], np.float32)


class WrittenPool:
    """A runner of batches on a manager, with the manager's pool or the engine's own pool."""

    def __init__(self, manager: kvcore.PagedKVCacheManager) -> None:
        self.manager = manager
        shape = (manager.total_num_pages, 2, 2, manager.params.page_size, 1, 2)
        inputs = manager.fetch([])
        self.is_own = inputs[0].blocks is None
        self.blocks: list[Any] = [
            np.zeros(shape, np.float32) if self.is_own else entry.blocks for entry in inputs
        ]
        self.num_copies = 0

    def copy(self) -> None:
        """Run the copies that are due in a manager without a pool, in order."""
        for replica, source, target, tokens in self.manager.take_copies().tolist():
            assert self.is_own
            pool = self.blocks[replica]
            pool[target, :, :, :tokens] = pool[source, :, :, :tokens]
            self.num_copies += 1

    def slots(self, context: Any, begin: int, end: int) -> tuple[Any, Any, Any]:
        pages = np.array(self.manager.get_req_blocks(context.request_id), int)
        positions, size = np.arange(begin, end), self.manager.params.page_size
        pool = self.blocks[self.manager.get_replica(context)]
        return pool, pages[positions // size], positions % size

    def check(self, context: Any, end: int | None = None) -> None:
        """Check that each written slot of a request holds the value of its prefix."""
        end = context.start_idx if end is None else end
        pool, pages, offsets = self.slots(context, 0, end)
        found = pool[pages, :, :, offsets].reshape(end, 8)
        expected = np.repeat(codes(context)[:end, None], 8, 1)
        assert_same(found, expected)

    def forward(self, batch: Sequence[Any]) -> None:
        """Fetch a batch, read its cached tokens and write its new tokens."""
        self.manager.fetch(batch)
        self.copy()
        for context in batch:
            self.check(context)
        for context in batch:
            pool, pages, offsets = self.slots(context, context.start_idx, context.active_idx)
            new = codes(context)[context.start_idx : context.active_idx]
            pool[pages, :, :, offsets] = new[:, None, None, None, None]
        for context in batch:
            self.check(context, context.active_idx)

    def run(self, batch: Sequence[Any], sampled: int = 0) -> None:
        """Run one step of an engine."""
        self.forward(batch)
        for context in batch:
            context.update(sampled)
        self.manager.step(batch)
