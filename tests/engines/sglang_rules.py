# SPDX-License-Identifier: Apache-2.0
"""SGLang's trees without two of their rules, which are side effects of a node split.

A match that ends inside a node counts as a use of the whole node, and the split-off front part
counts as cached just now.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode


def _touch(node: Any, time: float) -> None:
    node.touched_before = getattr(node, "touched_last", time)
    node.touched_last = time


TreeNode.last_access_time = property(lambda node: node.touched_last, _touch)


class RulesOut(RadixCache):  # type: ignore[misc]
    """SGLang's tree."""

    def _split_node(self, key: Any, child: Any, split_len: int) -> Any:
        head = super()._split_node(key, child, split_len)
        child.last_access_time = child.touched_before
        head.creation_time = child.creation_time
        return head


class WindowRulesOut(RulesOut, PureSWARadixCache):  # type: ignore[misc]
    """SGLang's tree of models all of whose layers have a sliding window."""
