# SPDX-License-Identifier: Apache-2.0
"""Compare memory and speed of a cache with groups of layers and of the flat cache.

The model has the shape of Gemma 3 and random weights in f32. It has 26 layers: every sixth layer
has full attention, the other layers have a window of 512 tokens. The page size is 16. 8 prompts of
4,096 tokens get 64 new tokens each; 4 prompts begin with each of two prefixes of 2,048 tokens. A
forward has at most 512 tokens. The two caches run in turn in every round and must generate the same
tokens. The pool is empty at the start of a round. A separate run, which is not timed, counts the
pages that each group holds. ``--quick`` runs one round of short prompts.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, TypeVar

from generation import PAGE, Answers, in_turns, random_model, random_tokens, rate_row
from harness import Row, main, plain_row
from kvcore import PagedKVCacheManager
from kvcore.apps.cli.held_pages import WatchedManager
from kvcore.integrations.transformers import cache_params, generate

_Manager = TypeVar("_Manager", bound=PagedKVCacheManager)

_WINDOW = 512
_LAYERS = 26
_FORWARD = 512  # tokens
_NAMES = ("with groups", "flat")


@dataclass(frozen=True)
class _Size:
    prompts: int
    tokens: int
    shared: int
    new: int
    rounds: int


_FULL = _Size(prompts=8, tokens=4096, shared=2048, new=64, rounds=2)
_QUICK = _Size(prompts=4, tokens=1280, shared=640, new=16, rounds=1)


def _model() -> Any:
    return random_model(
        "Gemma3Text",
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=_WINDOW,
        layer_types=[
            "full_attention" if i % 6 == 5 else "sliding_attention" for i in range(_LAYERS)
        ],
        max_position_embeddings=8192,
        query_pre_attn_scalar=32,
    )


def _prompts(model: Any, size: _Size) -> Answers:
    prefixes = [random_tokens(model, size.shared, i) for i in range(2)]
    rest = size.tokens - size.shared
    return [prefixes[i % 2] + random_tokens(model, rest, 2 + i) for i in range(size.prompts)]


class _Way:
    """Generate with or without groups, in a pool with room for all prompts without groups."""

    def __init__(self, model: Any, prompts: Answers, size: _Size, *, groups: bool) -> None:
        self.model, self.prompts, self.size = model, prompts, size
        self.params = cache_params(model, PAGE, groups=groups)
        flat = cache_params(model, PAGE, groups=False).bytes_per_token
        self._memory = 2 * flat * size.prompts * (size.tokens + size.new)
        self._manager = self._made(PagedKVCacheManager)
        self.step_seconds: list[float] = []

    def _made(self, kind: type[_Manager]) -> _Manager:
        return kind(self.params, self.size.prompts, 8192, available_cache_memory=self._memory)

    def run(self) -> Answers:
        """Generate in an empty pool, and record the median time of a step without prompts."""
        self._manager.reset_prefix_cache()
        marks: list[tuple[float, int]] = []
        answers = self._generate(
            self._manager, lambda _, generated: marks.append((perf_counter(), generated))
        )
        steps = [
            later - time
            for (time, done), (later, more) in pairwise(marks)
            if more - done == self.size.prompts
        ]
        self.step_seconds.append(statistics.median(steps))
        return answers

    def watched(self) -> WatchedManager:
        """Generate with a slower manager that records the pages of each group."""
        manager = self._made(WatchedManager)
        self._generate(manager)
        return manager

    def _generate(
        self, manager: PagedKVCacheManager, progress: Callable[[int, int], None] | bool = False
    ) -> Answers:
        results = generate(
            self.model,
            self.prompts,
            manager=manager,
            max_new_tokens=self.size.new,
            max_batch_tokens=_FORWARD,
            progress=progress,
        )
        return [result.token_ids for result in results]

    @property
    def peak_pages(self) -> int:
        """The maximum number of held pages."""
        return self._manager.metrics.peak_used_pages

    @property
    def peak_bytes(self) -> int:
        """The bytes of the peak pages: the pool that the run needs."""
        return self.peak_pages * self.params.bytes_per_page


def _rate_rows(ways: dict[str, _Way], seconds: dict[str, list[float]], size: _Size) -> list[Row]:
    total = size.prompts * (size.tokens + size.new)
    label = f"{size.prompts} prompts of {size.tokens:,} tokens"
    steps = {name: way.step_seconds for name, way in ways.items()}
    rows = []
    for key, work, tokens, spent in (
        ("all", f"tokens of prompts and answers, {label}", total, seconds),
        ("decode", f"tokens of steps without prompts, {size.prompts} rows", size.prompts, steps),
    ):
        flat = statistics.median(tokens / each for each in spent["flat"])
        for name, found in spent.items():
            more = {"limit": flat, "limit_name": "flat"} if name != "flat" else {}
            key_of = f"hf_groups.{key}.{name.split()[-1]}"
            rows.append(rate_row(key_of, f"{name}: {work}", tokens, found, **more))
    return rows


def _memory_rows(grouped: _Way, flat: _Way) -> list[Row]:
    rows = [
        plain_row(
            "hf_groups.bytes.groups",
            "with groups: K and V held at most",
            grouped.peak_bytes / 2**20,
            "MiB",
            limit=flat.peak_bytes / 2**20,
            limit_name="flat",
            note=f"{grouped.peak_pages:,} pages of {grouped.params.bytes_per_page:,} B",
        ),
        plain_row(
            "hf_groups.bytes.flat",
            "flat: K and V held at most",
            flat.peak_bytes / 2**20,
            "MiB",
            note=f"{flat.peak_pages:,} pages of {flat.params.bytes_per_page:,} B",
        ),
    ]
    for group in grouped.watched().groups_held():
        kept = "full" if group["keeps"] is None else f"with a window of {group['keeps']}"
        share = flat.peak_bytes * group["layers"] / _LAYERS / 2**20
        rows.append(
            plain_row(
                f"hf_groups.bytes.{group['kind']}",
                f"with groups: of this, {group['layers']} layers {kept}",
                group["bytes"] / 2**20,
                "MiB",
                limit=share,
                limit_name="these layers, flat",
                note=f"{group['pages']:,} pages in {group['bundles']} tables, "
                f"{group['given_back']:,} given back",
            )
        )
    return rows


def measure(options: Namespace) -> list[Row]:
    """Measure memory and speed of both caches."""
    size = _QUICK if options.quick else _FULL
    model = _model()
    prompts = _prompts(model, size)
    ways = {name: _Way(model, prompts, size, groups=name != "flat") for name in _NAMES}
    seconds = in_turns({name: way.run for name, way in ways.items()}, size.rounds)
    return _memory_rows(*ways.values()) + _rate_rows(ways, seconds, size)


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
