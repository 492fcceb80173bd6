# SPDX-License-Identifier: Apache-2.0
"""Ask how fast a model of transformers generates over pages, beside its own ways, in one run.

A Llama of 11 million parameters in f32 with random weights, 16 prompts of 16 to 100 tokens, 64 new
tokens of each, page 16, as many threads as torch takes. The ways take turns in every round, so that
a machine that slows down slows all of them, and must answer the same tokens. Then chats of several
turns behind one system prompt, with and without the prefix cache: the time to the first token of a
turn. ``--quick`` runs one round of small ones.
"""

from __future__ import annotations

import logging
import statistics
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers

from harness import Row, main, plain_row
from kvcore import PagedKVCacheManager
from kvcore.integrations.transformers import cache_params, generate

_PAGE = 16
_VOCABULARY = 4096


@dataclass(frozen=True)
class _Size:
    prompts: int
    new: int
    rounds: int
    system: int
    turns: int


_FULL = _Size(prompts=16, new=64, rounds=7, system=512, turns=4)
_QUICK = _Size(prompts=4, new=16, rounds=1, system=64, turns=2)


def _model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=320,
        intermediate_size=896,
        num_hidden_layers=8,
        num_attention_heads=5,
        num_key_value_heads=5,
        max_position_embeddings=4096,
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def _tokens(count: int, seed: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(1, _VOCABULARY, count).tolist()
    return drawn


class _Ways:
    """Generate the same tokens in different ways."""

    def __init__(self, model: Any, size: _Size) -> None:
        self.model = model
        lengths = np.linspace(16, 100, size.prompts).astype(int)
        self.prompts = [_tokens(n, i) for i, n in enumerate(lengths)]
        self.new = size.new
        self.manager = PagedKVCacheManager(
            cache_params(model, _PAGE), size.prompts, 512, num_pages=size.prompts * 16
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

    def kvcore(self) -> list[list[int]]:
        self.manager.reset_prefix_cache()
        return self.kvcore_again()

    def kvcore_again(self) -> list[list[int]]:
        """Over the prefixes that the call before has left."""
        results = generate(self.model, self.prompts, manager=self.manager, max_new_tokens=self.new)
        return [result.token_ids for result in results]

    def padded(self) -> list[list[int]]:
        longest = max(map(len, self.prompts))
        return self._generate([[0] * (longest - len(p)) + p for p in self.prompts])

    def one_by_one(self) -> list[list[int]]:
        return [self._generate([p])[0] for p in self.prompts]

    def _generate(self, rows: list[list[int]]) -> list[list[int]]:
        ids = torch.tensor(rows)
        whole = self.model.generate(
            ids,
            attention_mask=(ids != 0).long(),
            max_new_tokens=self.new,
            do_sample=False,
            pad_token_id=0,
        )
        answers: list[list[int]] = whole[:, ids.shape[1] :].tolist()
        return answers

    def generate_batch(self) -> list[list[int]]:
        pages = sum(-(-(len(p) + self.new) // _PAGE) for p in self.prompts)
        answers = self.model.generate_batch(
            inputs=self.prompts,
            generation_config=transformers.GenerationConfig(
                max_new_tokens=self.new, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                page_size=_PAGE, num_blocks=2 * pages, max_batch_tokens=2048
            ),
            progress_bar=False,
        )
        by_prompt = {tuple(a.prompt_ids): list(a.generated_tokens) for a in answers.values()}
        return [by_prompt[tuple(p)] for p in self.prompts]


def _seconds(way: Callable[[], list[list[int]]], expected: list[list[int]]) -> float:
    start = perf_counter()
    answers = way()
    seconds = perf_counter() - start
    if answers != expected:
        raise AssertionError(f"{way.__name__} generates other tokens")
    return seconds


def _throughput(ways: _Ways, size: _Size) -> list[Row]:
    """Time every way in every round, and what a step takes outside the model."""
    order = (ways.kvcore, ways.kvcore_again, ways.padded, ways.generate_batch, ways.one_by_one)
    spent: dict[str, list[float]] = {way.__name__: [] for way in order}
    outside = []
    expected = ways.padded()
    for _ in range(size.rounds):
        for way in order:
            ways.forward_seconds = 0.0
            seconds = _seconds(way, expected)
            spent[way.__name__].append(seconds)
            if way is order[0]:
                outside.append(100 * (1 - ways.forward_seconds / seconds))
    count = size.prompts * size.new
    label = f"{size.prompts} prompts x {size.new} tokens, page {_PAGE}"
    own = count / statistics.median(spent["kvcore"])
    rows = [
        _rates(f"generate.{name}", f"{name}, {label}", [count / s for s in found], own)
        for name, found in spent.items()
    ]
    share = statistics.median(outside)
    return [*rows, plain_row("generate.outside", "outside the model, of kvcore's time", share, "%")]


def _rates(key: str, work: str, found: list[float], own: float) -> Row:
    """Build a row of rates beside that of kvcore in the same run."""
    return plain_row(
        key,
        work,
        statistics.median(found),
        "tokens/s",
        n=len(found),
        limit=own,
        limit_name="kvcore",
        note=f"best {max(found):.0f}",
    )


def _memory(ways: _Ways) -> list[Row]:
    """Compare the K and V that kvcore held at most with those of the padded batch."""
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
    params = cache_params(model, _PAGE, enable_prefix_caching=caching)
    manager = PagedKVCacheManager(params, 4, 4096, num_pages=1024)
    chats = [_tokens(size.system, 99) for _ in range(4)]
    rows = []
    for turn in range(size.turns):
        waits, hits, asked = [], 0, 0
        for i, chat in enumerate(chats):
            chat += _tokens(40, 1000 + 10 * turn + i)
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
    logging.disable(logging.ERROR)  # of transformers' own batching, at every call
    size = _QUICK if options.quick else _FULL
    model = _model()
    ways = _Ways(model, size)
    rows = _throughput(ways, size) + _memory(ways)
    return rows + _chats(model, size, caching=True) + _chats(model, size, caching=False)


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
