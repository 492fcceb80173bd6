# SPDX-License-Identifier: Apache-2.0
"""Managers with quotas, and the steps of requests on them."""

from __future__ import annotations

from typing import Any

from builders import in_groups
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext

PAGES = 16


def manager_of(quotas: Any, num_pages: int = PAGES, **rest: Any) -> PagedKVCacheManager:
    names = ("page_size", "data_parallel_degree", "groups", "num_layers")
    sizes = {"page_size": 2, "num_layers": 1} | {n: rest.pop(n) for n in names if n in rest}
    params = KVCacheParams(
        "float32", 1, 4, enable_prefix_caching=True, n_devices=sizes.get("data_parallel_degree", 1),
        **sizes,
    )  # fmt: skip
    return PagedKVCacheManager(
        params, 16, max_seq_len=200, num_pages=num_pages, quotas=quotas, blocks=None,
        devices=["cpu"] * params.n_devices, enable_runtime_checks=True, **in_groups(rest),
    )  # fmt: skip


def context_of(name: str, tokens: Any, tenant: str | None = None) -> TextGenerationContext:
    return TextGenerationContext(name, list(tokens), tenant=tenant)


def reserved(manager: PagedKVCacheManager, context: TextGenerationContext) -> bool:
    if not manager.contains(context.request_id):
        manager.claim(context.request_id, "auto")
    plan = manager.plan(context)
    fits = manager.reserve(context)
    assert plan.fits == fits
    return fits


def run(manager: PagedKVCacheManager, context: TextGenerationContext) -> None:
    assert reserved(manager, context)
    manager.fetch([context])
    manager.take_copies()
    context.update(1)
    manager.step([context])
