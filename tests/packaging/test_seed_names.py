# SPDX-License-Identifier: Apache-2.0
"""Every name of the documented API exists, or the migration guide gives the reason."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import kvcore
from builders import make_manager
from slot_managers import slot_manager

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"
HEADING = "## Names of MAX that are absent"

TOP_LEVEL = """
    ContinuousBatchingKVCache ContinuousBatchingKVCacheCollection
    ContinuousBatchingKVCacheCollectionType ContinuousBatchingKVCacheManager
    ContinuousBatchingKVCacheType FetchContinuousBatchingKVCacheCollection PagedKVCacheManager
    KVCacheMetrics KVCacheParams RaggedKVCacheInputs TextGenerationContext Device
    DPPagedKVCacheManager InferenceSession KVCacheStaticParams RequestID
    continuous_batching_cache cache_manager
    Value TensorValue TensorType Weight Shape Dim
    DType NDBuffer Tensor Layout LayoutTensor TileTensor IntTuple IndexList
    KVCacheManagerT KVCollectionT _ContinuousBatchingInflightBatchHandle
    AnyType Copyable ImplicitlyCopyable ImplicitlyDestructible Movable UnknownDestructibility
"""
MEMBERS = {
    "ContinuousBatchingKVCacheManager": """
        CollectionType BlocksType blocks blocks_buf blocks_nd_buf cache_lengths num_blocks
        max_batch_size max_seq_len seq_id_counter inflight_batch num_layers this_device
        other_device devices params claim fetch step release block_shape estimated_memory_size
        increment_cache_lengths input_symbols
    """,
    "ContinuousBatchingKVCacheCollection": """
        blocks cache_lengths lookup_table max_seq_length max_cache_length scales
        kv_cache_dynamic_shape kv_cache_dynamic_strides blocks_layout blocks_shape
        blocks_tt_layout blocks_tt_type CacheType dtype kv_params name_str scale_dtype
        get_key_cache get_value_cache cache_length
    """,
    "PagedKVCacheManager": """
        contains estimated_memory_size external_claim fetch free_blocks_pct
        get_data_parallel_splits get_or_recommend_replica get_replica get_req_blocks
        host_committed_block_pct increment_cache_lengths infer_optimal_batch_size input_symbols
        max_supported_sequence_length maybe_reserve metrics num_free_blocks num_replicas release
        reset_metrics reset_prefix_cache step total_num_host_pages used_blocks_pct
    """,
    "TextGenerationContext": "request_id update",
    "RaggedKVCacheInputs": "blocks cache_lengths lookup_table max_lengths",
    "KVCacheParams": "data_parallel_degree page_size",
}
# A context is `ctx` in every method. `test_context_argument.py` passes the documented names,
# `context` and `data`, by keyword.
ARGUMENTS = {
    "ContinuousBatchingKVCacheManager": {
        "__init__": "params max_cache_batch_size max_seq_len num_layers devices session",
        "block_shape": "n_sequences",
        "estimated_memory_size": "params max_cache_batch_size max_seq_len num_layers devices",
        "claim": "batch_size",
        "fetch": "seq_ids",
        "step": "valid_lengths",
        "release": "seq_id",
        "increment_cache_lengths": "kv_cache_inputs prev_model_inputs",
    },
    "ContinuousBatchingKVCacheCollection": {
        "__init__": "blocks cache_lengths lookup_table max_seq_length max_cache_length scales",
        "get_key_cache": "layer_idx",
        "get_value_cache": "layer_idx",
    },
    "FetchContinuousBatchingKVCacheCollection": {"__init__": "kv_params"},
    "PagedKVCacheManager": {
        "__init__": """params max_batch_size max_seq_len num_layers devices session
            available_cache_memory zmq_endpoint_base page_size enable_runtime_checks""",
        "contains": "request_id",
        "estimated_memory_size": """params max_batch_size max_seq_len num_layers
            available_cache_memory devices""",
        "external_claim": "request_id replica_idx",
        "fetch": "batch num_steps",
        "get_data_parallel_splits": "context_batch",
        "get_or_recommend_replica": "ctx",
        "get_replica": "ctx",
        "get_req_blocks": "request_id",
        "increment_cache_lengths": "kv_cache_inputs prev_model_inputs",
        "infer_optimal_batch_size": """params max_seq_len num_layers available_cache_memory
            devices""",
        "input_symbols": "devices num_layers",
        "max_supported_sequence_length": "params num_layers memory_available",
        "maybe_reserve": "ctx num_steps",
        "release": "request_id",
        "step": "batch",
    },
}


def absent() -> dict[str, str]:
    """Return the guide's table of missing names and the reasons."""
    _, found, section = GUIDE.read_text().partition(HEADING)
    assert found, f"{GUIDE.name} has no section {HEADING!r}"
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", section.split("\n## ")[0], re.M)
    return {name: why for names, why in rows for name in re.findall(r"`(.+?)`", names)}


def owner(name: str) -> Any:
    """Return an object with a class's members: some members exist only in an instance."""
    if name == "ContinuousBatchingKVCacheManager":
        return slot_manager()
    if name == "ContinuousBatchingKVCacheCollection":
        return slot_manager().fetch_collection([])[0]
    if name == "PagedKVCacheManager":
        return make_manager()
    return getattr(kvcore, name)


@pytest.mark.parametrize("name", TOP_LEVEL.split())
def test_top_level_name_is_there_or_absent_for_a_reason(name: str) -> None:
    assert (name in kvcore.__all__) != (name in absent())
    assert hasattr(kvcore, name) == (name in kvcore.__all__)


@pytest.mark.parametrize(
    ("of", "name"), [(of, name) for of in MEMBERS for name in MEMBERS[of].split()]
)
def test_member_is_there_or_absent_for_a_reason(of: str, name: str) -> None:
    assert hasattr(owner(of), name) != (name in absent())


@pytest.mark.parametrize(("of", "verb"), [(of, verb) for of in ARGUMENTS for verb in ARGUMENTS[of]])
def test_arguments_have_the_documented_names_and_order(of: str, verb: str) -> None:
    signature = inspect.signature(getattr(getattr(kvcore, of), verb))
    given = [name for name in signature.parameters if name != "self"]
    expected = ARGUMENTS[of][verb].split()
    assert given[: len(expected)] == expected


def test_absent_names_are_names_of_the_api_and_have_reasons() -> None:
    named = " ".join([TOP_LEVEL, *MEMBERS.values()]).split()
    assert absent()
    assert absent().keys() <= set(named)
    assert all(len(why) > 10 for why in absent().values())


def test_all_exported_names_exist() -> None:
    assert sorted(kvcore.__all__) == list(kvcore.__all__)
    assert [name for name in kvcore.__all__ if not hasattr(kvcore, name)] == []
