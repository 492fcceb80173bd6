# SPDX-License-Identifier: Apache-2.0
"""A watch on the copies of a call: it passes kvcore's free choices to the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reference_claims import Key

if TYPE_CHECKING:
    from lockstep import Lockstep
    from paired_request import Request


class SourceHint:
    """Record which of several equally good pages was the source of a partial hit."""

    def __init__(self, pair: Lockstep) -> None:
        self.pair = pair
        self.by_id: dict[tuple[int, int], Key] = {}
        for replica, cache in enumerate(pair.model.cache):
            for key in cache:
                block = pair.tree_pairs(replica, key)[-1][0]
                self.by_id[replica, int(block)] = key
        self.before = [pool.copy() for pool in pair.pools]
        pair.hold_loads()
        for pool in pair.pools:  # every slot holds the number of its page
            pool[:] = np.arange(len(pool)).reshape(-1, 1, 1, 1, 1, 1)

    def take(self) -> npt.NDArray[np.int32]:
        """Return the copies that the last call returned, or ran."""
        self.copies: npt.NDArray[np.int32] = self.pair.core.take_copies()
        assert self.copies.dtype == np.int32
        assert self.copies.shape[1:] == (4,)
        if self.pair.pools:
            assert not len(self.copies)
            done = [row for replica in range(len(self.pair.pools)) for row in self.done(replica)]
            self.copies = np.array(done, np.int32).reshape(-1, 4)
            self.restore()
        return self.copies

    def restore(self) -> None:
        """Restore the earlier contents of the pools and repeat the copies on them."""
        for pool, before in zip(self.pair.pools, self.before, strict=True):
            pool[:] = before
        for replica, source, target, tokens in self.copies.tolist():
            before = self.before[replica]
            self.pair.pools[replica][target, :, :, :tokens] = before[source, :, :, :tokens]
        self.pair.do_loads()

    def done(self, replica: int) -> list[tuple[int, int, int, int]]:
        """Return the copies in a pool, derived from the present contents of its slots."""
        pool = self.pair.pools[replica]
        tokens = (pool[:, 0, 0, :, 0, 0] != np.arange(len(pool))[:, None]).sum(axis=1)
        changed = [(page, int(tokens[page])) for page in np.flatnonzero(tokens).tolist()]
        for page, count in changed:
            source = pool[page, 0, 0, 0, 0, 0]
            assert (pool[page, :, :, :count] == source).all()
            assert (pool[page, :, :, count:] == page).all()
        return [(replica, int(pool[p, 0, 0, 0, 0, 0]), p, count) for p, count in changed]

    def for_request(self, request: Request) -> tuple[Key | None, bool]:
        """Return the source of a request's partial hit, and true if the request copies nothing."""
        if not self.pair.core.contains(request.request_id):
            return None, True
        own = {int(block) for block in self.pair.core.get_req_blocks(request.request_id)}
        replica = self.pair.core.get_replica(request.core)
        for where, source, target, _ in self.copies.tolist():
            if where == replica and target in own:
                return self.by_id.get((where, source)), False
        return None, True
