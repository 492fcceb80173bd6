# SPDX-License-Identifier: Apache-2.0
"""Token counts of tenants: computed tokens, and tokens taken from the cache."""

from __future__ import annotations

import pytest

from kvcore import InsufficientBlocksError, PagedKVCacheManager
from tenant_steps import context_of, manager_of, reserved, run


def tokens_of(manager: PagedKVCacheManager) -> dict[str, tuple[int, int]]:
    found = manager.tenant_metrics
    return {name: (each.input_tokens, each.cache_tokens) for name, each in found.items()}


def test_tokens_count_for_the_tenant_that_runs_them() -> None:
    manager = manager_of({"a": (0, None), "b": (0, None)})
    run(manager, context_of("1", range(8), "a"))
    assert tokens_of(manager) == {"a": (8, 0), "b": (0, 0)}
    run(manager, context_of("2", [*range(8), 50], "b"))
    assert tokens_of(manager) == {"a": (8, 0), "b": (1, 8)}
    run(manager, context_of("3", [*range(8), 60]))  # a request without a tenant
    assert tokens_of(manager) == {"a": (8, 0), "b": (1, 8)}
    assert (manager.metrics.input_tokens, manager.metrics.cache_tokens) == (10, 16)
    manager.reset_metrics()
    assert tokens_of(manager) == {"a": (0, 0), "b": (0, 0)}


def test_tokens_of_steps_count_for_tenants() -> None:
    manager = manager_of({"a": (0, None), "b": (0, None)})
    batch = [
        context_of("1", range(4), "a"),
        context_of("2", range(9, 14), "b"),
        context_of("3", [7]),
    ]
    for context in batch:
        assert reserved(manager, context)
    for _ in range(3):
        manager.fetch(batch)
        for context in batch:
            context.update(1)
        manager.step(batch)
    assert tokens_of(manager) == {"a": (4, 0), "b": (5, 0)}
    assert {n: each.generated_tokens for n, each in manager.tenant_metrics.items()} == {
        "a": 3,
        "b": 3,
    }
    assert (manager.metrics.input_tokens, manager.metrics.generated_tokens) == (10, 9)
    manager.reset_metrics()
    manager.fetch(batch)
    assert tokens_of(manager) == {"a": (0, 0), "b": (0, 0)}
    assert manager.metrics.input_tokens == 0


def test_a_refused_batch_counts_for_no_tenant() -> None:
    manager = manager_of({"a": (0, 3), "b": (0, None)})
    first, second = context_of("1", range(4), "b"), context_of("2", range(10, 14), "a")
    for context in (first, second):
        assert reserved(manager, context)
    manager.fetch([first, second])
    first.update(1)
    second.update(1)
    manager.step([first, second])
    before = tokens_of(manager)
    other = context_of("3", range(20, 24), "a")
    manager.claim("3")
    with pytest.raises(InsufficientBlocksError):
        manager.fetch([first, second, other])
    assert tokens_of(manager) == before


def test_tokens_of_replicas_are_summed() -> None:
    manager = manager_of({"a": (0, None)}, data_parallel_degree=2)
    for replica in range(2):
        context = context_of(str(replica), range(6), "a")
        manager.claim(context.request_id, replica)
        run(manager, context)
    assert tokens_of(manager) == {"a": (12, 0)}
