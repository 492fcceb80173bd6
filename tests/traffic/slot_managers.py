# SPDX-License-Identifier: Apache-2.0
"""Continuous-batching managers for tests, and the state of a manager that a caller sees."""

from __future__ import annotations

from typing import Any

import kvcore
from builders import make_params

SLOTS = 4
ROOM = 8  # tokens per slot
LAYERS = 2


def slot_manager(
    slots: int = SLOTS, room: int = ROOM, *, shards: int = 1, **params: Any
) -> kvcore.ContinuousBatchingKVCacheManager:
    """Return a manager: two layers of one head per device, two float32 elements wide."""
    made = make_params(shards=shards, **params)
    return kvcore.ContinuousBatchingKVCacheManager(made, slots, room, LAYERS, ["cpu"] * shards)


def seen(manager: kvcore.ContinuousBatchingKVCacheManager) -> tuple[Any, ...]:
    """Return all state of the slots that a call could change."""
    manager.check_integrity()
    claimed = [n for n in range(-1, manager.num_blocks + 1) if manager.contains(n)]
    return claimed, manager.cache_lengths, manager.slots_remaining
