# SPDX-License-Identifier: Apache-2.0
"""Views of kvcore's state for the attributes of the manager that vLLM reads.

Beyond the manager's methods, vLLM reads ``block_pool.free_blocks``; for connectors,
``block_pool.touch``; ``coordinator.single_type_managers`` with ``block_size`` and
``kv_cache_spec``; ``coordinator.get_num_blocks_to_allocate`` and ``.enable_partial_hash_hits``.
``tests/engines/vllm_checks_source.py`` searches vLLM for more. A manager's coordinator is vLLM's
own, over a pool of one block; its tables are `Rows`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from kvcore import TextGenerationContext


class Pages(dict[int, KVCacheBlock]):
    """Block objects by id; a block object is made at its first lookup."""

    def __init__(self, pool: Pool) -> None:
        super().__init__({0: pool.null_block})
        self._pool = pool

    def __missing__(self, block_id: int) -> KVCacheBlock:
        made = self[block_id] = Page(block_id, pool=self._pool)
        return made

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.values()))

    def __len__(self) -> int:
        return int(self._pool.num_gpu_blocks)


class Page(KVCacheBlock):
    """A block whose reference count is computed from the requests that have it."""

    @property
    def ref_cnt(self) -> int:
        """The number of requests and holds that have the block: O(everything)."""
        return int(self.pool.manager.num_holders(self.block_id))

    @ref_cnt.setter
    def ref_cnt(self, value: int) -> None:
        """Ignore the value: only kvcore counts references."""


class NoPages(KVCacheBlocks):
    """No pages in any group: the result for most requests in most steps."""

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return None if `allow_none` is set; this does not read the groups."""
        return None if allow_none else super().get_block_ids(group_ids=group_ids)


class PageIds(KVCacheBlocks):
    """Pages of each group as ids; block objects are made when a caller reads `blocks`.

    If the pages begin at the first token of `request`, the first `num_published` block objects of
    each group have their hashes.
    """

    def __init__(
        self,
        pool: Pool,
        ids: tuple[list[int], ...],
        request: Any = None,
        num_published: int = 0,
    ) -> None:
        self._pool = pool
        self._ids = ids
        self._request = request
        self._num_published = num_published

    @property
    def blocks(self) -> tuple[Sequence[KVCacheBlock], ...]:
        """The blocks of each group."""
        pool, request, n = self._pool, self._request, self._num_published
        return tuple(pool.hashed(ids, request, n, group) for group, ids in enumerate(self._ids))

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return the ids of each group, or of `group_ids`; None for no ids if `allow_none`."""
        if allow_none and not any(self._ids):
            return None
        return self._ids if group_ids is None else tuple(self._ids[group] for group in group_ids)


class HitIds(PageIds):
    """Pages of a hit in each group, kept as arrays until a caller reads the ids."""

    def __init__(self, pool: Pool, arrays: tuple[Any, ...], request: Any, num_pages: int) -> None:
        self._pool = pool
        self._arrays = arrays
        self._request = request
        self._num_published = num_pages

    @cached_property
    def _ids(self) -> tuple[list[int], ...]:  # type: ignore[override]
        return tuple(self._pool.shown(ids.tolist()) for ids in self._arrays)


class Row(Sequence[KVCacheBlock]):
    """The blocks that a request had in a group when the row was made."""

    def __init__(
        self, pool: Pool, ids: list[int], request: Any, num_published: int, group: int
    ) -> None:
        self._pool = pool
        self.ids = ids
        self._owner = request, num_published, group

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        return self._pool.hashed(self.ids, *self._owner)[index]

    def __eq__(self, other: object) -> bool:
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]


class Rows(Mapping[str, Any]):
    """A value for each request that has pages."""

    def __init__(self, contexts: dict[str, Any], value: Any) -> None:
        self._contexts = contexts
        self._value = value

    def __getitem__(self, request_id: str) -> Any:
        context = self._contexts[request_id]
        if not context.num_pages:
            raise KeyError(request_id)
        return self._value(context)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, each in self._contexts.items() if each.num_pages])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Kept:
    """Pages of a finished request, which steps in flight may still write."""

    def __init__(self, claim: int) -> None:
        self.claim = claim


class FreeBlocks:
    """The free blocks, in kvcore's allocation order; vLLM has a queue here."""

    _READ = ("get_all_free_blocks", "fake_free_list_head", "fake_free_list_tail")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._ids: list[int] | None = None  # ids of the blocks in `_queue`
        self._queue: Any = None

    @property
    def num_free_blocks(self) -> int:
        """The number of free blocks."""
        return self._pool.get_num_free_blocks()

    def __getattr__(self, name: str) -> Any:
        """Link the present free blocks, for tests: O(blocks). Only kvcore takes blocks."""
        if name not in self._READ:
            raise AttributeError(name)
        ids = self._pool.manager.core.next_pages().tolist()
        if ids != self._ids:
            self._queue = FreeKVCacheBlockQueue([self._pool.blocks[page] for page in ids])
            self._ids = ids
        return getattr(self._queue, name)


