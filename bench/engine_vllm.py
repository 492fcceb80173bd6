# SPDX-License-Identifier: Apache-2.0
"""Measure a step of vLLM's scheduler on vLLM's own KV cache manager and on kvcore.

The time is the thread's CPU time of ``schedule()`` and ``update_from_output()`` for 256 running
requests. Three schedulers run in turn: "vLLM" has vLLM's manager; "control" has vLLM's manager with
an early return if a request needs no new block; "kvcore" has kvcore's manager. In the rows with
replacement, each step also ends one request and adds a request with an unseen or a cached prompt;
the time covers this also. The bench needs torch, vLLM's sources (from the folder that
``KVCORE_VLLM_SOURCE`` names, or else from the package index) and the libraries that
``tests/integrations/run_vllm.py --libraries`` installs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from time import thread_time_ns
from typing import Any

from harness import Row, main, make_row, plain_row, undisturbed

PAGE = 16
RUNNING = 256
CONTEXTS = (1024, 8192, 32_768)
ROOT = Path(__file__).resolve().parents[1]
ENGINES = ROOT / "tests" / "engines"
SOURCES = ROOT / "build" / "vllm"
names = count()


def prepare() -> None:
    """Set up vLLM, stubs of its kernels, and the model configs of its tests."""
    sys.path.insert(0, str(ENGINES))
    import vllm_models
    import vllm_sources
    import vllm_stubs  # noqa: F401

    given = os.environ.get("KVCORE_VLLM_SOURCE")
    sys.path.insert(0, given or str(vllm_sources.unpacked(SOURCES)))
    hub = Path(tempfile.mkdtemp()) / "hub"
    vllm_models.write_hub(hub)
    os.environ |= {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    vllm_models.describe_models()


def window_groups(windows: int, window: int, *, has_full: bool) -> list[Any]:
    """Return vLLM's cache groups of a small model: full attention, and sliding windows."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    common: dict[str, Any] = {
        "block_size": PAGE, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float16
    }  # fmt: skip
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**common))] if has_full else []
    for index in range(windows):
        spec = SlidingWindowSpec(sliding_window=window, **common)
        groups.append(KVCacheGroupSpec([f"window {index}"], spec))
    return groups


def with_early_return(manager: Any) -> Any:
    """Let vLLM's manager return early while the blocks of a running request suffice."""
    from vllm.v1.request import RequestStatus

    allocate = manager.allocate_slots
    (single,) = manager.coordinator.single_type_managers
    rows, cached, running = single.req_to_blocks, single.num_cached_block, RequestStatus.RUNNING

    def allocate_slots(request: Any, num_new_tokens: int, **more: Any) -> Any:
        name = request.request_id
        end = request.num_computed_tokens + num_new_tokens
        if (
            request.status is running
            and end + more.get("num_lookahead_tokens", 0) <= len(rows[name]) * PAGE
            and end // PAGE <= cached[name]
        ):
            return manager.empty_kv_cache_blocks
        return allocate(request, num_new_tokens, **more)

    manager.allocate_slots = allocate_slots
    return manager


