# SPDX-License-Identifier: Apache-2.0
"""Watches the copies of a call, which tell the reference what kvcore was free to choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reference import Key

if TYPE_CHECKING:
    from lockstep import Lockstep, Request


class SourceHint:
    """Tells the reference which of several equally good pages a partial hit was copied from."""

    def __init__(self, pair: Lockstep) -> None:
        self.pair = pair
        self.by_id: dict[tuple[int, int], Key] = {}
        for replica, cache in enumerate(pair.model.cache):
            for key in cache:
                block = pair.tree_pairs(replica, key)[-1][0]
                self.by_id[replica, int(block)] = key
        for pool in pair.pools:  # every slot tells which page it is in
            pool[:] = np.arange(len(pool)).reshape(-1, 1, 1, 1, 1, 1)

    def take(self) -> npt.NDArray[np.int32]:
        """The copies that the last call owes, or has done."""
        self.copies: npt.NDArray[np.int32] = self.pair.core.take_copies()
        assert self.copies.dtype == np.int32
        assert self.copies.shape[1:] == (4,)
        if self.pair.pools:
            assert not len(self.copies)
            done = [row for replica in range(len(self.pair.pools)) for row in self.done(replica)]
            self.copies = np.array(done, np.int32).reshape(-1, 4)
        return self.copies

    def done(self, replica: int) -> list[tuple[int, int, int, int]]:
        """What was copied in a pool, by what its slots hold now."""
        pool = self.pair.pools[replica]
        tokens = (pool[:, 0, 0, :, 0, 0] != np.arange(len(pool))[:, None]).sum(axis=1)
        changed = [(page, int(tokens[page])) for page in np.flatnonzero(tokens).tolist()]
        for page, count in changed:
            source = pool[page, 0, 0, 0, 0, 0]
            assert (pool[page, :, :, :count] == source).all()
            assert (pool[page, :, :, count:] == page).all()
        return [(replica, int(pool[p, 0, 0, 0, 0, 0]), p, count) for p, count in changed]

    def for_request(self, request: Request) -> tuple[Key | None, bool]:
        """The source of a request's partial hit, and whether the request copies nothing."""
        if not self.pair.core.contains(request.request_id):
            return None, True
        own = {int(block) for block in self.pair.core.get_req_blocks(request.request_id)}
        replica = self.pair.core.get_replica(request.core)
        for where, source, target, _ in self.copies.tolist():
            if where == replica and target in own:
                return self.by_id.get((where, source)), False
        return None, True
