# SPDX-License-Identifier: Apache-2.0
"""Record the peak memory of a model's groups, and the memory they would take without groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcore.groups import FullAttention, State
from kvcore.layers.kinds import described
from kvcore.layers.layer_map import column_tokens
from kvcore.layers.packing import bundles_of
from kvcore.paged import PagedKVCacheManager

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcore.params import KVCacheParams

__all__ = ["WatchedManager"]


class WatchedManager(PagedKVCacheManager):
    """Record the held pages of each group before each forward pass; without groups, do nothing.

    Attributes
    ----------
    most_held : tuple of int
        Pages that requests held of each group, at the forward pass with the most held pages.
    most_slots : int
        Maximum number of slots that states of requests took in a forward pass.
    flat_bytes : int
        Maximum bytes that the tokens of a forward pass would take if every layer kept them.

    Notes
    -----
    A fetch costs O(pages) more than in the base class.
    """

    def __init__(self, params: KVCacheParams, *args: Any, **options: Any) -> None:
        super().__init__(params, *args, **options)
        self.most_held: tuple[int, ...] = ()
        self.most_slots = 0
        self.flat_bytes = 0
        self._flat_bytes_per_token = params.flat_bytes_per_token
        self._full = next(
            (i for i, g in enumerate(params.attention_groups) if isinstance(g, FullAttention)), None
        )

    def fetch(self, batch: Any, num_steps: int = 1) -> Any:
        """Return the inputs of the kernels, as in the base class, and record the held pages."""
        inputs = super().fetch(batch, num_steps)
        held = self._held()
        if held:
            self.most_held = max(self.most_held, held, key=sum)
            tokens = self._columns(held, batch) * column_tokens(self.params)
            self.flat_bytes = max(self.flat_bytes, tokens * self._flat_bytes_per_token)
        if self.params.state_groups:
            self.most_slots = max(self.most_slots, self.state_metrics.used_slots)
        return inputs

    def _held(self) -> tuple[int, ...]:
        """Count the pages that requests hold of each attention group; () without groups."""
        held = tuple(each.held_pages for each in self.group_metrics)
        if held or not self.params.state_groups:
            return held
        return (self.total_num_pages - self.num_free_blocks,)  # the only group with pages

    def _columns(self, held: Sequence[int], batch: Any) -> int:
        """Count the columns of all tokens; with a full group, a shared column counts once."""
        size = column_tokens(self.params)
        if self._full is None:
            return sum(-(-context.end_idx // size) for context in batch)
        own = bundles_of(self.params, self.params.attention_groups[self._full])
        return held[self._full] // sum(size // bundle.page_size for bundle in own)

    def groups_held(self) -> list[dict[str, Any]]:
        """Return the layers and the peak pages of each group; empty without groups."""
        params, held = self.params, self.most_held
        if not held:
            return []
        given_back = [each.given_back for each in self.group_metrics] or [0]
        rows = [
            {
                **described(group),
                "bundles": len(bundles_of(params, group)),
                "pages": pages,
                "bytes": pages * params.bytes_per_page,
                "given_back": passed,
            }
            for group, pages, passed in zip(params.attention_groups, held, given_back, strict=True)
        ]
        return rows + [self._states_held(group) for group in params.state_groups]

    def _states_held(self, group: State) -> dict[str, Any]:
        return {
            **described(group),
            "bundles": 0,
            "pages": 0,
            "slots": self.most_slots,
            "bytes": self.most_slots * group.bytes_per_slot,
            "given_back": 0,
        }
