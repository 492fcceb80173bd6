# SPDX-License-Identifier: Apache-2.0
"""Free memory, a manager for one call of ``generate``, and whether requests fit a given one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvcore import CapacityError, Device, KVCacheParams, PagedKVCacheManager
from kvcore.integrations.transformers.devices import free_device_memory
from kvcore.scheduler import Request
from kvcore.sizing import (
    STATES_PER_REQUEST,
    batch_with_slots,
    longest_sequence,
    pages_per_replica,
    pages_per_sequence,
)

__all__ = ["check_capacity", "free_memory", "make_manager"]

_MOST_SEQUENCES = 256
_SHARE = 0.5  # of the free memory
_CGROUP = Path("/sys/fs/cgroup")


def make_manager(
    params: KVCacheParams, requests: Sequence[Request], max_batch_tokens: int, device: Device
) -> PagedKVCacheManager:
    """Make a manager with pages for all sequences, or as many as half the free memory holds.

    Where layers keep a state, slots for the requests that run come out of the same half.

    Parameters
    ----------
    params : KVCacheParams
    requests : sequence of Request
    max_batch_tokens : int
        Tokens of a forward, which windows need pages for.
    device : Device
        Of the pool.

    Raises
    ------
    CapacityError
        That memory does not hold the longest sequence.
    """
    lengths = [written_tokens(r) for r in requests for _ in range(1 + len(r.siblings))]
    pages = [pages_per_sequence(params, length, max_batch_tokens) for length in lengths]
    memory, most = int(free_memory(device) * _SHARE), min(len(lengths), _MOST_SEQUENCES)
    batch = batch_with_slots(params, memory, max(pages), most)
    slots = STATES_PER_REQUEST * batch if params.state_groups else 0
    budget = pages_per_replica(params, memory, slots)
    if budget < max(pages):
        beside = slots * params.bytes_per_state_slot
        raise CapacityError(
            f"the longest sequence needs {max(pages)} pages of {params.bytes_per_page} bytes"
            f"{f' beside {beside} bytes of states' if beside else ''}, half the free memory holds "
            f"{budget}; ask for fewer max_new_tokens or pass a manager"
        )
    return PagedKVCacheManager(
        params,
        max_batch_size=batch,
        max_seq_len=max(lengths),
        devices=[device],
        num_pages=min(sum(pages), budget),
        num_states=slots or None,
    )


def check_capacity(
    manager: PagedKVCacheManager, requests: Sequence[Request], max_batch_tokens: int
) -> None:
    """Refuse a sequence that the manager can never hold, in forwards of so many tokens.

    Raises
    ------
    CapacityError
    """
    pool = longest_sequence(manager.params, manager.total_num_pages, max_batch_tokens)
    for request in requests:
        needed = written_tokens(request)
        if needed > min(pool, manager.max_seq_len):
            raise CapacityError(
                f"prompt {request.owner.prompt_index} of {request.num_prompt} tokens comes to "
                f"{needed} with max_new_tokens, the manager holds {pool} and max_seq_len is "
                f"{manager.max_seq_len}; ask for fewer or give it more"
            )


def written_tokens(request: Request) -> int:
    """Count the tokens whose K and V a sequence writes at most: all but the last."""
    return request.num_prompt + request.left - 1


def free_memory(device: Device) -> int:
    """Return the bytes of a device's memory that this process may still take.

    Returns
    -------
    int
        Of a GPU what nobody has taken. Of the host what the system calls available, within the
        limit of the process' control group.
    """
    if device.kind != "cpu":
        return free_device_memory(device.index)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) << 10 if "MemAvailable" in fields else free
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        bound = _CGROUP / limit
        if bound.is_file() and (text := bound.read_text().strip()).isdecimal():
            free = min(free, max(0, int(text) - int((_CGROUP / used).read_text())))
    return free
