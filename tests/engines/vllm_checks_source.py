# SPDX-License-Identifier: Apache-2.0
"""The attributes of a KV cache manager that vLLM reads, found in its sources.

Run by ``tests/integrations/run_vllm.py --part ours``.

If a name is not listed here, check the adapter for it.
"""

from __future__ import annotations

import re
from pathlib import Path

import vllm
from vllm.distributed import kv_events

import peer_events

#: Sources of vLLM that read a manager that may be kvcore's; vLLM's own managers read each other.
READERS = (
    "v1/core/sched/scheduler.py",
    "v1/core/sched/async_scheduler.py",
    "v1/core/sched/diffusion_scheduler.py",
    "v1/engine/core.py",
    "distributed/kv_transfer/kv_connector/v1/base.py",
    "distributed/aux_output_connector/connector.py",
)
SERVED = {
    "allocate_slots",
    "block_pool",
    "block_pool.free_blocks",
    "cache_blocks",
    "coordinator",
    "coordinator.enable_partial_hash_hits",
    "coordinator.get_num_blocks_to_allocate",
    "coordinator.single_type_managers",
    "empty_kv_cache_blocks",
    "empty_kv_cache_blocks.blocks",
    "estimate_cached_tokens",
    "evict_blocks",
    "finalize_partial_tail_offloads",
    "free",
    "get_block_ids",
    "get_block_ids_for_computed_tokens",
    "get_blocks",
    "get_computed_blocks",
    "get_computed_blocks_for_connector",
    "kv_cache_config",
    "make_prefix_cache_stats",
    "mamba_shared_prefix_checkpoint",
    "new_step_starts",
    "pop_blocks_for_free",
    "record_blocks_for_zeroing",
    "record_prefix_cache_stats",
    "remove_skipped_blocks",
    "reset_prefix_cache",
    "take_boundary_state_offloads",
    "take_events",
    "take_kv_cache_block_copies",
    "take_new_block_ids",
    "truncate_computed_blocks",
    "usage",
}
READ = re.compile(r"\b(?:kv_cache_manager|cache_manager)\s*\.\s*(\w+(?:\.\w+)?)")


def names_read(text: str) -> set[str]:
    """Return the attributes that a text reads, and the attributes of the manager's parts."""
    parts = ("block_pool", "coordinator", "empty_kv_cache_blocks")
    found = READ.findall(text)
    return {name if name.partition(".")[0] in parts else name.partition(".")[0] for name in found}


def test_vllm_reads_nothing_new() -> None:
    root = Path(vllm.__file__).parent
    read: set[str] = set()
    for name in READERS:
        text = (root / name).read_text()
        read |= names_read(re.sub(r"^\s*(from|import) .*$", "", text, flags=re.MULTILINE))
    assert read - SERVED == set()


def test_cache_events_have_the_fields_that_the_publisher_is_tested_with() -> None:
    assert peer_events.differing("vllm", kv_events) == []


def test_a_new_name_is_found() -> None:
    assert names_read("x = self.kv_cache_manager.block_pool.\nfoo") >= {"block_pool"}
    assert names_read("self.kv_cache_manager.coordinator.bar(1)") == {"coordinator.bar"}
    assert names_read("self.kv_cache_manager.free(request)") == {"free"}
