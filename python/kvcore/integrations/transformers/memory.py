# SPDX-License-Identifier: Apache-2.0
"""A manager for one call of ``generate``, and whether requests fit the one that is given."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvcore import CapacityError, KVCacheParams, PagedKVCacheManager
from kvcore.integrations.transformers.requests import Request

__all__ = ["check_capacity", "make_manager"]

_MOST_SEQUENCES = 256
_SHARE = 0.5  # of the free memory


def make_manager(params: KVCacheParams, requests: Sequence[Request]) -> PagedKVCacheManager:
    """Make a manager with pages for all sequences, or as many as half the free memory holds.

    Raises
    ------
    CapacityError
        That memory does not hold the longest sequence.
    """
    lengths = [written_tokens(r) for r in requests for _ in range(1 + len(r.siblings))]
    pages = [-(-length // params.page_size) for length in lengths]
    budget = int(free_bytes() * _SHARE) // params.bytes_per_page
    if budget < max(pages):
        raise CapacityError(
            f"the longest sequence needs {max(pages)} pages of {params.bytes_per_page} bytes, half "
            f"the free memory holds {budget}; ask for fewer max_new_tokens or pass a manager"
        )
    return PagedKVCacheManager(
        params,
        max_batch_size=min(len(lengths), _MOST_SEQUENCES),
        max_seq_len=max(lengths),
        num_pages=min(sum(pages), budget),
    )


def check_capacity(manager: PagedKVCacheManager, requests: Sequence[Request]) -> None:
    """Refuse a sequence that the manager can never hold.

    Raises
    ------
    CapacityError
    """
    pool = manager.total_num_pages * manager.params.page_size
    for request in requests:
        needed = written_tokens(request)
        if needed > min(pool, manager.max_seq_len):
            raise CapacityError(
                f"prompt {request.rank[0]} of {request.num_prompt} tokens comes to {needed} with "
                f"max_new_tokens, the manager holds {pool} and max_seq_len is "
                f"{manager.max_seq_len}; ask for fewer or give it more"
            )


def written_tokens(request: Request) -> int:
    """Count the tokens whose K and V a sequence writes at most: all but the last."""
    return request.num_prompt + request.left - 1


def free_bytes() -> int:
    """Answer the memory that the system could hand out without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
