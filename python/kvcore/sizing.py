# SPDX-License-Identifier: Apache-2.0
"""How many pages, tokens and requests fit into how many bytes."""

from __future__ import annotations

from dataclasses import replace

from kvcore.arguments import integer
from kvcore.errors import CapacityError
from kvcore.params import KVCacheParams, require_count, require_params

__all__ = [
    "batch_per_replica",
    "chosen_pages",
    "estimated_memory_size",
    "host_pages",
    "host_pages_per_replica",
    "infer_optimal_batch_size",
    "max_supported_sequence_length",
    "pages_per_replica",
    "rederived",
]

_GIB = 1 << 30


def rederived(
    params: KVCacheParams, *, num_layers: int | None = None, page_size: int | None = None
) -> KVCacheParams:
    """Return the params with the given values in place of their own."""
    require_params(params)
    return replace(
        params,
        num_layers=params.num_layers if num_layers is None else num_layers,
        page_size=params.page_size if page_size is None else page_size,
    )


def batch_per_replica(params: KVCacheParams, max_batch_size: int) -> int:
    """Return ``ceil(max_batch_size / data_parallel_degree)``."""
    return -(-max_batch_size // params.data_parallel_degree)


def _bytes(memory: int) -> int:
    found = integer("memory", memory)
    if found < 0:
        raise ValueError(f"memory is {found} bytes, must be at least 0")
    return found


def pages_per_replica(params: KVCacheParams, memory: int) -> int:
    """Return the pages of one replica when `memory` bytes are shared by all."""
    require_params(params)
    return _bytes(memory) // params.data_parallel_degree // params.bytes_per_page


def host_pages_per_replica(params: KVCacheParams) -> int:
    """Return the pages that the host tier's space holds for a replica; 0 without a tier."""
    if not params.enable_kvcache_swapping_to_host:
        return 0
    space = int((params.host_kvcache_swap_space_gb or 0) * _GIB)
    return space // params.bytes_per_page


def host_pages(params: KVCacheParams) -> int:
    """Return the pages that the host tier's space holds, over all replicas; 0 without a tier."""
    return host_pages_per_replica(params) * params.data_parallel_degree


def chosen_pages(
    params: KVCacheParams, available_cache_memory: int | None, num_pages: int | None
) -> int:
    """Return the pages of one replica, of which exactly one size is given.

    Raises
    ------
    CapacityError
        The memory does not hold one page.
    ValueError, TypeError
    """
    if (available_cache_memory is None) == (num_pages is None):
        raise ValueError(
            f"available_cache_memory is {available_cache_memory} and num_pages is {num_pages}, "
            f"exactly one of them must be given"
        )
    if num_pages is not None:
        require_count(num_pages=num_pages)
        return num_pages
    pages = pages_per_replica(params, available_cache_memory or 0)
    if pages < 1:
        raise CapacityError(
            f"available_cache_memory is {available_cache_memory} bytes for "
            f"{params.data_parallel_degree} replicas, one page needs {params.bytes_per_page} bytes "
            f"in each"
        )
    return pages


def _pages_per_sequence(params: KVCacheParams, max_seq_len: int) -> int:
    return -(-max_seq_len // params.page_size)


def estimated_memory_size(
    params: KVCacheParams, max_batch_size: int, max_seq_len: int, memory: int
) -> int:
    """Return the bytes over all replicas: at most `memory`, at most what the batch can use."""
    require_params(params)
    require_count(max_batch_size=max_batch_size, max_seq_len=max_seq_len)
    pages = batch_per_replica(params, max_batch_size) * _pages_per_sequence(params, max_seq_len)
    replicas = params.data_parallel_degree
    return replicas * min(_bytes(memory) // replicas, pages * params.bytes_per_page)


def max_supported_sequence_length(params: KVCacheParams, memory: int) -> int:
    """Return the tokens that one replica holds, a multiple of the page size."""
    return pages_per_replica(params, memory) * params.page_size


def infer_optimal_batch_size(params: KVCacheParams, max_seq_len: int, memory: int) -> int:
    """Return how many longest sequences fit, over all replicas."""
    require_count(max_seq_len=max_seq_len)
    pages = pages_per_replica(params, memory)
    return pages // _pages_per_sequence(params, max_seq_len) * params.data_parallel_degree
