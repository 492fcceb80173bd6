# SPDX-License-Identifier: Apache-2.0
"""Managers with stores, and requests whose bytes are checked, whichever tier returns them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext
from kvcore.stores import FinishedHandle, StoreCapacity, StoreHealth
from moved_requests import (
    expected_rows,
    moving_manager,
    moving_params,
    read_rows,
    write_chunk,
)

LONG = [(5 * i + 2) % 11 for i in range(42)]


def tiered_manager(
    *tiers: Any, params: KVCacheParams | None = None, **options: Any
) -> PagedKVCacheManager:
    return moving_manager(params or moving_params(), tiers=list(tiers), **options)


def run(
    manager: PagedKVCacheManager, tokens: Sequence[int], name: Any = "r", **options: Any
) -> int:
    """Serve a prompt and check every byte of it; return the number of cached tokens."""
    replica = options.pop("replica_idx", 0)
    context = TextGenerationContext(name, tokens, **options)
    manager.claim(name, replica)
    assert manager.maybe_reserve(context)
    cached = context.start_idx
    write_chunk(manager, context, 9)
    is_exact = manager.params.kv_scale_granularity is None
    for found, wanted in zip(
        read_rows(manager, context), expected_rows(manager, context), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=0 if is_exact else 0.1)
    manager.release(name)
    return cached


def served_by(
    tiers: Sequence[Any], tokens: Sequence[int] = LONG, params: Any = None, **options: Any
) -> int:
    """Return the tokens of a prompt that a new manager finds in stores."""
    with tiered_manager(*tiers, params=params) as manager:
        return run(manager, tokens, **options)


def store_prompt(
    tiers: Sequence[Any], tokens: Sequence[int] = LONG, params: Any = None, **options: Any
) -> None:
    """Store a prompt with a temporary manager."""
    with tiered_manager(*tiers, params=params) as manager:
        assert run(manager, tokens, **options) == 0
        assert manager.flush(timeout=60)


class DictStore:
    """A minimal store of 30 lines, as users write it: no checks, no locks, no parts."""

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.is_closed = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.pages for key in keys]

    def get_into(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> FinishedHandle:
        n = 0
        for key, buffer in zip(keys, buffers, strict=True):
            if key not in self.pages:
                break
            memoryview(buffer)[:] = self.pages[key]
            n += 1
        return FinishedHandle(n)

    def put_from(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> FinishedHandle:
        self.pages.update(zip(keys, map(bytes, buffers), strict=True))
        return FinishedHandle(len(keys))

    def remove(self, keys: Sequence[bytes]) -> int:
        return sum(self.pages.pop(key, None) is not None for key in keys)

    def clear(self) -> int:
        n = len(self.pages)
        self.pages.clear()
        return n

    def capacity(self) -> StoreCapacity:
        return StoreCapacity(None, sum(map(len, self.pages.values())), len(self.pages))

    def health(self) -> StoreHealth:
        return StoreHealth()

    def close(self) -> None:
        self.is_closed = True

    def flip(self, at: int) -> None:
        """Flip one bit of every page."""
        for key, page in self.pages.items():
            changed = bytearray(page)
            changed[at % len(page)] ^= 4
            self.pages[key] = bytes(changed)


def kvcore_threads() -> Iterator[str]:
    """Return the names of the threads that kvcore started in this process."""
    import threading

    return (each.name for each in threading.enumerate() if each.name.startswith("kvcore"))
