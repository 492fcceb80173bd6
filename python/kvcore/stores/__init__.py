# SPDX-License-Identifier: Apache-2.0
"""Stores of pages below the device: the protocol, a store on disks, texts that name tiers."""

from kvcore.metrics import TierMetrics
from kvcore.stores.disk import DiskStore
from kvcore.stores.memory import MemoryStore
from kvcore.stores.protocol import (
    BlockStore,
    FinishedHandle,
    StoreCapacity,
    StoreHandle,
    StoreHealth,
)
from kvcore.stores.specs import DiskTier, HostTier, TierSpec, parse_tier

__all__ = [
    "BlockStore",
    "DiskStore",
    "DiskTier",
    "FinishedHandle",
    "HostTier",
    "MemoryStore",
    "StoreCapacity",
    "StoreHandle",
    "StoreHealth",
    "TierMetrics",
    "TierSpec",
    "parse_tier",
]
