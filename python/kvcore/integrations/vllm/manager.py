# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache manager, whose calls run on kvcore."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.request import RequestStatus

from kvcore import CapacityError, KVCacheParams, LayerOptions, PagedKVCacheManager
from kvcore.integrations.vllm.layers import params_of
from kvcore.integrations.vllm.pool import HitIds, Kept, NoPages, PageIds, Pool, Row, Rows
from kvcore.integrations.vllm.request import RequestContext

RUNNING = RequestStatus.RUNNING
#: The most requests that have pages at a time; each of them has at least one page.
MOST_REQUESTS = 1 << 16
NEVER = 2**63 - 1
NO_PAGES = np.empty(0, np.int32)


class KVCoreManager(KVCacheManager):
    """vLLM's KVCacheManager on kvcore. A vLLM group is a kvcore bundle."""

    def __init__(self, kv_cache_config: Any, max_model_len: int, *args: Any, **kwargs: Any) -> None:
        small = dataclasses.replace(kv_cache_config, num_blocks=1)
        super().__init__(small, max_model_len, *args, **kwargs)
        self.kv_cache_config = kv_cache_config
        self.watermark_blocks = int(kwargs.get("watermark", 0.0) * kv_cache_config.num_blocks)
        self._groups = self.coordinator.single_type_managers
        self.empty_kv_cache_blocks: Any = NoPages(tuple(() for _ in self._groups))
        self.page_size = self._groups[0].block_size
        # True if the last block of a hit runs again. vLLM 0.32 has another name for these groups.
        name = "drop_eagle_group_ids"
        name = name if hasattr(self.coordinator, name) else "eagle_group_ids"
        self._drops_last_block = bool(getattr(self.coordinator, name))
        self._contexts: dict[str, RequestContext] = {}
        params = params_of([group.kv_cache_spec for group in self._groups], self.enable_caching)
        self.has_windows = params.groups is not None
        self._make_core(params, kv_cache_config.num_blocks)
        pool = Pool(self, self.coordinator.block_pool, kv_cache_config.num_blocks)
        self.block_pool = self.coordinator.block_pool = pool
        for index, group in enumerate(self._groups):
            group.block_pool = pool
            group.req_to_blocks = Rows(self._contexts, partial(self._row, index))
            group.num_cached_block = Rows(self._contexts, self._num_published)

    def _make_core(self, params: KVCacheParams, num_blocks: int) -> None:
        self.core: Any = PagedKVCacheManager(
            params,
            min(num_blocks, MOST_REQUESTS),
            self.max_model_len,
            num_pages=num_blocks - 1,
            first_page=1,  # block 0 is vLLM's null block
            blocks=None,
            dedup=False,  # vLLM's tables only grow
            partial_page_reuse=False,
            # Published tokens may not have run yet.
            layers=LayerOptions(reserve_chunks=True, keep_windows=True),
        )

    def _row(self, group: int, context: RequestContext) -> Row:
        ids = self._pages(context, group)
        return Row(self.block_pool, ids, context.request, self._num_published(context), group)

    def _num_published(self, context: RequestContext) -> int:
        return int(context.start_idx // self.page_size)

    def _pages(self, context: RequestContext, group: int, first: int = 0) -> list[int]:
        """Return the ids of a request's pages in a group; 0 for pages that windows have left."""
        ids: list[int] = self.core.get_req_blocks(context.request_id, group, first=first)
        return self.block_pool.shown(ids)

    def get_computed_blocks(
        self, request: Any, max_cache_hit_length: int | None = None
    ) -> tuple[KVCacheBlocks, int, int]:
        """Return the cached pages of a request's tokens, without any change."""
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        length = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        pages, hit = self._match(self._context_of(request), length)
        if not hit:
            return self.empty_kv_cache_blocks, 0, 0
        found = HitIds(self.block_pool, pages, request, hit // self.page_size)
        if self.enable_kv_cache_events and request.kv_cache_report_mode == "full":
            self.coordinator.emit_cached_block_events(request, found.blocks)
        return found, hit, 0

    def _match(self, context: RequestContext, length: int) -> tuple[tuple[Any, ...], int]:
        context.read(length)
        hit, pages = self._find(context, length, 0)
        if hit and self._drops_last_block:
            hit, pages = self._find(context, hit - self.page_size, 0)  # the last block runs again
        rest = (self._find(context, hit, group)[1] for group in range(1, len(self._groups)))
        return (pages, *rest), hit

    def _find(self, context: RequestContext, length: int, group: int) -> tuple[int, Any]:
        if length < self.page_size:
            return 0, NO_PAGES
        found: tuple[int, Any] = self.core.match_prefix(
            context.tokens[:length],
            context.extra_key,
            context.cache_salt,
            extra_keys=context.extra_keys,
            return_pages=True,
            bundle=group,
        )
        return found

    def _context_of(self, request: Any) -> RequestContext:
        context = self._contexts.get(request.request_id)
        if context is None or (context.request is not request and not context.num_pages):
            publishes = self.enable_caching or self.has_windows
            context = self._contexts[request.request_id] = RequestContext(
                request,
                publish_at=self.page_size if publishes else NEVER,
                leaves_at=0 if self.has_windows else NEVER,
            )
        return context

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,  # noqa: ARG002 - found again by tokens
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,  # noqa: ARG002
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        """Take pages for a request's new tokens and publish them; None if they do not fit."""
        context = self._contexts.get(request.request_id)
        end = request.num_computed_tokens + num_new_tokens
        is_running = request.status is RUNNING
        if (
            context is not None
            and is_running
            and num_new_tokens
            and end + num_lookahead_tokens <= context.room
            and end < context.idle_until
        ):
            return self.empty_kv_cache_blocks
        if not num_new_tokens + num_new_computed_tokens + num_external_computed_tokens:
            raise ValueError("num_new_tokens is 0, must be greater than 0 if no token is computed")
        context = context or self._context_of(request)
        computed = request.num_computed_tokens + num_new_computed_tokens
        computed = min(computed + num_external_computed_tokens, self.max_model_len)
        slots = min(computed + num_new_tokens + num_lookahead_tokens, self.max_model_len)
        held = context.num_pages
        if held:
            self._leave(context, computed - request.num_in_flight_tokens)
        else:
            context.hit = num_new_computed_tokens
        if slots > context.start_idx and (slots > context.room or not is_running):
            waits = has_scheduled_reqs and not is_running
            keep_free = self.watermark_blocks if waits else 0
            whole = min(request.num_tokens, self.max_model_len) if full_sequence_must_fit else 0
            ahead = self._num_ahead(whole, slots, computed) if whole else 0
            keep_free += max(reserved_blocks, ahead)
            if not self._reserve(context, slots, keep_free):
                return None
            if num_external_computed_tokens:
                self._leave(context, computed)  # all these tokens are loaded
        first = held or -(-computed // self.page_size)
        zeroed = dict.fromkeys(skip_zeroing_group_ids, first)
        cached = 0 if delay_cache_blocks else min(computed + num_new_tokens, request.num_tokens)
        return self._taken(request, context, held, first, zeroed, cached)

    def _taken(
        self,
        request: Any,
        context: RequestContext,
        held: int,
        first: int,
        zeroed: dict[int, int],
        cached: int,
    ) -> KVCacheBlocks:
        try:
            new = self._note_new(context, held, first, zeroed)
            self._publish(request, cached)
        except BaseException:
            if not held:
                self.free(request)
            raise
        return PageIds(self.block_pool, new) if any(new) else self.empty_kv_cache_blocks

    def _num_ahead(self, num_tokens: int, slots: int, computed: int) -> int:
        """Return the most pages that a request needs at a time, beyond the pages for its slots."""
        wanted, held = (-(-n // self.page_size) for n in (num_tokens, slots))
        total = 0
        for group in self._groups:
            left = group.get_num_skipped_tokens(computed) // self.page_size
            most = group.max_admission_blocks_per_request or wanted
            total += max(0, min(wanted - left, most) - (held - left))
        return total

    def _reserve(self, context: RequestContext, slots: int, keep_free: int) -> bool:
        is_new = not context.num_pages
        done = False
        published = context.start_idx
        # Windows may have left pages of loaded tokens that are not published yet.
        context.stand(max(published, min(context.left, slots - 1)), slots)
        # The core needs the prompt's end: it keeps the window before that position longest.
        context.expect(min(context.request.num_prompt_tokens, self.max_model_len))
        try:
            if is_new:
                self.core.claim(context.request_id)
            done = self.core.reserve(context, max_hit=context.hit, keep_free=keep_free) and (
                not is_new or context.start_idx >= context.hit  # else pages of the hit were evicted
            )
        except CapacityError:
            pass  # the request never fits; vLLM expects None, no error
        finally:
            if not is_new:
                context.start_idx = published
            elif not done:
                context.start_idx = context.left = 0
                if self.core.contains(context.request_id):
                    self.core.release(context.request_id)
        if done and slots > context.room:
            context.num_pages = -(-slots // self.page_size)
            context.room = context.num_pages * self.page_size
        return done

    def _note_new(
        self, context: RequestContext, held: int, first: int, zeroed: dict[int, int]
    ) -> tuple[list[int], ...]:
        """Record the pages after `held` and the hit as new; return the ids from `first` on."""
        start = max(held, context.hit // self.page_size)
        if context.num_pages <= start:
            return ()
        new = []
        for index, group in enumerate(self._groups):
            taken = self._pages(context, index, start)
            self.block_pool.note_taken(taken)
            if group.records_new_block_ids:
                clear = taken[max(zeroed.get(index, 0) - start, 0) :]
                group.new_block_ids += [page for page in clear if page]
            new.append(taken[first - start :])
        return tuple(new)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Publish the full pages of the first `num_computed_tokens` tokens."""
        self._publish(request, num_computed_tokens)

    def _publish(self, request: Any, num_computed_tokens: int) -> None:
        context = self._contexts.get(request.request_id)
        if context is None or num_computed_tokens < context.publish_at:
            return
        n = self.coordinator.get_num_cacheable_tokens(num_computed_tokens, 0)
        n = min(n, request.num_tokens, context.room)  # drafts may exceed the slots
        if n < context.publish_at:
            return
        first = context.start_idx // self.page_size
        context.read(n)
        context.stand(n, n + 1)
        self.core.step([context])
        context.publish_at = (n // self.page_size + 1) * self.page_size
        context.idle_until = min(context.publish_at, context.leaves_at)
        if self.enable_kv_cache_events or type(request.block_hashes) is list:
            self._note_hashes(request, context, first, n // self.page_size)

    def _note_hashes(self, request: Any, context: RequestContext, first: int, last: int) -> None:
        last = min(last, len(request.block_hashes))
        for group in range(len(self._groups)):
            ids = self._pages(context, group, first)[: last - first]
            pages = [self.block_pool.null_block] * first + [self.block_pool.blocks[i] for i in ids]
            self.block_pool.cache_full_blocks(request, pages, first, last, self.page_size, group)

    def _leave(self, context: RequestContext, num_tokens: int) -> None:
        """Release the pages that windows no longer read after `num_tokens` computed tokens."""
        n = min(num_tokens, context.room)
        if n >= context.leaves_at:
            context.left = n
            context.leaves_at = self.core.leave_windows(context.request_id, n)
            context.idle_until = min(context.publish_at, context.leaves_at)

    def free(self, request: Any) -> None:
        """Release a request's pages; published pages stay cached."""
        self.block_pool.free_blocks(self.pop_blocks_for_free(request))

    def pop_blocks_for_free(self, request: Any) -> list[Any]:
        """Forget a request; the result holds its pages until ``block_pool.free_blocks``."""
        context = self._contexts.pop(request.request_id, None)
        return [Kept(context.request_id)] if context is not None and context.num_pages else []

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,  # noqa: ARG002
    ) -> None:
        """Release the pages that windows no longer read after these computed tokens."""
        context = self._contexts.get(request_id)
        if context is not None and context.num_pages:
            self._leave(context, processed_computed_tokens)

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return all pages of a request."""
        context = self._contexts.get(request_id)
        if context is None or not context.num_pages:
            return self.empty_kv_cache_blocks
        ids = tuple(self._pages(context, group) for group in range(len(self._groups)))
        return PageIds(self.block_pool, ids, context.request, self._num_published(context))

    def estimate_cached_tokens(self, request: Any) -> int:
        """Return the number of a request's tokens in published pages."""
        context = self._contexts.get(request.request_id)
        return self._num_published(context) * self.page_size if context is not None else 0

    def num_holders(self, block_id: int) -> int:
        """Return the number of requests and holds that have a page: for tests, O(everything)."""
        tables = [row for group in self._groups for row in group.req_to_blocks.values()]
        return sum(block_id in row.ids for row in tables) + len(self.block_pool.holds[block_id])
