# SPDX-License-Identifier: Apache-2.0
"""A state machine over groups of layers with a host tier: layers read the written values."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from grouped_traffic import SHAPES, WRITE_POLICIES, Traffic, with_host_tier
from kvcore.policies import BY_NAME
from searches import machine_settings

ANY_ORDER_OF_CALLS = True  # no engine makes random calls


def has_requests(machine: TieredGroupsMachine) -> bool:
    return bool(machine.traffic.live)


class TieredGroupsMachine(RuleBasedStateMachine):
    """Each step checks contents, each call checks conservation laws."""

    traffic: Traffic

    @initialize(
        shape=st.sampled_from(sorted(SHAPES)),
        num_pages=st.sampled_from([30, 40, 60]),
        host_pages=st.sampled_from([1, 40, 90, 300]),
        seed=st.integers(0, 1 << 16),
        write_policy=st.sampled_from(WRITE_POLICIES),
        host_eviction=st.sampled_from(sorted(BY_NAME.keys() - {"priority", "hinted"})),
    )
    def build(self, shape: str, num_pages: int, host_pages: int, seed: int, **options: str) -> None:
        params = with_host_tier(SHAPES[shape], host_pages)
        self.traffic = Traffic(params, seed, num_pages, **options)

    @rule()
    def claim(self) -> None:
        self.traffic.claim()

    @rule()
    def crowd_out(self) -> None:
        self.traffic.crowd_out()

    @precondition(has_requests)
    @rule(n=st.integers(1, 4))
    def step(self, n: int) -> None:
        for _ in range(n):
            self.traffic.step()

    @rule()
    def serve(self) -> None:
        """Leave a prompt in the cache and in the tier."""
        self.traffic.claim()
        name = next(reversed(self.traffic.live))
        for _ in range(4):
            self.traffic.step()
        if name in self.traffic.live:
            self.traffic.manager.release(name)
            del self.traffic.live[name]

    @precondition(has_requests)
    @rule()
    def fork(self) -> None:
        self.traffic.fork()

    @precondition(has_requests)
    @rule()
    def release(self) -> None:
        self.traffic.release()

    @precondition(has_requests)
    @rule(n=st.integers(0, 40))
    def truncate(self, n: int) -> None:
        name = next(iter(self.traffic.live))
        context = self.traffic.live[name]
        try:
            self.traffic.manager.truncate(name, n)
        except ValueError:
            return
        if n < context.start_idx:
            context.rewind(n + 1)

    @rule()
    def reset(self) -> None:
        self.traffic.manager.reset_prefix_cache()

    @invariant()
    def counts_are_of_pages(self) -> None:
        if not hasattr(self, "traffic"):
            return
        manager = self.traffic.manager
        assert 0 <= manager.host_committed_block_pct <= 1
        moved = manager.metrics.h2d_blocks_copied
        assert moved == 0 or manager.metrics.d2h_blocks_copied > 0

    def teardown(self) -> None:
        if not hasattr(self, "traffic"):
            return
        self.traffic.end()
        self.traffic.manager.reset_prefix_cache()
        assert self.traffic.manager.host_committed_block_pct == 0


TestTieredGroupsMachine = TieredGroupsMachine.TestCase
TestTieredGroupsMachine.settings = machine_settings(steps=40)
