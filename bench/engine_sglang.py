# SPDX-License-Identifier: Apache-2.0
"""Measure the calls of SGLang's scheduler to its prefix cache: SGLang's two trees and kvcore's.

The bench needs torch and the wheel of SGLang. The wheel comes from the folder that
``KVCORE_SGLANG`` names, or else from the package index. The limit of kvcore's rows is SGLang's Rust
tree in the same run, or SGLang's Python tree if the Rust tree does not load. The caches run in
turn.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness import Row, main, make_row, time_loop, undisturbed

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "engines"))

import sglang_sources

PAGE = 16
TOKENS = 8192
LEAVES = 20_000
ROUNDS = 15

Body = Callable[[Sequence[Any]], None]


def caches(slots: int, context: int = TOKENS + 6144) -> dict[str, Any]:
    """Return the caches by name, each with its own allocator; kvcore's cache is last."""
    from sglang.srt.mem_cache.radix_cache import RadixCache

    import sglang_pair
    from kvcore.integrations.sglang.cache import KVCoreRadixCache

    sglang_pair.CONTEXT = context
    types = {"SGLang": RadixCache, "SGLang Rust": rust_cache, "kvcore": KVCoreRadixCache}
    made: dict[str, Any] = {}
    for name, each in types.items():
        try:
            made[name] = sglang_pair.Side(each, PAGE, slots)
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return made


def rust_cache(params: Any) -> Any:
    """Return SGLang's current cache, on its tree in Rust."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    params.tree_components, params.tree_core_backend = (ComponentType.FULL,), "rust"
    return UnifiedRadixCache(params)


def put(side: Any, ids: array[int]) -> Callable[[], Any]:
    """Cache a prompt; return a call that inserts the prompt again."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    value = side.allocator.alloc(len(ids))

    def insert() -> Any:
        # The whole prompt was matched, so the caller has no slots to free.
        given = InsertParams(key=RadixKey(ids), value=value, prev_prefix_len=len(ids))
        return side.cache.insert(given)

    insert()
    return insert


def calls(call: Callable[[], Any]) -> Body:
    """Return the body of a loop over a call without arguments."""

    def body(items: Sequence[Any]) -> None:
        for _ in items:
            call()

    return body


def warm(body: Body, items: Sequence[Any]) -> float:
    """Run a body once, then return its us per item."""
    body(items)
    return time_loop(body, items)


def rows_of(key: str, work: str, bodies: dict[str, Body], size: int, quick: bool) -> list[Row]:
    """Time the bodies in turn; the limit of kvcore's row is SGLang's Rust tree, if it loads."""

    def turn() -> list[dict[str, float]]:
        return [{name: warm(body, range(size)) for name, body in bodies.items()}]

    turns = undisturbed([turn] * (3 if quick else ROUNDS))
    samples = {name: [each[name] for each in turns] for name in bodies}
    limit = "SGLang Rust" if "SGLang Rust" in bodies else "SGLang"
    rows = []
    for name, found in samples.items():
        more = {"limit": median(samples[limit]), "limit_name": limit} if name == "kvcore" else {}
        row_key = f"sglang.{key}.{name.split()[-1].lower()}"
        rows.append(make_row(row_key, f"{work}: {name}", found, **more))
    return rows


def prompt_rows(quick: bool) -> list[Row]:
    """Match, insert and lock a cached prompt of 8k tokens."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    ids = array("q", range(TOKENS))
    matches: dict[str, Body] = {}
    inserts: dict[str, Body] = {}
    locks: dict[str, Body] = {}
    paths: dict[str, Body] = {}
    for name, side in caches(4 * TOKENS).items():
        again = put(side, ids)
        cache, params = side.cache, MatchPrefixParams(key=RadixKey(ids))
        node = cache.match_prefix(params).last_device_node
        matches[name] = calls(partial(cache.match_prefix, params))
        inserts[name] = calls(again)
        locks[name] = calls(partial(lock, cache, node))
        paths[name] = calls(partial(cache.path_device_indices, node))
    size = 20 if quick else 200
    return [
        *rows_of("match", "match 8k tokens", matches, size, quick),
        *rows_of("path", "slots of 8k tokens", paths, size, quick),
        *rows_of("insert", "insert 8k tokens that are cached", inserts, size, quick),
        *rows_of("lock", "lock + unlock", locks, 5 * size, quick),
    ]


def lock(cache: Any, node: Any) -> None:
    """Lock a prefix and unlock it."""
    cache.unlock(cache.lock(node))


def publish(side: Any) -> None:
    """Grow a request by a page, and cache the page."""
    end = side.requests["r"].kv.kv_allocated_len + PAGE
    side.grow("r", end)
    side.checkpoint("r", end)


def checkpoint_rows(quick: bool) -> list[Row]:
    """Cache a page after 8k tokens, as a long prompt in chunks or a finished request does."""
    bodies: dict[str, Body] = {}
    for name, side in caches(4 * TOKENS).items():
        side.start("r", list(range(TOKENS + 6000)), (None, None), None)
        side.grow("r", TOKENS)
        side.checkpoint("r", TOKENS)

        bodies[name] = calls(partial(publish, side))
    return rows_of("checkpoint", "one more page after 8k tokens", bodies, 10, quick)


def evictions(side: Any, params: Any) -> Body:
    """Return the body of evictions from a full pool: a server evicts only from a full pool."""
    evict, allocator = side.cache.evict, side.allocator

    def body(items: Sequence[Any]) -> None:
        allocator.alloc(allocator.available_size())
        for _ in items:
            evict(params)

    return body


def evict_rows(quick: bool) -> list[Row]:
    """Evict 128 tokens from a cache of 20,000 prompts."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    leaves = LEAVES // 10 if quick else LEAVES
    bodies: dict[str, Body] = {}
    for name, side in caches(leaves * PAGE).items():
        for i in range(leaves):
            put(side, array("q", [i] * PAGE))
        bodies[name] = evictions(side, EvictParams(num_tokens=128))
    return rows_of("evict", f"evict 128 tokens of {leaves:,} leaves", bodies, 20, quick)


def measure(options: Namespace) -> list[Row]:
    """Measure the calls of SGLang's scheduler."""
    folder = Path(os.environ.get("KVCORE_SGLANG", Path(tempfile.gettempdir()) / "kvcore-sglang"))
    folder.mkdir(parents=True, exist_ok=True)
    sglang_sources.open_sources(sglang_sources.fetch(folder), folder)
    quick = options.quick
    return [*prompt_rows(quick), *checkpoint_rows(quick), *evict_rows(quick)]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
