# SPDX-License-Identifier: Apache-2.0
"""Measure pinning a prefix, by the number of tree nodes on its path."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import kvcore
from harness import Row, main, make_row, plain_row, repeat_calls, sample_loop
from workload import PAGE, Tokens, cache, manager, prompts

_DEPTHS = (1, 8, 64, 512)
_CALLS = 20_000


def _tree(depth: int) -> tuple[kvcore.PrefixTree, Tokens]:
    """Build a tree in which the path of ``tokens`` has ``depth`` nodes of one page each."""
    tree = kvcore.PrefixTree(PAGE)
    tokens, others = prompts(1, depth * PAGE, 1)[0], prompts(depth, PAGE, 2)
    tree.insert(tokens, np.arange(depth, dtype=np.int32))
    for i in range(1, depth):
        branch = np.concatenate([tokens[: i * PAGE], others[i]])
        ids = np.append(np.arange(i, dtype=np.int32), np.int32(depth + i))
        tree.insert(branch, ids)
    assert tree.num_nodes == 2 * depth - 1
    return tree, tokens


def _pairs(tree: kvcore.PrefixTree) -> Callable[[Sequence[Any]], None]:
    pin, unpin = tree.pin, tree.unpin

    def body(handles: Sequence[Any]) -> None:
        for handle in handles:
            pin(handle)
            unpin(handle)

    return body


def _pin_row(depth: int) -> Row:
    tree, tokens = _tree(depth)
    pages, handle = tree.match(tokens)
    assert len(pages) == depth
    body = _pairs(tree)
    body([handle] * 1000)
    samples = sample_loop(body, [handle] * _CALLS, _CALLS // 20)
    return make_row(f"pin.{depth}", f"pin + unpin, {depth} nodes deep", samples)


def _pin_tokens(tokens: int) -> list[Row]:
    """Compare ``mgr.pin(tokens)`` and its release with only the match."""
    rows = prompts(100, tokens, 3)
    mgr = manager(rows.size // PAGE + 1024)
    cache(mgr, rows, "cached")
    query = rows[50].copy()

    def pin(wanted: Tokens) -> None:
        mgr.pin(wanted).release()

    match = repeat_calls(mgr.match_prefix, query, tokens)
    pinned = repeat_calls(pin, query, tokens)
    name = f"pin({tokens:,} tokens) + release"
    base = make_row("", "", match).median
    limit = {"limit": base, "limit_name": "match"}
    return [make_row(f"pin.tokens.{tokens}", name, pinned, **limit)]


def measure(_options: Namespace) -> list[Row]:
    """Measure pinning by handle and by tokens."""
    rows = [_pin_row(depth) for depth in _DEPTHS]
    ratio = rows[-1].median / rows[0].median
    flat = plain_row("pin.flat", f"the same: {_DEPTHS[-1]} nodes / 1 node", ratio, "x")
    return [*rows, flat, *_pin_tokens(64), *_pin_tokens(2048)]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
