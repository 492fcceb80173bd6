# SPDX-License-Identifier: Apache-2.0
"""Measure a prefix hit in a model with sliding windows: vLLM's manager and kvcore's.

The model has one group of full attention and one group with a window of 1,024 tokens, in blocks of
16 tokens. A request with a cached prompt gets the computed blocks and allocates the other blocks.
The end of the request is timed separately. Times are CPU time of the thread; the managers run in
turn. The bench has the same requirements as ``bench/engine_vllm.py``.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from itertools import count
from statistics import median
from time import thread_time_ns
from typing import Any

from engine_vllm import PAGE, prepare, window_groups
from harness import Row, main, make_row, quiet

TOKENS = 32_768
WINDOW = 1024
REST = 20  # tokens after the hit
names = count()


def cache_config(tokens: int) -> Any:
    """Return a cache config with blocks for three prompts of ``tokens`` tokens."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    groups = window_groups(1, WINDOW, has_full=True)
    return KVCacheConfig(6 * (tokens // PAGE + 8), [], groups)


class Side:
    """A manager with a cached prompt."""

    def __init__(self, who: str, tokens: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        from kvcore.integrations.vllm import choice

        init_none_hash(sha256)
        maker = KVCacheManager if who == "vLLM" else choice.make_manager
        self.who, self.prompt = who, list(range(1000, 1000 + tokens))
        self.manager: Any = maker(cache_config(tokens), 2 * tokens, PAGE, PAGE)
        hasher = get_request_block_hasher if who == "vLLM" else choice.lazily_hashed
        self.hasher = hasher(PAGE, sha256)
        first = self.request()
        for end in range(2048, tokens + 2048, 2048):
            if self.manager.allocate_slots(first, min(2048, tokens + REST - end + 2048)) is None:
                raise RuntimeError("the pool is too small for the prompt")
            first.num_computed_tokens = end
        self.manager.free(first)

    def request(self) -> Any:
        """Return a request with the cached prompt and new tokens after it."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        name = str(next(names))
        rest = [50_000 + int(name)] * REST
        sampling = SamplingParams(max_tokens=16)
        return Request(name, [*self.prompt, *rest], sampling, None, block_hasher=self.hasher)

    def run(self) -> tuple[float, float]:
        """Return the us of a hit, and of the end of the request."""
        request, manager = self.request(), self.manager
        start = thread_time_ns()
        blocks, tokens, *_ = manager.get_computed_blocks(request)
        got = manager.allocate_slots(
            request, REST, num_new_computed_tokens=tokens, new_computed_blocks=blocks
        )
        hit = (thread_time_ns() - start) / 1e3
        if tokens != len(self.prompt) or got is None:
            raise RuntimeError(f"{self.who}: {tokens} tokens of {len(self.prompt)} were found")
        request.num_computed_tokens = tokens + REST
        start = thread_time_ns()
        manager.free(request)
        return hit, (thread_time_ns() - start) / 1e3


def measure(options: Namespace) -> list[Row]:
    """Measure both sides in turn."""
    prepare()
    tokens, rounds = (4096, 4) if options.quick else (TOKENS, 24)
    sides = [Side(who, tokens) for who in ("vLLM", "kvcore")]
    found: dict[str, list[tuple[float, float]]] = {side.who: [] for side in sides}
    with quiet():
        for side in sides * (rounds + 2):
            found[side.who].append(side.run())
    rows: list[Row] = []
    for at, (key, work) in enumerate((("hit", "a hit of"), ("end", "the end of a request with"))):
        spent = {who: [each[at] for each in times[2:]] for who, times in found.items()}
        for who, times in spent.items():
            limit = {"limit": median(spent["vLLM"]), "limit_name": "vLLM"} if who != "vLLM" else {}
            text = f"{work} {tokens:,} tokens, one full group and one window: {who}"
            rows.append(make_row(f"vllm.windows.{key}.{who.lower()}", text, times, **limit))
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
