# SPDX-License-Identifier: Apache-2.0
"""What a manager is told of its host tier: what goes there, when, and what leaves it first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcore.policies import LRU, EvictionPolicy, resolved

if TYPE_CHECKING:
    from kvcore.params import KVCacheParams

_DEFAULTS = {
    "write_policy": "write_through",
    "write_threshold": 2,
    "host_eviction": "lru",
    "host_min_priority": 0,
}


def checked_tier(
    params: KVCacheParams,
    write_policy: str,
    write_threshold: int,
    host_eviction: EvictionPolicy | str,
    host_min_priority: int,
) -> dict[str, Any]:
    """Return the arguments of ``CacheManager`` for them, which checks their values.

    Raises
    ------
    ValueError
        One of them is given without a host tier, or names no policy.
    TypeError
    """
    if not isinstance(write_policy, str):
        raise TypeError(f"write_policy is {write_policy!r}, must be the name of one")
    resolved(host_eviction, "host_eviction")
    given = {
        "write_policy": write_policy,
        "write_threshold": write_threshold,
        "host_eviction": "lru" if host_eviction == LRU() else host_eviction,
        "host_min_priority": host_min_priority,
    }
    if params.enable_kvcache_swapping_to_host:
        return given
    for name, value in given.items():
        if value != _DEFAULTS[name]:
            raise ValueError(
                f"{name} is {value!r}, must be left out: enable_kvcache_swapping_to_host is off"
            )
    return given
