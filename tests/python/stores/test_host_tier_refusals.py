# SPDX-License-Identifier: Apache-2.0
"""Managers without a host tier, and copies that fail."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from builders import claimed, error_of, make_manager, with_host
from tier_steps import A, B, C, moved, serve, tiered
from written_pool import WrittenPool


# -- without a host tier -------------------------------------------------------------------------
def test_a_manager_without_a_pool_has_no_tier() -> None:
    manager = make_manager(4, 8, params=with_host(4, 32), blocks=None)
    assert (manager.total_num_host_pages, manager.host_committed_block_pct) == (32, 0.0)
    for tokens in (A, C, A):
        context = claimed(manager, tokens)
        manager.fetch([context])
        context.update(0)
        manager.step([context])
        manager.release(context.request_id)
    assert moved(manager) == (0, 0)


def test_a_tier_of_less_than_a_page_is_none() -> None:
    params = with_host(4, 1) | {"host_kvcache_swap_space_gb": 1e-9}
    manager = make_manager(4, 8, params=params, blocks="allocate")
    pool = WrittenPool(manager)
    serve(manager, pool, A)
    assert (manager.total_num_host_pages, moved(manager)) == (0, (0, 0))


def test_more_space_than_can_be_mapped_is_refused() -> None:
    params = with_host(4, 1) | {"host_kvcache_swap_space_gb": 2.0**28}
    refused = error_of(lambda: make_manager(4, 8, params=params, blocks="allocate"))
    assert isinstance(refused, ValueError)


# -- a mover that fails --------------------------------------------------------------------------
class Failing:
    """Replaces a device with a device that cannot copy."""

    def __init__(self, manager: Any) -> None:
        self.run, self.fails = manager._mover.run, False
        manager._mover.run = self

    def __call__(self, orders: Any) -> None:
        if self.fails:
            raise OSError("no copy")
        self.run(orders)


def test_pages_that_were_not_copied_are_never_found(caplog: pytest.LogCaptureFixture) -> None:
    manager, pool = tiered()
    mover = Failing(manager)
    mover.fails = True
    context = claimed(manager, A)
    pool.forward([context])
    context.update(0)
    manager.step([context])  # commits; the tier is best effort
    assert "5 pages were not stored in the host tier" in caplog.text
    assert (moved(manager), manager.host_committed_block_pct) == ((0, 0), 0.0)
    manager.check_integrity()
    mover.fails = False
    for token in range(4):
        pool.run([context], token)
    assert moved(manager) == (6, 0)
    manager.release(context.request_id)
    serve(manager, pool, C)
    again = claimed(manager, A)
    mover.fails = True
    with pytest.raises(OSError, match="no copy"):
        manager.maybe_reserve(again)
    manager.check_integrity()
    assert list(manager.get_req_blocks(again.request_id)) == []
    with pytest.raises(OSError, match="no copy"):
        manager.fetch([again])
    mover.fails = False
    pool.run([again])  # pages that did not arrive do not count as written
    assert manager.metrics.h2d_blocks_copied == 4
    manager.release(again.request_id)
    serve(manager, pool, C)
    assert serve(manager, pool, A) == 16
    manager.reset_prefix_cache()
    assert manager.host_committed_block_pct == 0


def meddle_once(manager: Any, use: Callable[[], object]) -> None:
    """Make the next copies fail, after another call has run during them."""
    mover = manager._mover
    copy = mover.run

    def meddle(orders: Any) -> None:
        mover.run = copy
        use()
        raise OSError("no copy")

    mover.run = meddle


def test_a_request_that_others_used_while_loads_failed_is_theirs() -> None:
    """A batch loads for its first request, and the second request's pages are on the device."""
    manager, pool = tiered(num_pages=16)

    def cut(other: Any) -> None:
        manager.truncate(other.request_id, 0)
        other.rewind(1)

    def run(other: Any) -> None:
        other.active_idx = other.end_idx
        pool.run([other])

    def begin_anew(other: Any) -> None:
        manager.release(other.request_id)
        manager.claim(other.request_id)
        run(other)

    stands = {cut: (0, 1, 1), run: (30, 31, 31), begin_anew: (30, 31, 31)}
    for use, stand in stands.items():
        manager.reset_prefix_cache()
        serve(manager, pool, A)
        serve(manager, pool, C)
        serve(manager, pool, B)  # some pages of A are only in the tier
        loaded, other = claimed(manager, A), claimed(manager, B)
        meddle_once(manager, functools.partial(use, other))
        with pytest.raises(OSError, match="no copy"):
            manager.fetch([loaded, other])
        assert (loaded.start_idx, loaded.active_idx) == (0, 20)
        assert list(manager.get_req_blocks(loaded.request_id)) == []
        assert (other.start_idx, other.active_idx, other.end_idx) == stand
        assert len(manager.get_req_blocks(other.request_id)) == (stand[0] + 3) // 4
        manager.check_integrity()
        for context in (loaded, other):
            pool.run([context])
            manager.release(context.request_id)
