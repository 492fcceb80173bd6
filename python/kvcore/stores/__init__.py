# SPDX-License-Identifier: Apache-2.0
"""Provide stores of pages below the device: the protocol, disk and server stores, tier names.

The module of a store, with its sockets or clients, is imported when its name is first used.
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
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

_MODULES = {
    "kvcore.metrics": ("TierMetrics",),
    "kvcore.stores.disk": ("DiskStore",),
    "kvcore.stores.memory": ("MemoryStore",),
    "kvcore.stores.mooncake_store": ("MooncakeStore",),
    "kvcore.stores.protocol": (
        *("BlockStore", "FinishedHandle", "StoreCapacity", "StoreHandle", "StoreHealth"),
    ),
    "kvcore.stores.redis_store": ("RedisStore",),
    "kvcore.stores.specs": (
        *("DiskTier", "HostTier", "MooncakeTier", "RedisTier", "TierSpec", "parse_tier"),
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


if not _typing.TYPE_CHECKING:  # otherwise type checkers would accept any name of the package

    def __getattr__(name: str) -> object:
        """Import the module of a public name when the name is first used."""
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module 'kvcore.stores' has no attribute {name!r}")
        found = getattr(_importlib.import_module(module), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
