# SPDX-License-Identifier: Apache-2.0
"""Short builders of managers, contexts and cached prompts for tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import numpy as np

import kvcore

_serial = itertools.count()


def make_params(
    page_size: int = 4, *, replicas: int = 1, shards: int = 1, caching: bool = True, **rest: Any
) -> kvcore.KVCacheParams:
    """Return parameters: two layers of one head per device, two float32 elements wide."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "n_kv_heads": shards,
        "head_dim": 2,
        "num_layers": 2,
        "page_size": page_size,
        "enable_prefix_caching": caching,
        "n_devices": replicas * shards,
        "data_parallel_degree": replicas,
    }
    return kvcore.KVCacheParams(**(settings | rest))


def with_host(page_size: int, host_pages: int, **rest: Any) -> dict[str, Any]:
    """Return params of a host tier of `host_pages` pages per replica; empty for 0."""
    if not host_pages:
        return rest
    space = host_pages * make_params(page_size, **rest).bytes_per_page / (1 << 30)
    tier = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": space}
    return rest | tier


def in_groups(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a manager, with those in groups whose keywords are deprecated."""
    options = dict(options)
    for group, kind in (("layers", kvcore.LayerOptions), ("tiers", kvcore.TierOptions)):
        names = [each.name for each in fields(kind) if each.name in options]
        if any(kind.__dataclass_fields__[name].metadata.get("is_deprecated") for name in names):
            options[group] = kind(**{name: options.pop(name) for name in names})
    return options


def make_manager(
    page_size: int = 4,
    num_pages: int = 16,
    *,
    replicas: int = 1,
    shards: int = 1,
    caching: bool = True,
    params: dict[str, Any] | None = None,
    **rest: Any,
) -> kvcore.PagedKVCacheManager:
    """Return a manager of page ids without a pool; by default it checks itself after every call."""
    settings: dict[str, Any] = {
        "max_batch_size": 64,
        "max_seq_len": 1 << 20,
        "devices": ("cpu",) * (replicas * shards),
        "blocks": None,
        "enable_runtime_checks": True,
    }
    made = make_params(
        page_size, replicas=replicas, shards=shards, caching=caching, **(params or {})
    )
    return kvcore.PagedKVCacheManager(made, num_pages=num_pages, **in_groups(settings | rest))


def make_context(
    tokens: Iterable[int], request_id: Any = None, **rest: Any
) -> kvcore.TextGenerationContext:
    """Return a context; its id is unique by default."""
    name = f"request-{next(_serial)}" if request_id is None else request_id
    return kvcore.TextGenerationContext(name, np.array(list(tokens), np.int32), **rest)


def claimed(
    manager: kvcore.PagedKVCacheManager,
    tokens: Iterable[int],
    *,
    replica_idx: int = 0,
    **rest: Any,
) -> kvcore.TextGenerationContext:
    """Return a new context, claimed on a replica."""
    context = make_context(tokens, **rest)
    manager.external_claim(context.request_id, replica_idx=replica_idx)
    return context


def prefilled(
    manager: kvcore.PagedKVCacheManager,
    tokens: Iterable[int],
    *,
    sampled: int = 0,
    **rest: Any,
) -> kvcore.TextGenerationContext:
    """Return a context whose prompt is committed, with one sampled token."""
    context = claimed(manager, tokens, **rest)
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    context.update(sampled)
    manager.step([context])
    return context


def put_in_cache(manager: kvcore.PagedKVCacheManager, tokens: Iterable[int], **rest: Any) -> None:
    """Run a prompt and release it, so its whole pages stay cached."""
    manager.release(prefilled(manager, tokens, **rest).request_id)


def error_of(call: Callable[[], object]) -> Exception:
    """Return the exception that a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return error
    raise AssertionError(f"{call} was not refused")
