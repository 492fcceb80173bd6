# SPDX-License-Identifier: Apache-2.0
"""What the cache serves, and what it refuses."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_disagg, get_memory

from kvcore.integrations.sglang.cache import KVCoreRadixCache, KVCoreWindowCache

# Options of SGLang that bring a tier, a tree or a pool of their own.
_OTHERS = (
    *("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_unified_memory"),
    *("enable_unified_cache_external_linker", "enable_session_radix_cache"),
)


def cache_class(context: Any) -> type[KVCoreRadixCache]:
    """Return the class of a model's cache. NotImplementedError for what it does not serve."""
    memory, params = get_memory(), context.params
    allocator = params.token_to_kv_pool_allocator
    policy, config = params.eviction_policy, params.eviction_policy_config
    backup = get_disagg().disaggregation_decode_retraction_backup
    windows = context.is_hybrid_swa and context.full_tokens_per_layer == 0
    refused = {f"--{each.replace('_', '-')}": getattr(memory, each) for each in _OTHERS} | {
        "Mamba or other recurrent states": context.is_hybrid_ssm,
        "full attention beside sliding windows": context.is_hybrid_swa and not windows,
        f"--disaggregation-decode-retraction-backup {backup}": backup == "host_pool",
        f"--radix-eviction-policy {policy}": policy.lower() not in KVCoreRadixCache.POLICIES,
        f"--radix-eviction-policy-config {config}": config and config != {"protected_threshold": 2},
        type(allocator).__name__: not (windows or hasattr(allocator, "free_page_ids")),
    }
    for what in (what for what, is_asked_for in refused.items() if is_asked_for):
        raise NotImplementedError(
            f"--radix-cache-backend kvcore does not serve {what}; leave out one of the two"
        )
    return KVCoreWindowCache if windows else KVCoreRadixCache
