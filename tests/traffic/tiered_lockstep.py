# SPDX-License-Identifier: Apache-2.0
"""Lockstep with a host tier: the contents of pages are also written, moved and read."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep import Lockstep
from paired_request import Request
from reference_claims import Key, Namespace
from same_arrays import assert_same


def codes(ns: Namespace, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    """Return one number per token that depends on the namespace and on all tokens up to it."""
    state, found = zlib.crc32(repr(ns).encode()), []
    for token in tokens:
        state = zlib.crc32(int(token).to_bytes(8, "little", signed=True), state)
        found.append(state % (1 << 24))
    return np.array(found, np.float32)


class TieredLockstep(Lockstep):
    """Lockstep with bytes; an engine fetches tokens before its context marks them as written."""

    def __init__(self, page_size: int, num_pages: int, *, host_pages: int, **rest: Any) -> None:
        super().__init__(page_size, num_pages, pool=True, host_pages=host_pages, **rest)
        self.host_total = self.core.total_num_host_pages
        assert self.host_total == host_pages * len(self.pools)
        mover: Any = self.core._mover
        self.run, mover.run = mover.run, self.move
        self.held: list[Any] | None = None

    # -- the bytes -------------------------------------------------------------------------------
    def hold_loads(self) -> None:
        self.held = []

    def move(self, orders: npt.NDArray[np.int32]) -> None:
        """Delay loads until the watch on page copies ends."""
        assert orders.dtype == np.int32
        if self.held is None:
            self.run(orders)
        else:
            self.held.append(orders)

    def do_loads(self) -> None:
        held, self.held = self.held or [], None
        for orders in held:
            self.run(orders)

    def slots(self, request: Request, begin: int, end: int) -> tuple[Any, Any, Any]:
        positions, size = np.arange(begin, end), self.model.page_size
        pages = np.array(self.core.get_req_blocks(request.request_id), int)
        pool = self.pools[self.model.claims[request.request_id].replica]
        return pool, pages[positions // size], positions % size

    def codes_of(self, request: Request) -> npt.NDArray[np.float32]:
        model = request.model
        return codes((model.extra_key, model.cache_salt), model.ids)

    def step(self, requests: Sequence[Request]) -> None:
        """Write the tokens that ran since the last step, and commit them."""
        for request in requests:
            claim, end = self.model.claims.get(request.request_id), request.model.start_idx
            if claim is not None and end <= len(claim.pages) * self.model.page_size:
                pool, pages, offsets = self.slots(request, claim.written, end)
                new = self.codes_of(request)[claim.written : end]
                pool[pages, :, :, offsets] = new[:, None, None, None, None]
        super().step(requests)

    # -- comparisons -----------------------------------------------------------------------------
    def check(self) -> None:
        super().check()
        stored = sum(len(host) for host in self.model.host)
        assert self.core.host_committed_block_pct == stored / self.host_total
        for request in self.requests:
            claim = self.model.claims.get(request.request_id)
            if claim is not None:
                end = min(claim.written, request.model.start_idx)
                self.check_slots(self.slots(request, 0, end), self.codes_of(request)[:end])
        for replica, cache in enumerate(self.model.cache):
            for key in cache:
                self.check_page(replica, key)

    def check_slots(self, slots: tuple[Any, Any, Any], expected: npt.NDArray[np.float32]) -> None:
        pool, pages, offsets = slots
        found = pool[pages, :, :, offsets].reshape(len(expected), 8)
        assert_same(found, np.repeat(expected[:, None], 8, 1))

    def check_page(self, replica: int, key: Key) -> None:
        page, size = self.tree_pairs(replica, key)[-1][0], self.model.page_size
        slots = self.pools[replica], np.full(size, page), np.arange(size)
        self.check_slots(slots, codes(*key)[-size:])
