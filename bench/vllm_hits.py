# SPDX-License-Identifier: Apache-2.0
"""Compare the prefix hits of vLLM's own KV cache manager and of kvcore's, with sliding windows.

vLLM's scheduler serves the same random traffic on both managers, with a model that only counts.
Each seed draws a model (windows with or without full attention), lengths, and the order of
requests. In ``continued`` traffic the next prompt contains the last prompt and answer. In
``repeated`` traffic it contains only the last prompt, or a head that many prompts share. ``mixed``
traffic has both. The pool has 20 .. 100 % of the blocks that vLLM fills if it never has to evict.
The bench has the same requirements as ``bench/engine_vllm.py``.

    python bench/vllm_hits.py --seeds 50

The bench prints a line per kind and pool: mean, median and least ratio of kvcore's hits to vLLM's
over all seeds, and the seeds below ``--least``. The exit code is 1 if a seed is below ``--least``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from engine_vllm import PAGE, prepare, window_groups

KINDS = ("continued", "repeated", "mixed")
POOLS = (20, 40, 60, 80, 100)
LENGTH = 4096


@dataclass(frozen=True)
class World:
    """The draws of a seed: the groups of a model, and the sizes of its traffic."""

    windows: int
    has_full: bool
    window: int
    clients: int
    budget: int  # tokens of a step

    @staticmethod
    def draw(chance: random.Random) -> World:
        """Draw a world."""
        has_full = chance.random() < 0.6
        return World(
            windows=chance.choice((1, 3, 5)) if has_full else 1,
            has_full=has_full,
            window=chance.choice((64, 128, 256)),
            clients=chance.choice((1, 2, 4, 8)),
            budget=chance.choice((128, 256, 512)),
        )


class Traffic:
    """Sessions in random order; answers are drawn in advance, so both managers get the same."""

    def __init__(self, kind: str, seed: int, requests: int) -> None:
        self.chance = random.Random(f"{kind} {seed}")
        self.kind = kind
        self.left = requests
        self.heads = [self.text(80, 500) for _ in range(self.chance.choice((3, 6, 12)))]
        self.sessions = self.chance.choice((4, 8, 16))
        self.asked: list[list[int]] = [[] for _ in range(self.sessions)]
        self.told: list[list[int]] = [[] for _ in range(self.sessions)]
        self.most = self.chance.choice((24, 60, 160))

    def text(self, least: int, most: int) -> list[int]:
        """Return random tokens."""
        length = self.chance.randint(least, most)
        return [self.chance.randrange(1000, 30_000) for _ in range(length)]

    def next(self) -> tuple[list[int], list[int]] | None:
        """Return a prompt and its answer; None after the last request."""
        if self.left == 0:
            return None
        self.left -= 1
        chance = self.chance
        i = chance.randrange(self.sessions)
        before, said = self.asked[i], self.told[i]
        continues = self.kind == "continued" or (self.kind == "mixed" and chance.random() < 0.5)
        if not before or len(before) > LENGTH // 3:
            prompt = [*chance.choice(self.heads), *self.text(10, 100)]
        elif continues:
            prompt = [*before, *said, *self.text(10, 100)]
        elif chance.random() < 0.3:
            prompt = before
        elif chance.random() < 0.5:
            prompt = [*before, *self.text(10, 100)]
        else:
            prompt = [*chance.choice(self.heads), *self.text(10, 100)]
        self.asked[i], self.told[i] = prompt, self.text(4, self.most)
        return prompt, self.told[i]


class Engine:
    """vLLM's scheduler over a manager, without a model."""

    def __init__(self, who: str, world: World, blocks: int) -> None:
        from tests.v1.core import utils  # type: ignore[import-not-found]
        from vllm.utils.hashing import sha256
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.sched import scheduler

        from kvcore.integrations.vllm import choice

        kv_cache_utils.init_none_hash(sha256)
        makes = {"vLLM": KVCacheManager, "kvcore": choice.make_manager}[who]
        config = cache_config(world, blocks)
        scheduler.KVCacheManager = makes
        self.engine = utils.create_scheduler(
            model="Qwen/Qwen3-0.6B",
            max_num_seqs=16,
            max_num_batched_tokens=world.budget,
            max_model_len=LENGTH,
            enable_prefix_caching=True,
            num_blocks=blocks,
            block_size=PAGE,
            scheduler_cls=lambda **k: scheduler.Scheduler(**k | {"kv_cache_config": config}),
        )
        hasher = {"vLLM": kv_cache_utils.get_request_block_hasher, "kvcore": choice.lazily_hashed}
        self.hasher = hasher[who](PAGE, sha256)
        self.answers: dict[str, list[int]] = {}
        self.hits = self.preempted = 0

    def add(self, prompt: list[int], answer: list[int]) -> None:
        """Add a request to the waiting queue."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        name = str(len(self.answers))
        self.answers[name] = list(answer)
        sampling = SamplingParams(ignore_eos=True, max_tokens=len(answer))
        self.engine.add_request(
            Request(name, prompt, sampling, None, block_hasher=self.hasher, arrival_time=0.0)
        )

    def step(self) -> None:
        """Schedule a step, and apply its answers."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.engine.schedule()
        ran = list(output.num_scheduled_tokens)
        requests = [self.engine.requests[name] for name in ran]
        ends = [each.num_computed_tokens >= each.num_tokens for each in requests]
        told = [
            [self.answers[each.request_id][each.num_output_tokens]] if end else []
            for each, end in zip(requests, ends, strict=True)
        ]
        answer = ModelRunnerOutput(
            req_ids=ran,
            req_id_to_index={name: i for i, name in enumerate(ran)},
            sampled_token_ids=told,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for each in self.engine.update_from_output(output, answer).values():
            if each.scheduler_stats is not None:
                found = each.scheduler_stats.prefix_cache_stats
                self.hits += found.hits
                self.preempted += found.preempted_requests

    def serve(self, traffic: Traffic, clients: int) -> int:
        """Serve all requests, `clients` at a time; return the cached tokens of their prompts."""
        while True:
            while len(self.engine.requests) < clients:
                following = traffic.next()
                if following is None:
                    break
                self.add(*following)
            if not self.engine.requests:
                return self.hits
            self.step()

    def blocks_filled(self) -> int:
        """Count the cached blocks of vLLM's own manager."""
        blocks = self.engine.kv_cache_manager.block_pool.blocks
        return sum(each.block_hash is not None for each in blocks)


def cache_config(world: World, blocks: int) -> Any:
    """Return the groups of a world's model."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    groups = window_groups(world.windows, world.window, has_full=world.has_full)
    return KVCacheConfig(blocks, [], groups, prefix_cache_retention_interval=0)


def least_blocks(world: World) -> int:
    """Return the number of blocks that the longest request needs, and a few more."""
    groups = world.windows + world.has_full
    chunk = (world.window + world.budget) // PAGE + 3
    return world.has_full * (LENGTH // 2 // PAGE) + world.windows * chunk + 8 * groups


def compare(seed: int, kind: str, pools: list[int], requests: int, cache: Any) -> dict[int, Any]:
    """Return the hits on both managers, for each percentage in ``pools``."""
    world = World.draw(random.Random(seed))
    key = f"{seed} {kind} {requests}"
    if key not in cache:
        ample = Engine("vLLM", world, 40_000)
        ample.serve(Traffic(kind, seed, requests), world.clients)
        cache[key] = ample.blocks_filled()
    found = {}
    for pool in pools:
        blocks = max(cache[key] * pool // 100, least_blocks(world))
        known = f"{key} {blocks}"
        if known not in cache:
            own = Engine("vLLM", world, blocks)
            cache[known] = own.serve(Traffic(kind, seed, requests), world.clients)
        ours = Engine("kvcore", world, blocks)
        found[pool] = cache[known], ours.serve(Traffic(kind, seed, requests), world.clients)
    return found


def main() -> int:
    """Compare the hits and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--pools", default=",".join(map(str, POOLS)), help="percentages")
    parser.add_argument("--least", type=float, default=0.95, help="the least accepted ratio")
    parser.add_argument("--cache", type=Path, help="store vLLM's own hits in this file")
    options = parser.parse_args()
    prepare()
    has_cache = options.cache is not None and options.cache.exists()
    cache = json.loads(options.cache.read_text()) if has_cache else {}
    pools = [int(each) for each in options.pools.split(",")]
    low = 0
    for kind in options.kinds.split(","):
        ratios: dict[int, dict[int, float]] = {pool: {} for pool in pools}
        for seed in range(options.first, options.first + options.seeds):
            for pool, (own, ours) in compare(seed, kind, pools, options.requests, cache).items():
                ratios[pool][seed] = ours / own if own else 1.0
            if options.cache:
                options.cache.write_text(json.dumps(cache))
        for pool, of in ratios.items():
            below = {seed: round(r, 3) for seed, r in of.items() if r < options.least}
            low += len(below)
            print(f"{kind:9} {pool:3} %: mean {mean(of.values()):.3f}, median "
                  f"{median(of.values()):.3f}, least {min(of.values()):.3f}; below "
                  f"{options.least}: {below or 'none'}", flush=True)  # fmt: skip
    print(f"{low} below")
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
