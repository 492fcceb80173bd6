# SPDX-License-Identifier: Apache-2.0
"""Compute how many pages, tokens and requests fit into a number of bytes."""

from __future__ import annotations

from dataclasses import replace

from kvcore.errors import CapacityError
from kvcore.groups import bundles
from kvcore.layers.kinds import MAX_CHUNK_TOKENS
from kvcore.layers.layer_map import column_tokens, pages_per_column
from kvcore.params import KVCacheParams, require_count, require_params
from kvcore.support.arguments import integer

__all__ = [
    "STATES_PER_REQUEST",
    "batch_per_replica",
    "batch_with_slots",
    "checkpoints_per_replica",
    "chosen_pages",
    "estimated_memory_size",
    "host_pages",
    "host_pages_per_replica",
    "host_states_per_replica",
    "infer_optimal_batch_size",
    "longest_sequence",
    "max_supported_sequence_length",
    "pages_per_replica",
    "pages_per_sequence",
    "rederived",
    "sequence_bytes",
]

#: State slots per request: the slot of the request, and a slot for a checkpoint.
STATES_PER_REQUEST = 2
#: With fewer checkpoints, few prompts share a checkpoint: each chat prompt takes two to three.
_FEWEST_CHECKPOINTS = 16
_SHARE_OF_CHECKPOINTS = 8  # 1 / 8 of a replica's memory may go to these checkpoints

_GIB = 1 << 30
_MOST_TOKENS = 2**31 - 1


def rederived(
    params: KVCacheParams, *, num_layers: int | None = None, page_size: int | None = None
) -> KVCacheParams:
    """Return a copy of the params with `num_layers` and `page_size` replaced where given."""
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


def pages_per_replica(params: KVCacheParams, memory: int, num_states: int = 0) -> int:
    """Return the pages of one replica if all replicas share `memory` bytes.

    The share of each replica also holds `num_states` state slots.
    """
    require_params(params)
    share = _bytes(memory) // params.data_parallel_degree
    return max(0, share - num_states * params.bytes_per_state_slot) // params.bytes_per_page


