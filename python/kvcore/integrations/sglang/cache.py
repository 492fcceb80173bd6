# SPDX-License-Identifier: Apache-2.0
"""SGLang's prefix cache on a PrefixTree: page = slot // page_size, a node is a PrefixHandle."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache import base_prefix_cache as base
from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvcore import PrefixTree
from kvcore.integrations.sglang.events import PageEvents
from kvcore.integrations.sglang.order import dfs_weight_order
from kvcore.native.tree import PrefixHandle

__all__ = ["KVCoreRadixCache", "KVCoreWindowCache"]

_NOTHING: NDArray[np.int32] = np.empty(0, np.int32)


class KVCoreRadixCache(base.BasePrefixCache):
    """The prefix cache of SGLang's scheduler.

    Invariant: the tree owns a page from the insert on, and the insert of a checkpoint also pins the
    page for its request. So a later failure in a checkpoint leaves no page with two owners, and no
    page without an owner.
    """

    POLICIES = ("lru", "lfu", "slru", "fifo", "priority")
    disable = False

    def __init__(self, params: Any) -> None:
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size, self.is_eagle = params.page_size, params.is_eagle
        self.sliding_window_size = params.sliding_window_size
        self.draft_swa_window = params.draft_swa_window
        self.eviction_policy = params.eviction_policy.lower()
        self.kv_events = PageEvents(params)
        if params.enable_metrics:
            self.init_metrics_collector()
        self.reset()

    def reset(self) -> None:
        """Empty the cache; SGLang clears its allocator itself."""
        shape: Any = {"token_dtype": np.int64, "paired": self.is_eagle}
        tree = PrefixTree(self.page_size, self.eviction_policy, **shape)
        root = tree.match(_NOTHING)[1]  # if this fails, nothing has changed
        self.tree, self.root_node = tree, root
        self._unfreed = _NOTHING  # evicted pages that are not freed yet
        self.kv_events.record_all_cleared()

    def match_prefix(self, params: Any) -> Any:
        """Find the longest cached prefix, and update its recency but not its number of uses.

        SGLang counts uses at inserts.
        """
        key, _ = params.key.maybe_to_bigram_view(self.is_eagle)
        tokens = np.asarray(key.token_ids, np.int64)[: key.limit]
        handle = self.tree.match(tokens, key.extra_key, key.cache_salt)[1]
        if handle.num_pages:
            self.tree.pin(handle)
            self.tree.unpin(handle)
        return base.MatchResult(handle.num_pages * self.page_size, handle, handle, handle)

    def touch_prefix(self, key: Any) -> None:
        """Update the recency of a prefix."""
        self.match_prefix(base.MatchPrefixParams(key))

    def insert(self, params: Any) -> Any:
        """Insert the whole pages of a key; the caller keeps pages that the tree already had."""
        key, value = params.key.maybe_to_bigram_view(self.is_eagle, params.value)
        pages = self._pages(value[: len(key) // self.page_size * self.page_size])
        ids, known, handle = self._put(key, pages, params.priority or 0)
        self._tell(key, ids, known, _NOTHING)
        return base.InsertResult(known * self.page_size, last_device_node=handle)

    def _put(self, key: Any, pages: NDArray[Any], rank: int, after: Any = None, **how: Any) -> Any:
        """Insert pages; SGLang's priorities -50 .. 50 become the tree's 0 .. 100, clamped."""
        name = () if after else (key.extra_key, key.cache_salt)
        tokens = np.asarray(key.token_ids, np.int64)[: len(pages) * self.page_size + self.is_eagle]
        how |= {"priority": min(max(50 + rank, 0), 100), "return_handle": True, "after": after}
        return self.tree.insert(tokens, pages, *name, **how)

    def _tell(self, key: Any, ids: NDArray[Any], known: int, front: NDArray[Any]) -> None:
        if self.kv_events.enabled and known < len(ids):
            new = slice(known * self.page_size, len(ids) * self.page_size)
            self.kv_events.stored(key[new], ids[:known] if known else front, ids[known:])

    def checkpoint(self, req: Any, *, up_to: int, **_: Any) -> None:
        """Insert the pages that a request has computed since its last checkpoint, and pin them."""
        kv, size, last, old = req.kv, self.page_size, req.last_node, req.lock
        done, end = kv.cache_protected_len, max(up_to - self.is_eagle, 0) // size * size
        if kv.swa_evict_floor:  # windows have left tokens after it
            end = min(end, -(-kv.swa_evict_floor // size) * size)
        if end < done:
            return
        goes_on = 0 < done <= kv.cache_inserted_len and last.num_pages * size == done
        first, after = (done, last) if goes_on else (0, None)
        key = self._key(req, first, end)
        pages = self._pages(self.req_to_token_pool.req_to_token[kv.req_pool_idx, first:end])
        # Read `front` before the insert: after a failure here, a later call records the pages.
        tells = self.kv_events.enabled and goes_on
        front = self.tree.pages_of(last, done // size - 1) if tells else _NOTHING
        ids, known, handle = self._put(key, pages, req.priority or 0, after, pin=True)
        kv.cache_protected_len, kv.cache_inserted_len = end, max(kv.cache_inserted_len, end)
        req.last_node = req.lock = handle
        own, cached = pages[(done - first) // size :], ids[(done - first) // size :]
        if (own != cached).any():
            self.req_to_token_pool.write((kv.req_pool_idx, slice(done, end)), self._slots(cached))
            self._free(own[own != cached])
        self._tell(key, ids, known, front)
        self.unlock(old)
        self._prefer_prompt(req, handle)

    def _key(self, req: Any, first: int, end: int) -> Any:
        tokens = req.full_untruncated_fill_ids[first : end + self.is_eagle]
        return RadixKey(tokens, req.extra_key, self.is_eagle, cache_salt=req.cache_salt)

    def _prefer_prompt(self, req: Any, handle: PrefixHandle) -> None:
        """Rank a prompt above its output, as SGLang does; other policies evict tails first."""
        end = max(len(req.origin_input_ids) - self.is_eagle, 0) // self.page_size
        if self.eviction_policy == "priority" and 0 < end < handle.num_pages:
            key, pages = self._key(req, 0, end * self.page_size), self.tree.pages_of(handle)
            self._put(key, pages[:end], (req.priority or 0) + 1)

    def path_device_indices(self, node: PrefixHandle) -> torch.Tensor:
        """Return the slots of a prefix."""
        return self._slots(self.tree.pages_of(node))

    def evict(self, params: Any) -> Any:
        """Evict at least the requested tokens; the unit of eviction is a page, not a leaf."""
        start = perf_counter()
        if not self._unfreed.size:
            tokens = max(params.num_tokens, params.swa_num_tokens, 0)
            self._unfreed = self.tree.evict(-(-tokens // self.page_size))
        pages = self._unfreed
        self._free(pages)
        self._unfreed = _NOTHING
        self.kv_events.removed(pages)
        self.update_eviction_metrics(pages.size * self.page_size, start)
        return base.EvictResult(pages.size * self.page_size)

    def lock(self, node: PrefixHandle) -> Any:
        """Pin a prefix; its handle is also the receipt for `unlock`."""
        self.tree.pin(node)
        return node

    def unlock(self, lock: Any) -> None:
        """Unpin a prefix."""
        if lock is not None:
            self.tree.unpin(lock)

    def inc_lock_ref(self, node: PrefixHandle) -> Any:
        """Pin a prefix; return the change in evictable tokens."""
        before = self.evictable_size()
        self.tree.pin(node)
        return base.IncLockRefResult(delta=self.evictable_size() - before)

    def dec_lock_ref(self, node: PrefixHandle, params: Any = None) -> Any:  # noqa: ARG002
        """Unpin a prefix; return the change in evictable tokens."""
        before = self.evictable_size()
        self.tree.unpin(node)
        return base.DecLockRefResult(delta=self.evictable_size() - before)

    def evictable_size(self) -> int:
        """Return the number of evictable tokens."""
        return int(self.tree.num_evictable * self.page_size)

    def protected_size(self) -> int:
        """Return the number of pinned tokens."""
        return self.total_size() - self.evictable_size()

    def total_size(self) -> int:
        """Return the number of tokens in the tree."""
        return int(self.tree.num_cached * self.page_size)

    def all_values_flatten(self) -> torch.Tensor:
        """Return the slots of the tree."""
        return self._slots(np.concatenate([_NOTHING, *(run.pages for run in self.tree.runs())]))

    def dfs_weight_order(self, node_handles: Any) -> list[int]:
        """Return the order of requests for the schedule policy dfs-weight."""
        return dfs_weight_order([self.tree.pages_of(node).tolist() for node in node_handles])

    def pretty_print(self) -> None:
        """Print the runs of the tree."""
        print(*self.tree.runs(), self.tree, sep="\n")

    def _pages(self, slots: torch.Tensor) -> Any:
        return slots[:: self.page_size].cpu().numpy() // self.page_size

    def _slots(self, pages: NDArray[Any]) -> torch.Tensor:
        slots = pages[:, None] * np.int64(self.page_size) + np.arange(self.page_size)
        return torch.from_numpy(slots.ravel()).to(self.token_to_kv_pool_allocator.device)

    def _free(self, pages: NDArray[Any]) -> None:
        allocator = self.token_to_kv_pool_allocator
        allocator.free_page_ids(torch.from_numpy(pages.astype(np.int64)).to(allocator.device))


class KVCoreWindowCache(KVCoreRadixCache):
    """The prefix cache of models in which every layer has a sliding window.

    It keeps the start of a prompt up to the first page that a window had left at the checkpoint.
    """

    supports_swa = PureSWARadixCache.supports_swa
    swa_evictable_size = KVCoreRadixCache.evictable_size
    swa_protected_size = KVCoreRadixCache.protected_size
    sanity_check = PureSWARadixCache.sanity_check
    available_and_evictable_str = PureSWARadixCache.available_and_evictable_str

    def _free(self, pages: NDArray[Any]) -> None:
        self.token_to_kv_pool_allocator.free_segment(self._slots(pages), start_pos=0)
