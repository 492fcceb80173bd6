# SPDX-License-Identifier: Apache-2.0
"""Calls of a manager with groups, each compared with the rules; arguments select the calls."""

from __future__ import annotations

from typing import Any

import pytest

from group_rules import Told
from kvcore import CapacityError, TextGenerationContext
from ruled_scene import LENGTH, GroupsScene, Live

__all__ = ["GroupsTraffic"]


class GroupsTraffic(GroupsScene):
    """Requests with common prefixes; a call that is not possible now does nothing."""

    def __init__(self, shape: str, **options: Any) -> None:
        super().__init__(shape, **options)
        self.names = 0
        self.past: list[list[int]] = [[0, 1, 0, 0, 1, 1, 0, 1, 1, 0, 1, 0, 0, 0, 1, 1]]

    def begin(self, of: int, keep: int, tail: list[int], chunk: int) -> None:
        """Claim a request with the prefix of an earlier request."""
        tokens = [*self.past[of % len(self.past)][:keep], *tail]
        if len(tokens) > LENGTH - 12:
            return
        self.past.append(tokens)
        self.names += 1
        context = TextGenerationContext(self.names, tokens)
        if 0 < chunk < len(tokens):
            context.active_idx = chunk
        self.manager.claim(self.names)
        self.live.append(Live(context, Told(tokens)))

    def reserve_one(self, which: int, steps: int) -> None:
        self.reserve(self.live[which % len(self.live)], steps)

    def step(self, rows: set[int], chunk: int, new: list[int]) -> None:
        """Run a chunk of some requests, or one token."""
        batch = [each for row, each in enumerate(self.live) if row in rows]
        batch = [each for each in batch if self.reserve(each, 1)]
        if not batch:
            return
        contexts = [each.context for each in batch]
        before = [(c.start_idx, c.active_idx) for c in contexts]
        (inputs,) = self.manager.fetch(contexts)
        assert [(c.start_idx, c.active_idx) for c in contexts] == before
        self.check_inputs(inputs, contexts)
        self.model.run(inputs, contexts)
        for context, token in zip(contexts, new, strict=False):
            context.update(token)
        swaps = self.manager.step(contexts)
        for each in batch:
            self.commit(each)
        self.check_swaps(swaps, batch)
        for each in batch:
            c = each.context
            if chunk > 0 and c.start_idx + chunk < c.end_idx:
                c.active_idx = c.start_idx + chunk
        self.end_long_ones()

    def decode_several(self, which: int, new: list[int]) -> None:
        """Run several steps after one fetch; the steps append tokens and write them."""
        each = self.live[which % len(self.live)]
        context, steps = each.context, min(3, len(new))
        if context.active_idx < context.end_idx or not self.reserve(each, steps):
            return
        if context.active_idx < context.end_idx:
            return  # the hit or a cut left a part of its prompt
        (inputs,) = self.manager.fetch([context], steps)
        self.model.run(inputs, [context], [new[: steps - 1]])
        for token in new[:steps]:
            context.update(token)
        self.manager.step([context])
        self.commit(each)
        self.end_long_ones()

    def fork(self, which: int, tail: list[int]) -> None:
        parent = self.live[which % len(self.live)]
        written = min(parent.told.written, parent.context.start_idx)
        self.names += 1
        tokens = [*parent.context.tokens[:written].tolist(), *tail]
        child = TextGenerationContext(self.names, tokens)
        try:
            self.manager.fork(parent.context.request_id, child)
        except CapacityError as refused:
            assert self.has_states, refused
            assert not self.is_exact, refused
            return
        assert child.start_idx == written
        self.live.append(Live(child, self.rules.fork(parent.told, tokens)))

    def truncate(self, which: int, back: int) -> None:
        each = self.live[which % len(self.live)]
        told, context = each.told, each.context
        if not told.has_run:
            return
        n = max(0, told.written - back)
        is_allowed = self.rules.may_truncate(told, n)
        try:
            self.manager.truncate(context.request_id, n)
        except ValueError as refused:
            assert not (self.is_exact and is_allowed), (n, told, refused)
            return
        assert is_allowed, (n, told)
        self.rules.truncate(told, n)
        if n < context.start_idx:
            context.rewind(n + 1)
            told.tokens = context.tokens.tolist()

    def leave(self, which: int, back: int) -> None:
        """Give back the pages that windows no longer read, after all written tokens or fewer."""
        each = self.live[which % len(self.live)]
        told, name = each.told, each.context.request_id
        if not self.rules.keeps:
            with pytest.raises(ValueError, match="make the manager with keep_windows"):
                self.manager.leave_windows(name, 0)
            return
        n = max(0, told.written - back)
        leaves_at = self.manager.leave_windows(name, n)
        self.rules.leave(told, n)
        if self.rules.has_windows:
            assert leaves_at > n
            assert leaves_at == self.rules.leaves_at(told)
        else:
            assert leaves_at == 2**63 - 1

    def draft(self, which: int, drafts: list[int], wrong: int) -> None:
        """Run drafted tokens; the last of them are rejected."""
        each = self.live[which % len(self.live)]
        context, told = each.context, each.told
        if self.has_states or not told.has_run or context.end_idx - context.start_idx != 1:
            return
        context.extend(drafts)
        told.tokens = context.tokens.tolist()
        if not self.reserve(each, 1):
            context.rewind(context.end_idx - len(drafts))
            told.tokens = context.tokens.tolist()
            return
        (inputs,) = self.manager.fetch([context])
        self.model.run(inputs, [context])
        wrong = min(wrong, self.rules.drafts, len(drafts))
        context.update(1)
        if wrong > 0:
            end = context.start_idx - wrong
            self.manager.truncate(context.request_id, end)
            self.rules.truncate(each.told, end)
            context.rewind(end + 1)
        self.manager.step([context])
        self.commit(each)
        self.end_long_ones()

    def release(self, which: int) -> None:
        each = self.live.pop(which % len(self.live))
        self.manager.release(each.context.request_id)

    def pin(self, of: int, keep: int) -> None:
        tokens = self.past[of % len(self.past)][:keep]
        expected = self.manager.match_prefix(tokens)
        pinned = self.manager.pin(tokens)
        assert pinned.num_tokens == expected
        self.pins.append((pinned, tokens))

    def unpin(self, which: int) -> None:
        pinned, tokens = self.pins.pop(which % len(self.pins))
        assert self.manager.match_prefix(tokens) >= pinned.num_tokens, "a pinned prefix is missing"
        pinned.release()
        if self.forgotten:
            self.forgotten.pop()[0].release()

    def match(self, of: int, keep: int, *, touch: bool) -> None:
        tokens = self.past[of % len(self.past)][:keep]
        found = self.manager.match_prefix(tokens, touch=touch)
        known = self.rules.whole_hit(tuple(tokens))
        assert found == known if self.is_exact else found <= known

    def reset(self) -> None:
        """Reset the cache; the exact rules apply only if no request or pin holds a page."""
        if self.is_exact and (self.live or self.pins):
            return
        self.manager.reset_prefix_cache()
        self.forgotten += self.pins
        self.pins.clear()
        if not self.live and not self.forgotten:
            self.rules.cached.clear()
            self.rules.checkpoints.clear()
            assert all(group.cached_pages == 0 for group in self.manager.group_metrics)
            assert self.manager.state_metrics.checkpoints == 0
