# SPDX-License-Identifier: Apache-2.0
"""How many pages, tokens and requests fit into how many bytes."""

from __future__ import annotations

from dataclasses import replace

from kvcore.params import KVCacheParams, require_count

__all__ = [
    "batch_per_replica",
    "estimated_memory_size",
    "infer_optimal_batch_size",
    "max_supported_sequence_length",
    "pages_per_replica",
    "rederived",
]


def rederived(
    params: KVCacheParams, *, num_layers: int | None = None, page_size: int | None = None
) -> KVCacheParams:
    """Answer the params with the given values in place of their own."""
    return replace(
        params,
        num_layers=params.num_layers if num_layers is None else num_layers,
        page_size=params.page_size if page_size is None else page_size,
    )


def batch_per_replica(params: KVCacheParams, max_batch_size: int) -> int:
    """Answer ``ceil(max_batch_size / data_parallel_degree)``."""
    return -(-max_batch_size // params.data_parallel_degree)


def pages_per_replica(params: KVCacheParams, memory: int) -> int:
    """Answer the pages of one replica when `memory` bytes are shared by all."""
    return max(0, memory // params.data_parallel_degree // params.bytes_per_page)


def _pages_per_sequence(params: KVCacheParams, max_seq_len: int) -> int:
    return -(-max_seq_len // params.page_size)


def estimated_memory_size(
    params: KVCacheParams, max_batch_size: int, max_seq_len: int, memory: int
) -> int:
    """Answer the bytes over all replicas: at most `memory`, at most what the batch can use."""
    require_count(max_batch_size=max_batch_size, max_seq_len=max_seq_len)
    pages = batch_per_replica(params, max_batch_size) * _pages_per_sequence(params, max_seq_len)
    replicas = params.data_parallel_degree
    return replicas * min(memory // replicas, pages * params.bytes_per_page)


def max_supported_sequence_length(params: KVCacheParams, memory: int) -> int:
    """Answer the tokens that one replica holds, a multiple of the page size."""
    return pages_per_replica(params, memory) * params.page_size


def infer_optimal_batch_size(params: KVCacheParams, max_seq_len: int, memory: int) -> int:
    """Answer how many longest sequences fit, over all replicas."""
    require_count(max_seq_len=max_seq_len)
    pages = pages_per_replica(params, memory)
    return pages // _pages_per_sequence(params, max_seq_len) * params.data_parallel_degree
