# SPDX-License-Identifier: Apache-2.0
"""The state machine again, with a host tier for a small pool and bytes in the pages."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from test_state_machine import TOKEN, PagedManagerMachine, has_requests
from tiered_lockstep import TieredLockstep

ANY_ORDER_OF_CALLS = True  # no engine makes random calls


class TieredMachine(PagedManagerMachine):
    """An honest engine: a token counts as written only after the fetch of its step."""

    pair: TieredLockstep

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 16]),
        num_pages=st.integers(1, 12),
        host_pages=st.integers(1, 16),
        replicas=st.sampled_from([1, 1, 2]),
        dedup=st.sampled_from([True, True, False]),
        partial=st.sampled_from([True, True, False]),
        max_pages=st.integers(4, 20),
        threshold=st.sampled_from([None, None, 1, 2, 3]),
    )
    def build(self, page_size: int, num_pages: int, max_pages: int, **rest: Any) -> None:
        self.page_size = page_size
        longest = max_pages * page_size
        self.pair = TieredLockstep(page_size, num_pages, max_seq_len=longest, **rest)

    @precondition(has_requests)
    @rule(data=st.data())
    def change_a_context(self, data: st.DataObject) -> None:
        request = self.request(data)
        model = request.model
        kind = data.draw(st.sampled_from(["extend", "rewind", "active_idx"]), "kind")
        if kind == "extend":
            request.both("extend", data.draw(st.lists(TOKEN, min_size=1, max_size=3)))
        elif kind == "active_idx":
            active = data.draw(st.integers(model.start_idx + 1, model.end_idx), "active_idx")
            request.core.active_idx = model.active_idx = active
        else:
            request.both("rewind", data.draw(st.integers(1, model.end_idx), "n"))

    update_batch = None  # type: ignore[assignment]

    @precondition(has_requests)
    @rule(data=st.data(), follows=st.just(1))
    def truncate(self, data: st.DataObject, follows: int) -> None:
        request = self.request(data, claimed=True)
        n: int = data.draw(st.integers(-1, request.model.end_idx + 1), "n")
        self.pair.truncate(request, n)
        if 0 <= n <= request.model.end_idx:
            request.both("rewind", max(1, n))

    @rule(data=st.data(), sampled=TOKEN)
    def crowd_out(self, data: st.DataObject, sampled: int) -> None:
        """Serve a new prompt as large as the pool, to evict the cached pages."""
        model = self.pair.model
        length = min(model.num_pages * self.page_size, model.max_seq_len) - 1
        if length < 1:
            return
        token: int = data.draw(st.integers(2, 4), "token")
        request = self.pair.new([token] * length)
        self.pair.claim(request, self.replica(data))
        if request.request_id in model.claims:
            self.iterate([request], 1, sampled)
            self.pair.release(request)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "pair"):
            assert self.pair.core.host_committed_block_pct == 0, "a host page has no holder"


TestTieredMachine = TieredMachine.TestCase
TestTieredMachine.settings = settings(
    max_examples=settings().max_examples,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
