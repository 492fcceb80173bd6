# SPDX-License-Identifier: Apache-2.0
"""Conversations through a small pool: the number of tokens that a prefix cache of SGLang finds.

Needs SGLang's sources (`sglang_sources.open_sources`). Unlike the pair of caches under the same
calls, each cache evicts by its own rules.
"""

from __future__ import annotations

import random
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixCache

from kvcore.integrations.sglang.cache import KVCoreRadixCache
from sglang_checks import CHECKS, PLAIN, check
from sglang_pair import CONTEXT, Side

__all__ = ["CHECKS"]

TURNS = 400
TALKS = 24


def hits(cache_type: Any, page: int, policy: str, seed: int) -> int:
    """Return the cached tokens of conversations; each turn is a separate request."""
    rng = random.Random(seed)
    side = Side(cache_type, page, 96 * 16, eviction_policy=policy)
    systems = [[rng.randrange(9) for _ in range(40)] for _ in range(3)]
    talks: dict[int, list[int]] = {}
    found = 0
    for turn in range(TURNS):
        who = min(int(rng.expovariate(0.2)), TALKS - 1)
        tokens = talks.setdefault(who, list(rng.choice(systems)))
        tokens += [rng.randrange(9) for _ in range(rng.randrange(4, 30))]
        if len(tokens) > CONTEXT - 40:
            del talks[who]
            continue
        rid = f"{turn}"
        hit = side.start(rid, tokens, PLAIN, None)
        side.evict(side.missing(len(tokens) - hit + page))
        side.grow(rid, len(tokens))
        side.release(rid, checkpoint=True)
        side.check()
        found += hit
    return found


@check
def hits_under_pressure_are_those_of_sglang() -> None:
    for policy in ("lru", "lfu", "slru", "fifo"):
        theirs, ours = (
            sum(hits(each, page, policy, seed) for page in (1, 16) for seed in range(2))
            for each in (RadixCache, KVCoreRadixCache)
        )
        print(f"hits with evictions, {policy}: SGLang {theirs:,}, kvcore {ours:,} tokens")
        assert ours >= 0.98 * theirs, (policy, theirs, ours)
