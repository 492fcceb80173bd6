# SPDX-License-Identifier: Apache-2.0
"""Free memory, a manager for one call of ``generate``, and the check of a given manager."""

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
    """Make a manager with pages for all sequences, but at most half the free memory.

    If layers keep a state, the slots of the running requests come out of the same half.

    Parameters
    ----------
    params : KVCacheParams
    requests : sequence of Request
    max_batch_tokens : int
        Tokens of a forward; windows need pages for them.
    device : Device
        The device of the pool.

    Raises
    ------
    CapacityError
        Half the free memory does not hold the longest sequence.
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
            f"{budget}; reduce max_new_tokens or pass a manager"
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
    """Refuse a sequence that the manager can never hold, with forwards of `max_batch_tokens`.

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
                f"{manager.max_seq_len}; reduce max_new_tokens or enlarge the manager"
            )


def written_tokens(request: Request) -> int:
    """Return the most tokens whose K and V a sequence writes: all but its last token."""
    return request.num_prompt + request.left - 1


def free_memory(device: Device) -> int:
    """Return the bytes of a device's memory that this process can still take.

    Returns
    -------
    int
        For a GPU, its free memory. For the host, the memory that the system reports as available,
        within the limit of the process' control group.
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
