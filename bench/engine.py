# SPDX-License-Identifier: Apache-2.0
"""Compare the decode rate of examples/mini_engine with ``generate`` on the same model.

The model is a Llama of 11 million parameters in f32 with 4 heads. The prompts are the prompts of
``generate.py``. One thread computes in each process. The time runs from the step in which the last
prompt gets its first token to the end. All ways run in turn in every round and must generate the
same tokens. ``--quick`` runs one round of fewer prompts.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from generation import PAGE, Answers, in_turns, random_tokens, small_llama
from harness import Row, main, plain_row
from kvcore import PagedKVCacheManager
from kvcore.apps.demo.blas import one_blas_thread
from kvcore.integrations.transformers import cache_params, generate
from mini_engine.engine import Engine

_BATCH_TOKENS = 512

Way = Callable[["_Decode"], None]


class _Decode:
    """Receive tokens; measure the rate after every sequence has its first token."""

    def __init__(self, sequences: int) -> None:
        self.answers: Answers = [[] for _ in range(sequences)]
        self._to_begin = sequences
        self._start = 0.0
        self._tokens = 0

    def __call__(self, index: int, token: int) -> None:
        self._to_begin -= not self.answers[index]
        self.answers[index].append(token)
        if self._to_begin or not self._start:
            self._start = perf_counter()
        else:
            self._tokens += 1

    def rate(self) -> float:
        return self._tokens / (perf_counter() - self._start)


def _with_engine(engine: Engine, prompts: Answers, new: int) -> Way:
    def way(decode: _Decode) -> None:
        engine.manager.reset_prefix_cache()
        first = min([engine.add(prompt, new) for prompt in prompts])
        for token in engine.stream():
            decode(token.sequence[0] - first, token.token)

    return way


def _with_transformers(model: Any, prompts: Answers, new: int) -> Way:
    manager = PagedKVCacheManager(cache_params(model, PAGE), 32, 512, num_pages=512)

    def way(decode: _Decode) -> None:
        manager.reset_prefix_cache()
        generate(
            model,
            prompts,
            manager=manager,
            max_new_tokens=new,
            max_batch_tokens=_BATCH_TOKENS,
            stream=decode,
        )

    return way


def _rates(ways: dict[str, Way], sequences: int, rounds: int) -> dict[str, list[float]]:
    """Return the tokens per second of each way in each round, except a first warm-up round."""
    rates: dict[str, list[float]] = {name: [] for name in ways}

    def measured(name: str, way: Way) -> Answers:
        decode = _Decode(sequences)
        way(decode)
        rates[name].append(decode.rate())
        return decode.answers

    turns = {name: (lambda n=name, w=way: measured(n, w)) for name, way in ways.items()}
    in_turns(turns, rounds + 1)
    return {name: found[1:] for name, found in rates.items()}


def _row(name: str, work: str, rates: list[float], own: float) -> Row:
    best = f"best {max(rates):,.0f}"
    return plain_row(
        f"engine.{name}",
        work,
        statistics.median(rates),
        "tokens/s",
        n=len(rates),
        note=best,
        limit=own,
        limit_name="transformers over kvcore",
    )


def measure(options: Namespace) -> list[Row]:
    """Measure the example in one process and in three, and transformers over kvcore."""
    count, new, rounds = (4, 16, 1) if options.quick else (16, 64, 7)
    torch.set_num_threads(1)
    model = small_llama(heads=4)
    lengths = np.linspace(16, 100, count).astype(int)
    prompts = [random_tokens(model, n, i) for i, n in enumerate(lengths)]
    works = {
        "transformers": "generate of kvcore.integrations.transformers",
        "one_process": "mini_engine in one process",
        "two_workers": "mini_engine, scheduler and two workers",
    }
    with tempfile.TemporaryDirectory() as name, one_blas_thread():
        folder = Path(name)
        model.save_pretrained(folder)
        sizes = {"page_size": PAGE, "max_batch_tokens": _BATCH_TOKENS}
        with (
            closing(Engine(folder, **sizes)) as alone,
            closing(Engine(folder, workers=2, **sizes)) as three,
        ):
            ways = {
                "transformers": _with_transformers(model, prompts, new),
                "one_process": _with_engine(alone, prompts, new),
                "two_workers": _with_engine(three, prompts, new),
            }
            rates = _rates(ways, count, rounds)
    own = statistics.median(rates["transformers"])
    label = f"decode of {count} prompts, {new} tokens each"
    return [_row(key, f"{label}, {works[key]}", found, own) for key, found in rates.items()]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
