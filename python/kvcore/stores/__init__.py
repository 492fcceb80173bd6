# SPDX-License-Identifier: Apache-2.0
"""Stores of pages below the device: the protocol, stores on disks and servers, names of tiers."""

from kvcore.metrics import TierMetrics
from kvcore.stores.disk import DiskStore
from kvcore.stores.memory import MemoryStore
from kvcore.stores.mooncake_store import MooncakeStore
from kvcore.stores.protocol import (
    BlockStore,
    FinishedHandle,
    StoreCapacity,
    StoreHandle,
    StoreHealth,
)
from kvcore.stores.redis_store import RedisStore
from kvcore.stores.specs import (
    DiskTier,
    HostTier,
    MooncakeTier,
    RedisTier,
    TierSpec,
    parse_tier,
)

__all__ = [
    "BlockStore",
    "DiskStore",
    "DiskTier",
    "FinishedHandle",
    "HostTier",
    "MemoryStore",
    "MooncakeStore",
    "MooncakeTier",
    "RedisStore",
    "RedisTier",
    "StoreCapacity",
    "StoreHandle",
    "StoreHealth",
    "TierMetrics",
    "TierSpec",
    "parse_tier",
]
