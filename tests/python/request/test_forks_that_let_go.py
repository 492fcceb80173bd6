# SPDX-License-Identifier: Apache-2.0
"""Forks release a page in one call: the tokens that the others read decide who copies it."""

from __future__ import annotations

import pytest

from lockstep import Lockstep

ANY_ORDER_OF_CALLS = True  # no engine makes random calls


@pytest.mark.parametrize("pool", [True, False])
@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_fork_copies_a_page_that_the_copy_before_reads_further(
    order: tuple[int, int], reserve: bool, pool: bool
) -> None:
    """The parent was truncated but not rewound, so its copy reads more than the child keeps."""
    pair = Lockstep(16, 4, max_seq_len=64, pool=pool)
    parent = pair.new(list(range(6)))
    pair.claim(parent, 0)
    pair.fetch([parent])
    parent.both("update", 9)
    pair.step([parent])
    pair.truncate(parent, 2)
    child = pair.new([*range(5), 7])
    pair.fork(parent, [child])
    batch = [(parent, child)[row] for row in order]
    if reserve:
        pair.reserve_batch(batch, 1)
    assert pair.fetch(batch) is not None
    pair.check()
