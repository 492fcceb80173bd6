# SPDX-License-Identifier: Apache-2.0
"""Compare how fast a model of transformers generates over kvcore's pages and in its own ways.

The model is a Llama of 11 million parameters in f32 with random weights. 16 prompts of 16 to 100
tokens get 64 new tokens each, with page size 16 and torch's default number of threads. The ways run
in turn in every round, so a slow moment of the machine slows all ways. They must generate the same
tokens. Further rows measure the time to the first token of each turn of chats after one system
prompt, with and without the prefix cache. ``--quick`` runs one round of small sizes.
"""

from __future__ import annotations

import logging
import statistics
from argparse import Namespace
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers

from generation import PAGE, Answers, in_turns, random_tokens, rate_row, small_llama
from harness import Row, main, plain_row
from kvcore import PagedKVCacheManager
from kvcore.integrations.transformers import cache_params, generate


@dataclass(frozen=True)
class _Size:
    prompts: int
    new: int
    rounds: int
    system: int
    turns: int


_FULL = _Size(prompts=16, new=64, rounds=7, system=512, turns=4)
_QUICK = _Size(prompts=4, new=16, rounds=1, system=64, turns=2)


class _Ways:
    """Generate the same tokens in different ways."""

    def __init__(self, model: Any, size: _Size) -> None:
        self.model = model
        lengths = np.linspace(16, 100, size.prompts).astype(int)
        self.prompts = [random_tokens(model, n, i) for i, n in enumerate(lengths)]
        self.new = size.new
        self.manager = PagedKVCacheManager(
            cache_params(model, PAGE), size.prompts, 512, num_pages=size.prompts * 16
        )
        self.forward_seconds = 0.0
        self._watch_forwards()

    def _watch_forwards(self) -> None:
        started = [0.0]

        def before(*_: Any) -> None:
            started[0] = perf_counter()

        def after(*_: Any) -> None:
            self.forward_seconds += perf_counter() - started[0]

        self.model.register_forward_pre_hook(before)
        self.model.register_forward_hook(after)

    def kvcore(self) -> Answers:
        self.manager.reset_prefix_cache()
        return self.kvcore_again()

    def kvcore_again(self) -> Answers:
        """Generate with the prefixes that the previous call cached."""
        results = generate(self.model, self.prompts, manager=self.manager, max_new_tokens=self.new)
        return [result.token_ids for result in results]

    def padded(self) -> Answers:
        longest = max(map(len, self.prompts))
        return self._generate([[0] * (longest - len(p)) + p for p in self.prompts])

    def one_by_one(self) -> Answers:
        return [self._generate([p])[0] for p in self.prompts]

    def _generate(self, rows: list[list[int]]) -> Answers:
        ids = torch.tensor(rows)
        whole = self.model.generate(
            ids,
            attention_mask=(ids != 0).long(),
            max_new_tokens=self.new,
            do_sample=False,
            pad_token_id=0,
        )
        answers: Answers = whole[:, ids.shape[1] :].tolist()
        return answers

    def generate_batch(self) -> Answers:
        pages = sum(-(-(len(p) + self.new) // PAGE) for p in self.prompts)
        answers = self.model.generate_batch(
            inputs=self.prompts,
            generation_config=transformers.GenerationConfig(
                max_new_tokens=self.new, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=2 * pages, max_batch_tokens=2048
            ),
            progress_bar=False,
        )
        by_prompt = {tuple(a.prompt_ids): list(a.generated_tokens) for a in answers.values()}
        return [by_prompt[tuple(p)] for p in self.prompts]


def _throughput(ways: _Ways, size: _Size) -> list[Row]:
    """Time every way in every round, and the share of kvcore's time outside the model."""
    inside: list[float] = []

    def kvcore() -> Answers:
        ways.forward_seconds = 0.0
        answers = ways.kvcore()
        inside.append(ways.forward_seconds)
        return answers

    order = {
        "kvcore": kvcore,
        "kvcore_again": ways.kvcore_again,
        "padded": ways.padded,
        "generate_batch": ways.generate_batch,
        "one_by_one": ways.one_by_one,
    }
    ways.padded()  # the first forwards of a model are slower
    spent = in_turns(order, size.rounds)
    count = size.prompts * size.new
    label = f"{size.prompts} prompts x {size.new} tokens, page {PAGE}"
    own = statistics.median(count / each for each in spent["kvcore"])
    rows = [
        rate_row(
            f"generate.{name}", f"{name}, {label}", count, found, limit=own, limit_name="kvcore"
        )
        for name, found in spent.items()
    ]
    outside = [100 * (1 - a / b) for a, b in zip(inside, spent["kvcore"], strict=True)]
    share = statistics.median(outside)
    return [*rows, plain_row("generate.outside", "outside the model, of kvcore's time", share, "%")]


def _memory(ways: _Ways) -> list[Row]:
    """Compare kvcore's peak memory for K and V with the memory of the padded batch."""
    ways.manager.reset_prefix_cache()
    ways.manager.reset_metrics()
    ways.kvcore()
    params = ways.manager.params
    held = ways.manager.metrics.peak_used_pages * params.bytes_per_page
    longest = max(map(len, ways.prompts)) + ways.new - 1
    padded = len(ways.prompts) * longest * params.bytes_per_token
    return [
        plain_row(
            "generate.memory",
            "K and V held at most",
            held / 2**20,
            "MiB",
            limit=padded / 2**20,
            limit_name="padded batch",
        ),
    ]


def _chats(model: Any, size: _Size, *, caching: bool) -> list[Row]:
    """Time the first token of each turn of chats that share a system prompt."""
    params = cache_params(model, PAGE, enable_prefix_caching=caching)
    manager = PagedKVCacheManager(params, 4, 4096, num_pages=1024)
    chats = [random_tokens(model, size.system, 99) for _ in range(4)]
    rows = []
    for turn in range(size.turns):
        waits, hits, asked = [], 0, 0
        for i, chat in enumerate(chats):
            chat += random_tokens(model, 40, 1000 + 10 * turn + i)
            marks: list[float] = []
            start = perf_counter()
            (answer,) = generate(
                model,
                [chat],
                manager=manager,
                max_new_tokens=24,
                stream=lambda *_, marks=marks: marks.append(perf_counter()),
            )
            waits.append(1e3 * (marks[0] - start))
            hits, asked = hits + answer.cached_tokens, asked + len(chat)
            chat += answer.token_ids
        name = "cached" if caching else "not cached"
        work = f"first token, turn {turn + 1}, {name}: {100 * hits // asked} % hit"
        rows.append(
            plain_row(f"generate.first.{name}.{turn}", work, statistics.median(waits), "ms")
        )
    return rows


def measure(options: Namespace) -> list[Row]:
    """Measure throughput, memory, and the first token of chats."""
    logging.disable(logging.ERROR)  # transformers' own batching logs at every call
    size = _QUICK if options.quick else _FULL
    model = small_llama()
    ways = _Ways(model, size)
    rows = _throughput(ways, size) + _memory(ways)
    return rows + _chats(model, size, caching=True) + _chats(model, size, caching=False)


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
