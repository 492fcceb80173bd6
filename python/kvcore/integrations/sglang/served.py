# SPDX-License-Identifier: Apache-2.0
"""Checks of SGLang's arguments and options: the cache class, or the reason for a refusal."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.runtime_context import get_disagg, get_memory

from kvcore.integrations.gate import refused_calls
from kvcore.integrations.sglang.cache import KVCoreRadixCache, KVCoreWindowCache

# SGLang's arguments for a new cache; kvcore was reviewed for each of them.
_CONTEXT = frozenset(
    {
        *("server_args", "params", "is_hybrid_swa", "is_hybrid_ssm", "enable_hierarchical_cache"),
        *("disable_radix_cache", "tp_worker", "model_config", "tp_size", "tp_rank", "tp_group"),
        *("full_tokens_per_layer", "is_dsa"),
    }
)
_PARAMS = frozenset(
    {
        *("disable", "req_to_token_pool", "token_to_kv_pool_allocator", "page_size", "is_eagle"),
        *("tp_cache_group", "attn_cp_cache_group", "attn_tp_cache_group", "pp_cache_group"),
        *("eviction_policy", "eviction_policy_config", "enable_metrics", "enable_kv_cache_events"),
        *("dynamo_kv_event_format", "kv_event_lora_names", "enable_session_radix_cache"),
        *("enable_mamba_extra_buffer", "enable_mamba_extra_buffer_lazy", "pp_rank", "pp_size"),
        *("attn_cp_rank", "attn_cp_size", "chunked_prefill_size", "sliding_window_size"),
        *("swa_gates_prefix_match", "decoder_swa_bounded_replay", "draft_swa_window"),
        *("tree_components", "component_registry_override", "tree_core_backend"),
        *("mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools"),
    }
)

# Options of SGLang that have their own tier, tree or pool.
_OTHERS = (
    *("enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_unified_memory"),
    *("enable_unified_cache_external_linker", "enable_session_radix_cache"),
)


def unknown(context: Any) -> str | None:
    """Return the arguments or calls of SGLang that kvcore does not support; None if all fit."""
    names = (vars(context).keys() - _CONTEXT) | (vars(context.params).keys() - _PARAMS)
    if names:
        return f"kvcore does not know the cache's arguments {', '.join(sorted(names))}"
    classes = (KVCoreRadixCache, KVCoreWindowCache)
    refused = [each for ours in classes for each in refused_calls(ours, BasePrefixCache)]
    return f"this SGLang calls its cache in another way ({'; '.join(refused)})" if refused else None


def cache_class(context: Any) -> type[KVCoreRadixCache]:
    """Return a model's cache class; raise NotImplementedError for an unsupported feature."""
    memory, params = get_memory(), context.params
    allocator = params.token_to_kv_pool_allocator
    policy, config = params.eviction_policy, params.eviction_policy_config
    backup = get_disagg().disaggregation_decode_retraction_backup
    windows = context.is_hybrid_swa and context.full_tokens_per_layer == 0
    refused = {f"--{each.replace('_', '-')}": getattr(memory, each) for each in _OTHERS} | {
        "Mamba or other recurrent states": context.is_hybrid_ssm,
        "full attention together with sliding windows": context.is_hybrid_swa and not windows,
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
