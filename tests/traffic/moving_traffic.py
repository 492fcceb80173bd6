# SPDX-License-Identifier: Apache-2.0
"""Random requests that move between managers."""

from __future__ import annotations

from typing import Any

from grouped_traffic import Traffic
from kvcore import CapacityError, TextGenerationContext
from kvcore.moving import read_sequence


class Moves(Traffic):
    """The requests of one manager, which may move to another; the names show the manager."""

    side = ""
    moved = 0

    def send(self, other: Moves) -> None:
        """Move a request, or copy it and continue it on both sides."""
        for long in [name for name, c in self.live.items() if c.end_idx > 30]:  # pools are small
            self.manager.release(long)
            del self.live[long]
        found = [c for c in self.live.values() if c.start_idx > 0]
        if not found or len(other.live) == 5:
            return
        context = self.random.choice(found)
        written = context.start_idx
        data = self.manager.export_sequence(context.request_id)
        saved = read_sequence(data)
        assert saved.written == written
        name = f"{other.side}{next(other.names)}"
        copied = (
            saved.context(name)
            if self.random.random() < 0.5
            else TextGenerationContext(name, context.tokens)
        )
        other.take(copied, data, written)
        if self.random.random() < 0.5:
            self.manager.release(context.request_id)
            del self.live[str(context.request_id)]

    def take(self, context: TextGenerationContext, data: bytes, written: int) -> None:
        before = self.manager.num_free_blocks
        replica: Any = self.random.randrange(self.params.data_parallel_degree)
        try:
            has_room = self.manager.import_sequence(context, data, replica_idx=replica)
        except CapacityError:
            has_room = False
        if not has_room:
            assert not self.manager.contains(context.request_id)
            assert (context.start_idx, self.manager.num_free_blocks) == (0, before)
            return
        assert context.start_idx == written
        self.moved += 1
        self.live[str(context.request_id)] = context
        self.chunk(context)
