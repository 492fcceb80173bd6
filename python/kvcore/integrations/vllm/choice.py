# SPDX-License-Identifier: Apache-2.0
"""The choice of a scheduler's manager: kvcore's if it can serve the cache, else vLLM's own."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import scheduler
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import KVCacheGroupRole

import kvcore
from kvcore.integrations.gate import refused_calls
from kvcore.integrations.vllm import hashes
from kvcore.integrations.vllm.layers import unserved_layers
from kvcore.integrations.vllm.manager import KVCoreManager
from kvcore.integrations.vllm.pool import Pool

logger = logging.getLogger("vllm.kvcore")
_SIGNATURE = inspect.signature(KVCacheManager)
_make_hasher = core.get_request_block_hasher
_told: set[str] = set()
_made: list[bool] = []  # true if the last manager is kvcore's

#: The arguments that vLLM's own constructor reads; kvcore's manager calls that constructor.
READ_BY_VLLM = frozenset(
    {
        *("max_model_len", "scheduler_block_size", "hash_block_size", "max_in_flight_tokens"),
        *("enable_caching", "use_eagle", "num_prefill_lookahead", "log_stats"),
        *("enable_kv_cache_events", "watermark", "enable_mamba_shared_prefix_checkpoint"),
    }
)


def rebind() -> str | None:
    """Replace the manager class that vLLM's scheduler looks up by `make_manager`.

    Returns
    -------
    str, optional
        The reason why nothing was changed; None after this or an earlier replacement.
    """
    if scheduler.KVCacheManager is make_manager:
        return None
    if scheduler.KVCacheManager is not KVCacheManager or core.get_request_block_hasher is not (
        kv_cache_utils.get_request_block_hasher
    ):
        return "another plug-in has replaced vLLM's manager or its hashes of blocks"
    refused = [*refused_calls(KVCoreManager, KVCacheManager), *refused_calls(Pool, BlockPool)]
    if refused:
        return f"this vLLM calls its manager in another way ({'; '.join(refused)})"
    scheduler.KVCacheManager = make_manager
    core.get_request_block_hasher = lazily_hashed
    return None


def lazily_hashed(*args: Any, **kwargs: Any) -> Any:
    """Make the block hasher of an engine's requests: a lazy hasher if the last manager is kvcore's.

    An engine makes its scheduler, with the manager, directly before this call.
    """
    made = hashes.lazy(_make_hasher) if _made[-1:] == [True] else _make_hasher
    return made(*args, **kwargs)


def make_manager(*args: Any, **kwargs: Any) -> KVCacheManager:
    """Make kvcore's manager, or vLLM's own and log the reason, once for each reason."""
    made, reason = None, None
    try:
        reason = unserved(**_SIGNATURE.bind(*args, **kwargs).arguments)
        if reason is None:
            made = KVCoreManager(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - after any error, vLLM runs without kvcore
        reason = f"kvcore failed with {type(error).__name__}: {error}"
    _made[:] = [made is not None]
    if made is not None:
        config = made.kv_cache_config
        logger.info(
            "KV cache manager: kvcore %s (%s), %d blocks, %d group(s) of layers",
            kvcore.__version__,
            type(made).__name__,
            config.num_blocks,
            len(config.kv_cache_groups),
        )
        return made
    if reason not in _told:
        _told.add(str(reason))
        logger.warning("KV cache manager: vLLM's own, not kvcore's: %s", reason)
    return KVCacheManager(*args, **kwargs)


def unserved(
    kv_cache_config: Any,
    dcp_world_size: int = 1,
    pcp_world_size: int = 1,
    num_hash_lookahead_tokens: int = 0,
    metrics_collector: object | None = None,
    **others: object,
) -> str | None:
    """Return the reason why kvcore cannot serve a manager's arguments; None if it can."""
    unknown = others.keys() - READ_BY_VLLM
    if unknown:
        return f"kvcore does not know the manager's arguments {', '.join(sorted(unknown))}"
    what = unserved_cache(kv_cache_config)
    if dcp_world_size > 1 or pcp_world_size > 1:
        what = what or "context parallelism"
    if num_hash_lookahead_tokens:
        what = what or "hashes that look ahead"
    if metrics_collector is not None:
        what = what or "metrics of how long blocks stay"
    return None if what is None else f"kvcore does not serve {what}"


def unserved_cache(kv_cache_config: Any) -> str | None:
    """Return the first feature of a cache's groups that kvcore cannot serve; None if it can."""
    groups = kv_cache_config.kv_cache_groups
    if kv_cache_config.num_blocks < 2:
        return "a cache without blocks"
    if not groups:
        return "a model without groups of layers"
    if any(each.role is not KVCacheGroupRole.DEFAULT or each.host_resident for each in groups):
        return "HiSparse"
    # 0, vLLM's default, keeps only the windows at ends of prompts; kvcore evicts these last.
    if kv_cache_config.prefix_cache_retention_interval:
        return "windows that are kept at intervals"
    return unserved_layers([group.kv_cache_spec for group in groups])
