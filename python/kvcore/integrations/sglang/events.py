# SPDX-License-Identifier: Apache-2.0
"""The events that SGLang publishes about its cache: new and removed pages, by their hashes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder


class PageEvents(KVCacheEventRecorder):
    """SGLang's recorder, with the hashes of cached pages in one array by page id."""

    def __init__(self, params: Any) -> None:
        super().__init__(
            enabled=params.enable_kv_cache_events,
            page_size=params.page_size,
            dynamo_format=params.dynamo_kv_event_format,
            lora_names=params.kv_event_lora_names,
        )
        size = params.token_to_kv_pool_allocator.size // self.page_size + 2 if self.enabled else 0
        self._hashes = np.zeros(size, [("chain", "u1", 32), ("block", "i8")])

    def enqueue(self, event: Any) -> None:
        """Queue an event; for new pages, also collect their hashes."""
        if isinstance(event, BlockStored):
            self._told += event.block_hashes
        super().enqueue(event)

    def stored(self, key: Any, front: NDArray[np.int32], pages: NDArray[np.int32]) -> None:
        """Record new pages with the tokens of `key`; the pages `front` precede them."""
        plain = key.extra_key is None and key.cache_salt is None
        parent = _node(None, key[:0], [], [])
        if front.size:
            chain = [self._hashes["chain"][front[-1]].tobytes().hex()]
            parent = _node(parent, key, chain, chain)
        node = _node(parent, key, None if plain else [], None)
        self._told: list[int] = []
        self.record_store(node)
        chains = bytes.fromhex("".join(node.hash_value if plain else node.event_hash_value))
        self._hashes["chain"][pages] = np.frombuffer(chains, np.uint8).reshape(-1, 32)
        self._hashes["block"][pages] = self._told

    def removed(self, pages: NDArray[np.int32]) -> None:
        """Record that pages are no longer cached."""
        if self.enabled and pages.size:
            hashes = self._hashes["block"][pages].tolist()
            self.enqueue(BlockRemoved(block_hashes=hashes, medium=StorageMedium.GPU))


def _node(parent: Any, key: Any, hashes: list[str] | None, named: list[str] | None) -> Any:
    """Return an object with the fields that the recorder reads from a node of SGLang's tree."""
    return SimpleNamespace(parent=parent, key=key, hash_value=hashes, event_hash_value=named)
