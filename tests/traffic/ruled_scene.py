# SPDX-License-Identifier: Apache-2.0
"""Requests of a manager with groups, and rules that give the expected answers.

In a pool that holds everything the rules are exact: hits, cuts of chunks, table entries, pages in
use, checkpoints. In a small pool the rules are an upper bound of the hits, and `match_prefix` is
the lower bound. Layers must read the values that were written, in both pools.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from digest_model import DigestModel
from group_rules import GroupRules, Told
from grouped_traffic import params_of
from kvcore import CapacityError, LayerOptions, PagedKVCacheManager, TextGenerationContext
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow, State

__all__ = ["EVERYTHING", "LENGTH", "MOST", "SHAPES", "GroupsScene", "Live"]

_ONE = {"a": ((2,), "float32")}
_TWO = {"a": ((3,), "float32"), "b": ((), "float32")}
SHAPES: dict[str, tuple[Any, ...]] = {
    "window": (FullAttention([0]), SlidingWindow([1, 2], 5)),
    "windows": (FullAttention([0]), SlidingWindow([1], 2), SlidingWindow([2, 3], 7)),
    "chunk": (FullAttention([0, 3]), ChunkedLocal([1, 2], 6)),
    "odd chunk": (FullAttention([0]), ChunkedLocal([1], 5)),
    "no full": (SlidingWindow([0], 4), ChunkedLocal([1], 8)),
    "one token": (FullAttention([0]), SlidingWindow([1], 1)),
    "two sizes": (FullAttention([0], n_kv_heads=2), SlidingWindow([1, 2], 6, n_kv_heads=1)),
    "state": (FullAttention([0]), State([1], _ONE)),
    "states": (FullAttention([0]), State([1], _ONE, 12), State([2], _TWO)),
    "window, state": (FullAttention([0]), SlidingWindow([1], 5), State([1, 2], _TWO, 12)),
    "chunk, states": (ChunkedLocal([0], 7), State([1], _ONE), State([2], _TWO, 24)),
}
MOST, LENGTH = 5, 60  # number of requests, tokens of one request
EVERYTHING = 3000  # pages for all tokens that a test runs


class Live:
    """A request of the manager and of the rules."""

    def __init__(self, context: TextGenerationContext, told: Told) -> None:
        self.context, self.told = context, told
        self.is_reserved = False


class GroupsScene:
    """A manager, its requests, and the state of the rules."""

    def __init__(
        self,
        shape: str,
        *,
        page_size: int,
        pages: int,
        dedup: bool,
        parts: bool,
        drafts: int,
        chunks: bool,
        slots: int,
        keep: bool,
    ) -> None:
        groups = SHAPES[shape]
        params = params_of(*groups, page_size=page_size, head_dim=1)
        has_states = any(isinstance(group, State) for group in groups)
        self.is_exact = pages == EVERYTHING
        self.reserves_chunks = chunks
        states = (600 if self.is_exact else slots) if has_states else None
        self.manager = PagedKVCacheManager(
            params,
            max_batch_size=MOST,
            max_seq_len=LENGTH,
            num_pages=pages,
            enable_runtime_checks=not self.is_exact,  # O(pages)
            dedup=dedup,
            partial_page_reuse=parts,
            layers=LayerOptions(
                max_draft_tokens=drafts, reserve_chunks=chunks, keep_windows=keep, num_states=states
            ),
        )
        self.has_states, self.dedup = has_states, dedup
        self.rules = GroupRules(params, drafts, parts=parts, is_exact=self.is_exact, keeps=keep)
        self.model = DigestModel(self.manager)
        self.live: list[Live] = []
        self.pins: list[tuple[Any, list[int]]] = []
        self.forgotten: list[tuple[Any, list[int]]] = []  # pins from before the last reset

    def reserve(self, each: Live, steps: int) -> bool:
        context, told = each.context, each.told
        manager, before = self.manager, (context.start_idx, context.active_idx)
        if context.end_idx + steps - 1 > LENGTH:
            return False
        start = 0 if not told.has_run and not each.is_reserved else context.start_idx
        known = manager.match_prefix(told.tokens[:-1])
        told = copy.deepcopy(told)
        expected = self.rules.reserve(told, start, context.active_idx, context.end_idx)
        if expected[2] and steps > 1 and self.is_exact:
            for verb in (manager.plan, manager.reserve):
                with pytest.raises(ValueError, match=f"num_steps is {steps}, must be 1"):
                    verb(context, steps)
            assert (context.start_idx, context.active_idx) == before
            return False
        try:
            plan = manager.plan(context, steps)
            fits = manager.reserve(context, steps)
        except (CapacityError, ValueError):
            assert not self.is_exact
            return False
        assert plan.fits == fits
        if not fits:
            assert not self.is_exact
            assert (context.start_idx, context.active_idx) == before
            self._check_refusal(each, steps)
            return False
        after = (context.start_idx, context.active_idx)
        if self.has_states:
            assert plan.active_idx == after[1]
        if self.is_exact:
            assert after == expected[:2], (before, told)
        elif not told.has_run:
            told.first = {}
            self._check_bounds(told, context, before, known)
        each.is_reserved = True
        self.rules.take(told, context.active_idx, context.end_idx, steps)
        each.told = told
        return True

    def _check_refusal(self, each: Live, steps: int) -> None:
        """Check that a refused request without a hit needs more pages or slots than are free."""
        context, told = each.context, copy.deepcopy(each.told)
        may_hit = told.has_run or self.rules.longest_hit(tuple(told.tokens)) > 0
        if may_hit or self.reserves_chunks or not self.rules.keeps_everything:
            return
        self.rules.take(told, context.active_idx, context.end_idx, steps)
        needed = sum(sum(self.rules.has_page(told, b)) for b in range(len(self.rules.bundles)))
        has_slot = each.told.has_slot or self.manager.state_metrics.available_slots > 0
        assert needed > self.manager.num_free_blocks or (self.has_states and not has_slot)

    def _check_bounds(
        self, told: Told, context: TextGenerationContext, before: tuple[int, int], known: int
    ) -> None:
        took = context.start_idx
        assert took <= self.rules.longest_hit(tuple(told.tokens))
        if before[1] - before[0] > 1:
            assert took >= known
            assert took == max(known, before[0]) or (self.rules.parts and not self.has_states)
        self.rules.hit(told, took)

    def commit(self, each: Live) -> None:
        each.told.tokens = each.context.tokens.tolist()
        self.rules.commit(each.told, each.context.start_idx)

    def end_long_ones(self) -> None:
        for each in [each for each in self.live if each.context.end_idx > LENGTH - 10]:
            self.live.remove(each)
            self.manager.release(each.context.request_id)

    def check_inputs(self, inputs: Any, contexts: list[TextGenerationContext]) -> None:
        assert inputs.cache_lengths.tolist() == [c.start_idx for c in contexts]
        assert len(inputs.tables) == len(self.rules.bundles)
        assert inputs.tables[0] is inputs.lookup_table
        none = self.manager.total_num_pages
        for bundle, table in enumerate(inputs.tables):
            for row, context in enumerate(contexts):
                pages = self.manager.get_req_blocks(context.request_id, bundle)
                width = table.shape[1]
                entries = table[row].tolist()
                wanted = [*pages, *[none] * max(0, width - len(pages))]
                assert entries == wanted[:width]
        for slots in inputs.states:
            assert slots.dtype == np.int32
            assert slots.shape == (len(contexts),)
            assert len(set(slots.tolist())) == len(contexts)

    def check_swaps(self, swaps: Any, batch: list[Live]) -> None:
        assert swaps.dtype == np.int32
        assert swaps.shape[1] == (4 if len(self.rules.bundles) > 1 else 3)
        assert self.dedup or len(swaps) == 0
        for row, column, page, *bundle in swaps.tolist():
            name = batch[row].context.request_id
            entry = self.manager.get_req_blocks(name, *bundle)[column]
            assert entry in (page, self.manager.total_num_pages)  # a window may have advanced

    def check(self) -> None:
        """Compare all queries that change nothing."""
        self.pages_are_where_the_rules_say()
        self.checkpoints_are_where_they_are_due()
        self.what_is_cached_is_counted()

    def pages_are_where_the_rules_say(self) -> None:
        none = self.manager.total_num_pages
        held: set[int] = set()
        for each in self.live:
            for bundle in range(len(self.rules.bundles)):
                pages = self.manager.get_req_blocks(each.context.request_id, bundle)
                there = [page < none for page in pages]
                held.update(page for page in pages if page < none)
                if self.is_exact and not self.reserves_chunks:
                    assert there == self.rules.has_page(each.told, bundle), (bundle, each.told)
        used = none - self.manager.num_free_blocks
        assert used >= len(held)
        if self.dedup and not self.pins and not self.forgotten:
            assert used == len(held), "a page that no request reads is not free"

    def checkpoints_are_where_they_are_due(self) -> None:
        if not self.has_states:
            return
        metrics = self.manager.state_metrics
        own = sum(each.told.has_slot for each in self.live)
        others = metrics.used_slots - own  # states before drafts, and states of old pins
        kept = own if self.rules.drafts > 0 else 0
        assert 0 <= others <= kept + len(self.forgotten) * metrics.checkpoints_made
        most = MOST + others + metrics.checkpoints
        assert metrics.available_slots >= metrics.total_slots - most
        if self.is_exact:
            assert metrics.checkpoints == len(self.rules.checkpoints)

    def what_is_cached_is_counted(self) -> None:
        if not self.is_exact:
            return
        for group, metrics in zip(self.rules.groups, self.manager.group_metrics, strict=False):
            lanes = sum(b.group == group for b in self.rules.bundles)
            each = self.rules.size // next(
                b.page_size for b in self.rules.bundles if b.group == group
            )
            assert metrics.cached_pages == len(self.rules.cached) * lanes * each
            assert metrics.holes == 0

    def end(self) -> None:
        for pinned, _ in self.pins + self.forgotten:
            pinned.release()
        for each in self.live:
            self.manager.release(each.context.request_id)
        self.manager.check_integrity()
        assert self.manager.num_free_blocks == self.manager.total_num_pages
        assert self.manager.state_metrics.used_slots == 0