def checkpoints_per_replica(
    params: KVCacheParams,
    max_batch_size: int,
    max_seq_len: int,
    slots_per_request: int,
    available_cache_memory: int | None,
    num_pages: int | None,
) -> int:
    """Return the default number of checkpoint slots of one replica.

    The replica gets a slot for each request. If the replica takes fewer than 16 requests, it gets
    up to 16 slots if the additional slots fit into an eighth of the memory. With
    `available_cache_memory`, the additional slots must also fit into the memory that the longest
    sequences of the batch leave. With `num_pages`, the additional slots take at most the bytes of
    an eighth of the pages, in addition to the pages.
    """
    batch = batch_per_replica(params, max_batch_size)
    slot = params.bytes_per_state_slot
    if available_cache_memory is not None:
        memory = _bytes(available_cache_memory) // params.data_parallel_degree
        needed = sequence_bytes(params, max_seq_len) + (slots_per_request - 1) * slot
        room = min(memory // _SHARE_OF_CHECKPOINTS, max(0, memory - batch * needed))
    else:
        room = (num_pages or 0) * params.bytes_per_page // _SHARE_OF_CHECKPOINTS
    return batch + max(0, min(_FEWEST_CHECKPOINTS - batch, room // slot))


def batch_with_slots(params: KVCacheParams, memory: int, num_pages: int, most: int) -> int:
    """Return the requests, at most `most`, whose state slots fit in addition to `num_pages`.

    `memory` is the memory of one replica. The result is at least 1: ``pages_per_replica`` returns
    0 if the slots leave no room for a page.
    """
    slots = STATES_PER_REQUEST * params.bytes_per_state_slot
    if not slots:
        return most
    return max(1, min(most, (memory - num_pages * params.bytes_per_page) // slots))


def _host_bytes(params: KVCacheParams) -> int:
    """Return the bytes of a replica's host tier; 0 without a tier."""
    if not params.enable_kvcache_swapping_to_host:
        return 0
    return int((params.host_kvcache_swap_space_gb or 0) * _GIB)


def host_states_per_replica(params: KVCacheParams, num_host_states: int | None = None) -> int:
    """Return the checkpoint slots of a replica's host tier, by default in half of its space.

    Raises
    ------
    ValueError
        `num_host_states` is not 0 without a host tier or a State group, or the slots leave no room
        for a page.
    """
    slot = params.bytes_per_state_slot
    space = _host_bytes(params)
    if num_host_states is None:
        return space // 2 // slot if slot else 0
    found = integer("num_host_states", num_host_states)
    if found and not (slot and space):
        lacks = "enable_kvcache_swapping_to_host is off" if slot else "no group is a State"
        raise ValueError(f"num_host_states is {found}, must be left out: {lacks}")
    most = max(0, space - params.bytes_per_page) // slot if slot else 0
    if not 0 <= found <= most:
        raise ValueError(
            f"num_host_states is {found}, must be 0 .. {most}: host_kvcache_swap_space_gb of "
            f"{params.host_kvcache_swap_space_gb} holds no more slots of {slot} bytes and a page"
        )
    return found


def host_pages_per_replica(params: KVCacheParams, num_host_states: int | None = None) -> int:
    """Return the pages that fit into a replica's host tier; 0 without a tier.

    The pages get the space that the state slots leave.
    """
    slots = host_states_per_replica(params, num_host_states)
    return (_host_bytes(params) - slots * params.bytes_per_state_slot) // params.bytes_per_page


def host_pages(params: KVCacheParams, num_host_states: int | None = None) -> int:
    """Return the pages that fit into the host tier, over all replicas; 0 without a tier."""
    return host_pages_per_replica(params, num_host_states) * params.data_parallel_degree


def chosen_pages(
    params: KVCacheParams,
    available_cache_memory: int | None,
    num_pages: int | None,
    num_states: int = 0,
    first_page: int = 0,
) -> int:
    """Return the pages of one replica, from a number of bytes or a number of pages.

    The caller gives either `available_cache_memory` or `num_pages`, and not both. The memory must
    also hold `num_states` state slots and the `first_page` pages reserved for the caller.

    Raises
    ------
    CapacityError
        The memory holds less than one page.
    ValueError, TypeError
    """
    if (available_cache_memory is None) == (num_pages is None):
        raise ValueError(
            f"available_cache_memory is {available_cache_memory} and num_pages is {num_pages}, "
            f"exactly one of them must be given"
        )
    integer("first_page", first_page, 0)
    if num_pages is not None:
        require_count(num_pages=num_pages)
        return num_pages
    pages = pages_per_replica(params, available_cache_memory or 0, num_states) - first_page
    if pages < 1:
        beside = num_states * params.bytes_per_state_slot
        states = f", {num_states} slots for states need {beside} bytes" if num_states else ""
        front = f", and first_page reserves {first_page} page ids" if first_page else ""
        raise CapacityError(
            f"available_cache_memory is {available_cache_memory} bytes for "
            f"{params.data_parallel_degree} replicas, one page needs {params.bytes_per_page} bytes "
            f"in each{states}{front}"
        )
    return pages


def pages_per_sequence(
    params: KVCacheParams, max_seq_len: int, max_chunk_tokens: int = MAX_CHUNK_TOKENS
) -> int:
    """Return the largest number of pages that a sequence holds, over all bundles.

    Parameters
    ----------
    params : KVCacheParams
    max_seq_len : int
        Tokens of the sequence.
    max_chunk_tokens : int
        Largest number of tokens of the sequence that run in one step: a window needs room for
        these tokens in addition to the tokens of the window.
    """
    require_params(params)
    require_count(max_seq_len=max_seq_len, max_chunk_tokens=max_chunk_tokens)
    return _pages_of(params, max_seq_len, max_chunk_tokens)


def _pages_of(params: KVCacheParams, tokens: int, max_chunk_tokens: int) -> int:
    if params.groups is None:
        return -(-tokens // params.page_size)
    # If bundles have pages of several sizes, a request takes pages in units of the largest page.
    run = column_tokens(params)
    return sum(
        pages * bundle.group.max_pages(tokens, run, max_chunk_tokens)
        for pages, bundle in zip(pages_per_column(params), bundles(params), strict=True)
    )


def sequence_bytes(
    params: KVCacheParams, max_seq_len: int, max_chunk_tokens: int = MAX_CHUNK_TOKENS
) -> int:
    """Return the largest number of bytes of a sequence and its states on a replica's devices."""
    pages = pages_per_sequence(params, max_seq_len, max_chunk_tokens)
    return pages * params.bytes_per_page + STATES_PER_REQUEST * params.bytes_per_state_slot


def estimated_memory_size(
    params: KVCacheParams,
    max_batch_size: int,
    max_seq_len: int,
    memory: int,
    max_chunk_tokens: int = MAX_CHUNK_TOKENS,
) -> int:
    """Return the bytes over all replicas: `memory`, or less if the batch cannot use all of it."""
    require_params(params)
    require_count(max_batch_size=max_batch_size)
    needed = sequence_bytes(params, max_seq_len, max_chunk_tokens)
    replicas = params.data_parallel_degree
    share = _bytes(memory) // replicas
    return replicas * min(share, batch_per_replica(params, max_batch_size) * needed)


def max_supported_sequence_length(
    params: KVCacheParams, memory: int, max_chunk_tokens: int = MAX_CHUNK_TOKENS
) -> int:
    """Return the tokens that fit into one replica, a multiple of the page size.

    If no group keeps every token and the window fits, the result is the largest multiple of the
    page size below 2**31.
    """
    require_count(max_chunk_tokens=max_chunk_tokens)
    pages = pages_per_replica(params, memory, STATES_PER_REQUEST)
    return longest_sequence(params, pages, max_chunk_tokens)


def longest_sequence(params: KVCacheParams, pages: int, max_chunk_tokens: int) -> int:
    """Return the tokens of the longest sequence that fits in `pages`, a multiple of the page size.

    Parameters
    ----------
    params : KVCacheParams
    pages : int
        Pages of one replica.
    max_chunk_tokens : int
        Largest number of tokens of the sequence that run in one step.
    """
    if params.groups is None:
        return pages * params.page_size
    size = column_tokens(params)
    fits, too_many = 0, _MOST_TOKENS // size + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if _pages_of(params, middle * size, max_chunk_tokens) <= pages:
            fits = middle
        else:
            too_many = middle
    return fits * size


def infer_optimal_batch_size(
    params: KVCacheParams,
    max_seq_len: int,
    memory: int,
    max_chunk_tokens: int = MAX_CHUNK_TOKENS,
) -> int:
    """Return the number of sequences of `max_seq_len` tokens that fit, over all replicas."""
    require_params(params)
    share = _bytes(memory) // params.data_parallel_degree
    needed = sequence_bytes(params, max_seq_len, max_chunk_tokens)
    return share // needed * params.data_parallel_degree