class Pool(BlockPool):
    """vLLM's pool without blocks of its own: free blocks, hashed blocks, and the events."""

    def __init__(self, manager: Any, settings: BlockPool, num_blocks: int) -> None:
        self.__dict__.update(settings.__dict__)
        self.manager = manager
        self.num_gpu_blocks = num_blocks
        self.blocks = Pages(self)
        self.holds: defaultdict[int, list[Any]] = defaultdict(list)
        self.free_block_queue = FreeBlocks(self)

    def get_num_free_blocks(self) -> int:
        """Return the number of free pages, including cached pages that no request has."""
        return int(self.manager.core.num_free_blocks)

    def shown(self, ids: list[int]) -> list[int]:
        """Return ids as vLLM writes them: 0 for each page that a window has left."""
        end = self.num_gpu_blocks
        return [page if page < end else 0 for page in ids] if self.manager.has_windows else ids

    def hashed(
        self, ids: list[int], request: Any, num_published: int, group: int
    ) -> list[KVCacheBlock]:
        """Return the blocks of a request; add missing hashes to the published blocks."""
        blocks = [self.blocks[page] for page in ids]
        published = blocks[:num_published]
        lacks = [block.block_hash is None and not block.is_null for block in published]
        if any(lacks):
            n = min(len(lacks), len(request.block_hashes))
            page_size = self.manager.page_size
            self.cache_full_blocks(request, blocks, 0, n, page_size, group, lacks[:n])
        return blocks

    def note_taken(self, ids: Iterable[int]) -> None:
        """Drop the cache entries of pages that a request has taken."""
        known = self.blocks.keys()
        if len(known) == 1:  # only the null block; callers rarely read others
            return
        for block_id in ids:
            if block_id in known:
                self._maybe_evict_cached_block(self.blocks[block_id])

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks for no request, until `free_blocks`; each group gives the same number."""
        core, groups = self.manager.core, len(self.manager.kv_cache_config.kv_cache_groups)
        free = self.get_num_free_blocks()
        if num_blocks > free or num_blocks % groups:
            raise ValueError(
                f"num_blocks is {num_blocks}, must be 0 .. {free} and a multiple of {groups}"
            )
        taken: dict[int, Any] = {}
        while len(taken) < num_blocks:
            context = TextGenerationContext(object(), [0])
            core.claim(context.request_id)
            try:
                core.fetch([context])
                for group in range(groups):
                    ids = core.get_req_blocks(context.request_id, group)
                    taken |= {page: core.hold([page]) for page in ids}
            finally:
                core.release(context.request_id)
        self.note_taken(taken)
        for page, held in taken.items():
            self.holds[page].append(held)
        return [self.blocks[page] for page in taken]

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Release the pages that `pop_blocks_for_free`, `touch` and `get_new_blocks` hold."""
        for each in ordered_blocks:
            if isinstance(each, Kept):
                self.manager.core.release(each.claim)
            elif not each.is_null:
                self.holds[each.block_id].pop().let_go()

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Hold blocks until `free_blocks`."""
        for block in blocks:
            if not block.is_null:
                self.holds[block.block_id].append(self.manager.core.hold([block.block_id]))

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Remove pages with wrong contents from the cache."""
        super().evict_blocks(block_ids)
        self.manager.core.forget(sorted(block_ids))

    def reset_prefix_cache(self) -> bool:
        """Empty the cache; return False if a request or a hold still has pages."""
        return bool(super().reset_prefix_cache() and self.manager.core.reset_prefix_cache())
