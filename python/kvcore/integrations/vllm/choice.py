# SPDX-License-Identifier: Apache-2.0
"""Which manager a scheduler gets: kvcore's where it can serve the cache, else vLLM's own."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager as OwnManager
from vllm.v1.core.sched import scheduler
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import KVCacheGroupRole

from kvcore.integrations.vllm import hashes
from kvcore.integrations.vllm.layers import unserved_layers
from kvcore.integrations.vllm.manager import KVCoreManager

logger = logging.getLogger("vllm.kvcore")
_SIGNATURE = inspect.signature(OwnManager)
_make_hasher = core.get_request_block_hasher
_told: set[str] = set()
_made: list[bool] = []  # whether the last manager is kvcore's


def rebind() -> None:
    """Put `make_manager` where vLLM's scheduler looks for its manager's class."""
    scheduler.KVCacheManager = make_manager
    core.get_request_block_hasher = lazily_hashed


def lazily_hashed(*args: Any, **kwargs: Any) -> Any:
    """Make what hashes the blocks of an engine's requests: lazily, where the last manager is ours.

    An engine makes its scheduler, with the manager, just before.
    """
    made = hashes.lazy(_make_hasher) if _made[-1:] == [True] else _make_hasher
    return made(*args, **kwargs)


def make_manager(*args: Any, **kwargs: Any) -> OwnManager:
    """Make kvcore's manager, or vLLM's own and say why, once for each reason."""
    reason = unserved(**_SIGNATURE.bind(*args, **kwargs).arguments)
    _made[:] = [reason is None]
    if reason is None:
        return KVCoreManager(*args, **kwargs)
    if reason not in _told:
        _told.add(reason)
        logger.warning("kvcore does not serve %s: vLLM keeps its own manager", reason)
    return OwnManager(*args, **kwargs)


def unserved(
    kv_cache_config: Any,
    dcp_world_size: int = 1,
    pcp_world_size: int = 1,
    num_hash_lookahead_tokens: int = 0,
    metrics_collector: object | None = None,
    **_: object,
) -> str | None:
    """Return what of a manager's arguments kvcore has no answer to; None where it has all."""
    groups = kv_cache_config.kv_cache_groups
    if kv_cache_config.num_blocks < 2:
        return "a cache without blocks"
    if not groups:
        return "a model without groups of layers"
    if any(each.role is not KVCacheGroupRole.DEFAULT or each.host_resident for each in groups):
        return "HiSparse"
    # 0, vLLM's default, keeps windows at ends of prompts alone: those that kvcore evicts last.
    if kv_cache_config.prefix_cache_retention_interval:
        return "windows that are kept at intervals"
    reason = unserved_layers([group.kv_cache_spec for group in groups])
    if reason is not None:
        return reason
    if dcp_world_size > 1 or pcp_world_size > 1:
        return "context parallelism"
    if num_hash_lookahead_tokens:
        return "hashes that look ahead"
    return None if metrics_collector is None else "metrics of how long blocks stay"