class Side:
    """A scheduler with its running requests."""

    def __init__(self, who: str, context: int, running: int) -> None:
        from tests.v1.core import utils  # type: ignore[import-not-found]
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched import scheduler

        from kvcore.integrations.vllm import choice

        makers = {"vLLM": KVCacheManager, "kvcore": choice.make_manager}
        makers["control"] = lambda *a, **k: with_early_return(KVCacheManager(*a, **k))
        scheduler.KVCacheManager = makers[who]
        init_none_hash(sha256)
        self.who, self.context, self.tokens = who, context, list(range(1000, 1000 + context + PAGE))
        self.engine = utils.create_scheduler(
            model="Qwen/Qwen3-0.6B",
            max_num_seqs=running + 1,
            max_num_batched_tokens=(running + 1) * (context + 2 * PAGE),
            max_model_len=40_960,
            enable_prefix_caching=True,
            num_blocks=(running + 8) * (context // PAGE + 32),
        )
        hasher = choice.lazily_hashed if who == "kvcore" else get_request_block_hasher
        self.hasher = hasher(PAGE, sha256)
        self.names: list[str] = []
        for i in range(running):
            self.add(i, i % PAGE)
        self.step()

    def add(self, first: int, more: int = 0) -> None:
        """Add a request; its prompt begins with token 100,000 + ``first``."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        prompt = [100_000 + first, *self.tokens[: self.context + more - 1]]
        name = str(next(names))
        self.names.append(name)
        sampling = SamplingParams(ignore_eos=True, max_tokens=100_000)
        self.engine.add_request(
            Request(name, prompt, sampling, None, block_hasher=self.hasher, arrival_time=0.0)
        )

    def step(self) -> float:
        """Schedule, and apply the output of a fake model; return us of CPU time."""
        from vllm.v1.outputs import ModelRunnerOutput

        start = thread_time_ns()
        output = self.engine.schedule()
        spent = thread_time_ns() - start
        ran = list(output.num_scheduled_tokens)
        answer = ModelRunnerOutput(
            req_ids=ran,
            req_id_to_index={name: i for i, name in enumerate(ran)},
            sampled_token_ids=[[11]] * len(ran),
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        start = thread_time_ns()
        self.engine.update_from_output(output, answer)
        return (spent + thread_time_ns() - start) / 1e3

    def replace(self, first: int) -> float:
        """End the oldest request, add a new request, and run a step; return us of CPU time."""
        from vllm.v1.request import RequestStatus

        start = thread_time_ns()
        self.engine.finish_requests(self.names.pop(0), RequestStatus.FINISHED_ABORTED)
        self.add(first)
        spent = (thread_time_ns() - start) / 1e3
        return spent + self.step()


def by_turns(
    sides: list[Side], call: Callable[[Side], float], rounds: int
) -> dict[str, list[float]]:
    """Time a call on each side in turn; the first two rounds are not counted."""
    for _ in range(2):
        for side in sides:
            call(side)
    parts = [lambda: [(side.who, call(side)) for side in sides]] * rounds
    samples: dict[str, list[float]] = {side.who: [] for side in sides}
    for who, spent in undisturbed(parts):
        samples[who].append(spent)
    return samples


def rows_of(key: str, work: str, samples: dict[str, list[float]], limit: str) -> list[Row]:
    """Make a row for each side; the limit of kvcore's row is the median of the side `limit`."""
    rows = []
    for who, found in samples.items():
        more = {"limit": median(samples[limit]), "limit_name": limit} if who == "kvcore" else {}
        rows.append(make_row(f"vllm.{key}.{who.lower()}", f"{work}: {who}", found, **more))
    return rows


def measure(options: Namespace) -> list[Row]:
    """Measure decode steps, and steps with a replaced request."""
    prepare()
    running, rounds = (16, 6) if options.quick else (RUNNING, 96)
    rows: list[Row] = []
    for context in CONTEXTS[:2] if options.quick else CONTEXTS:
        sides = [Side(who, context, running) for who in ("vLLM", "control", "kvcore")]
        steps = by_turns(sides, Side.step, rounds)
        rows += rows_of(f"decode.{context}", f"decode, {context:,} tokens", steps, "control")
        fresh = dict.fromkeys(("vLLM", "control", "kvcore"), 1_000_000)

        def unseen(side: Side, fresh: dict[str, int] = fresh) -> float:
            fresh[side.who] += 1
            return side.replace(fresh[side.who])

        few = max(rounds // 4, 3)
        for key, call in (("unseen", unseen), ("hit", lambda side: side.replace(1_000_001))):
            spent = by_turns(sides, call, few)
            rows += rows_of(f"{key}.{context}", f"one {key} per step, {context:,}", spent, "vLLM")
    medians = {row.key: row.median for row in rows}
    last = CONTEXTS[1] if options.quick else CONTEXTS[-1]
    flat = medians[f"vllm.decode.{last}.kvcore"] / medians[f"vllm.decode.{CONTEXTS[0]}.kvcore"]
    return [*rows, plain_row("vllm.decode.flat", f"decode, {last:,} / 1,024 tokens", flat, "x")]


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
