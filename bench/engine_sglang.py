# SPDX-License-Identifier: Apache-2.0
"""Ask what SGLang's scheduler pays for its prefix cache: SGLang's own two trees and kvcore's.

Needs torch and the wheel of SGLang, which comes from the package index unless it is in the folder
that ``KVCORE_SGLANG`` names. The limit of kvcore's rows is SGLang's tree in Rust, in the same run,
or its Python tree where the wheel's Rust does not load. Calls take turns.
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
    """Each cache with an allocator of its own, by name; kvcore's last."""
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
    """SGLang's cache of today on its tree in Rust."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    params.tree_components, params.tree_core_backend = (ComponentType.FULL,), "rust"
    return UnifiedRadixCache(params)


def put(side: Any, ids: array[int]) -> Callable[[], Any]:
    """Cache a prompt; return the call that does it again."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    value = side.allocator.alloc(len(ids))

    def insert() -> Any:
        # Nothing is the caller's to free, as it matched all of it.
        given = InsertParams(key=RadixKey(ids), value=value, prev_prefix_len=len(ids))
        return side.cache.insert(given)

    insert()
    return insert


def calls(call: Callable[[], Any]) -> Body:
    """The body of a loop over a call without arguments."""

    def body(items: Sequence[Any]) -> None:
        for _ in items:
            call()

    return body


def warm(body: Body, items: Sequence[Any]) -> float:
    """Return us per item of a body that has just run."""
    body(items)
    return time_loop(body, items)


def rows_of(key: str, work: str, bodies: dict[str, Body], size: int, quick: bool) -> list[Row]:
    """Time the bodies by turns; kvcore's row has the fastest tree of SGLang's as its limit."""

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
    """Match, insert and lock a prompt of 8k tokens that is cached."""
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
    """Keep a prefix and let it go."""
    cache.unlock(cache.lock(node))


def publish(side: Any) -> None:
    """Compute a page more of a request, and cache it."""
    end = side.requests["r"].kv.kv_allocated_len + PAGE
    side.grow("r", end)
    side.checkpoint("r", end)


def checkpoint_rows(quick: bool) -> list[Row]:
    """Publish a page behind 8k tokens, as a long prompt in chunks or a finished request does."""
    bodies: dict[str, Body] = {}
    for name, side in caches(4 * TOKENS).items():
        side.start("r", list(range(TOKENS + 6000)), (None, None), None)
        side.grow("r", TOKENS)
        side.checkpoint("r", TOKENS)

        bodies[name] = calls(partial(publish, side))
    return rows_of("checkpoint", "a page more behind 8k tokens", bodies, 10, quick)


def evictions(side: Any, params: Any) -> Body:
    """Return the body of evictions from a pool that is full, as pools are that evict."""
    evict, allocator = side.cache.evict, side.allocator

    def body(items: Sequence[Any]) -> None:
        allocator.alloc(allocator.available_size())
        for _ in items:
            evict(params)

    return body


def evict_rows(quick: bool) -> list[Row]:
    """Evict 128 tokens of 20,000 prompts."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    leaves = LEAVES // 10 if quick else LEAVES
    bodies: dict[str, Body] = {}
    for name, side in caches(leaves * PAGE).items():
        for i in range(leaves):
            put(side, array("q", [i] * PAGE))
        bodies[name] = evictions(side, EvictParams(num_tokens=128))
    return rows_of("evict", f"evict 128 tokens of {leaves:,} leaves", bodies, 20, quick)


def measure(options: Namespace) -> list[Row]:
    """Measure the calls of a scheduler."""
    folder = Path(os.environ.get("KVCORE_SGLANG", Path(tempfile.gettempdir()) / "kvcore-sglang"))
    folder.mkdir(parents=True, exist_ok=True)
    sglang_sources.open_sources(sglang_sources.fetch(folder), folder)
    quick = options.quick
    return [*prompt_rows(quick), *checkpoint_rows(quick), *evict_rows(quick)]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
