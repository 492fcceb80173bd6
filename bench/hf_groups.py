# SPDX-License-Identifier: Apache-2.0
"""Ask what groups save where layers have windows, and what they cost, beside the flat cache.

A model in the shape of Gemma 3 with random weights in f32: 26 layers, of which every sixth reads
everything and the others a window of 512 tokens, page 16. 8 prompts of 4,096 tokens, 4 of them
behind each of two prefixes of 2,048, 64 new tokens of each, in forwards of 512 tokens. With groups
and flat take turns in every round and must answer the same tokens; a pool is empty when a round
begins. ``--quick`` runs one round of short prompts.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers

from harness import Row, main, plain_row
from kvcore import KVCacheParams
from kvcore.cli.held_pages import WatchedManager
from kvcore.integrations.transformers import cache_params, generate

_PAGE = 16
_VOCABULARY = 2048
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
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=_VOCABULARY,
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
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.Gemma3ForCausalLM(config).eval()


def _prompts(size: _Size) -> list[list[int]]:
    numbers = np.random.default_rng(1)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = numbers.integers(1, _VOCABULARY, count).tolist()
        return drawn

    prefixes = [tokens(size.shared) for _ in range(2)]
    return [prefixes[i % 2] + tokens(size.tokens - size.shared) for i in range(size.prompts)]


@dataclass
class _Way:
    """Generate in pages of one kind, and note times and what is held."""

    model: Any
    prompts: list[list[int]]
    size: _Size
    params: KVCacheParams
    seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    manager: WatchedManager | None = None

    def run(self) -> list[list[int]]:
        """Generate in an empty pool with room for the longest prompts, flat."""
        tokens = self.size.prompts * (self.size.tokens + self.size.new)
        flat_bytes = cache_params(self.model, _PAGE, groups=False).bytes_per_token * tokens
        self.manager = WatchedManager(
            self.params, self.size.prompts, 8192, available_cache_memory=2 * flat_bytes
        )
        marks: list[tuple[float, int]] = []
        start = perf_counter()
        results = generate(
            self.model,
            self.prompts,
            manager=self.manager,
            max_new_tokens=self.size.new,
            max_batch_tokens=_FORWARD,
            progress=lambda _, generated: marks.append((perf_counter(), generated)),
        )
        self.seconds.append(marks[-1][0] - start)
        steps = [
            later - time
            for (time, done), (later, more) in pairwise(marks)
            if more - done == self.size.prompts
        ]
        self.step_seconds.append(statistics.median(steps))
        return [result.token_ids for result in results]

    @property
    def peak_pages(self) -> int:
        """Pages that were held at most."""
        assert self.manager is not None
        return self.manager.metrics.peak_used_pages

    @property
    def peak_bytes(self) -> int:
        """Their bytes, which is the pool that the run needs."""
        return self.peak_pages * self.params.bytes_per_page


def _rate_rows(ways: dict[str, _Way], size: _Size) -> list[Row]:
    total = size.prompts * (size.tokens + size.new)
    label = f"{size.prompts} prompts of {size.tokens:,} tokens"
    whole = {name: [total / s for s in way.seconds] for name, way in ways.items()}
    steps = {name: [size.prompts / s for s in way.step_seconds] for name, way in ways.items()}
    rows = []
    for key, work, rates in (
        ("all", f"tokens of prompts and answers, {label}", whole),
        ("decode", f"tokens of steps without prompts, {size.prompts} rows", steps),
    ):
        flat = statistics.median(rates["flat"])
        for name, found in rates.items():
            more = {"limit": flat, "limit_name": "flat"} if name != "flat" else {}
            rows.append(
                plain_row(
                    f"hf_groups.{key}.{name.split()[-1]}",
                    f"{name}: {work}",
                    statistics.median(found),
                    "tokens/s",
                    n=len(found),
                    note=f"best {max(found):,.0f}",
                    **more,
                )
            )
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
    assert grouped.manager is not None
    for group in grouped.manager.groups_held():
        kept = "full" if group["window"] is None else f"with a window of {group['window']}"
        share = flat.peak_bytes * group["layers"] / _LAYERS / 2**20
        rows.append(
            plain_row(
                f"hf_groups.bytes.{'full' if group['window'] is None else 'window'}",
                f"with groups: of this, {group['layers']} layers {kept}",
                group["bytes"] / 2**20,
                "MiB",
                limit=share,
                limit_name="these layers, flat",
                note=f"{group['pages']:,} pages in {group['page_tables']} tables, "
                f"{group['given_back']:,} given back",
            )
        )
    return rows


def measure(options: Namespace) -> list[Row]:
    """Measure memory and speed of both ways."""
    size = _QUICK if options.quick else _FULL
    model, prompts = _model(), _prompts(size)
    ways = {
        name: _Way(model, prompts, size, cache_params(model, _PAGE, groups=name != "flat"))
        for name in _NAMES
    }
    expected: list[list[int]] = []
    for _ in range(size.rounds):
        for name, way in ways.items():
            answers = way.run()
            expected = expected or answers
            if answers != expected:
                raise AssertionError(f"{name}: other tokens than in the run before")
    return _memory_rows(*ways.values()) + _rate_rows(ways, size)


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
