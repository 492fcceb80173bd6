# SPDX-License-Identifier: Apache-2.0
"""Compare calls that move very few bytes with numpy's arrays and with torch's tensors.

Two rows decode a token each: 4 query heads and 2 K/V heads of 64 float32, pages of 16 tokens. The
libraries run in turn, so that a slow moment slows both. The limit of torch's row is the same call
with numpy's arrays. The rows "fetched" decode a token of one request in the pool of a manager, with
the inputs of a fetch; the row "fetched step" includes the fetch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import kvcore
from harness import Row, main, make_row, time_calls, undisturbed
from kvcore import ops

_CALLS = 200
_LAYERS = 8
_PAGES, _PAGE, _HEADS, _DIM = 16, 16, 2, 64
_LENGTHS = (20, 40)


def _numpy(array: Any) -> Any:
    return array


class _Scene:
    """The arrays of a step and the pools of all layers, in one library."""

    def __init__(self, library: Callable[[Any], Any]) -> None:
        rng = np.random.default_rng(3)

        def made(*shape: int) -> Any:
            return library(rng.normal(size=shape).astype(np.float32))

        rows = len(_LENGTHS)
        pools = [[made(_PAGES, _PAGE, _HEADS, _DIM) for _ in range(_LAYERS)] for _ in range(2)]
        self.q, self.out = made(rows, 2 * _HEADS, _DIM), made(rows, 2 * _HEADS, _DIM)
        self.k, self.v = made(rows, _HEADS, _DIM), made(rows, _HEADS, _DIM)
        self.table = library(np.arange(rows * 4, dtype=np.uint32).reshape(rows, 4))
        self.lengths = library(np.array(_LENGTHS, np.uint32))
        self.offsets = library(np.arange(rows + 1, dtype=np.uint32))
        params = kvcore.KVCacheParams("float32", _HEADS, _DIM, _LAYERS, page_size=_PAGE)
        keys, values = pools
        self.model = kvcore.PagedBatch(keys, values, self.table, self.lengths, params=params)
        self.batch = kvcore.PagedBatch(keys[0], values[0], self.table, self.lengths)
        self.manager = kvcore.PagedKVCacheManager(params, 1, 64, num_pages=_PAGES)
        self.manager.claim("a")
        self.contexts = [kvcore.TextGenerationContext("a", [1])]
        (self.inputs,) = self.manager.fetch(self.contexts)
        self.one = tuple(array[:1] for array in (self.q, self.k, self.v))
        self.ends = self.offsets[:2]

    def attention(self, _: object) -> None:
        """Call attention; it returns a new array."""
        ops.attention(self.batch, 0, self.q, self.offsets)

    def attention_out(self, _: object) -> None:
        """Call attention; it writes to an existing array."""
        ops.attention(self.batch, 0, self.q, self.offsets, out=self.out)

    def append(self, _: object) -> None:
        """Append a token of each row."""
        ops.append(self.batch, 0, self.k, self.v, self.offsets)

    def fetched_append(self, _: object) -> None:
        """Append a token of one request of a manager."""
        ops.append(self.inputs, 0, self.one[1], self.one[2], self.ends)

    def fetched_attention(self, _: object) -> None:
        """Attend to one token of a request of a manager."""
        ops.attention(self.inputs, 0, self.one[0], self.ends)

    def fetched_step(self, _: object) -> None:
        """Fetch, and run append and attention in all layers."""
        (inputs,) = self.manager.fetch(self.contexts)
        q, k, v = self.one
        for layer in range(_LAYERS):
            ops.append(inputs, layer, k, v, self.ends)
            ops.attention(inputs, layer, q, self.ends)

    def with_tables(self, _: object) -> None:
        """Build the batch of the next step."""
        self.model.with_tables(self.table, self.lengths)

    def step(self, _: object) -> None:
        """Build the batch of a step, and run append and attention in all layers."""
        model = self.model.with_tables(self.table, self.lengths)
        for layer in range(_LAYERS):
            ops.append(model, layer, self.k, self.v, self.offsets)
            ops.attention(model, layer, self.q, self.offsets)


_JOBS = {
    "attention": ("attention, new result", _CALLS),
    "attention_out": ("attention, out=", _CALLS),
    "append": ("append", _CALLS),
    "fetched_append": ("append, fetched inputs", _CALLS),
    "fetched_attention": ("attention, fetched inputs", _CALLS),
    "fetched_step": (f"fetch, {_LAYERS} layers of append and attention", 20),
    "with_tables": ("PagedBatch.with_tables", _CALLS),
    "step": (f"with_tables, {_LAYERS} layers of append and attention", 20),
}


def _rows(name: str, scenes: dict[str, _Scene], rounds: int) -> list[Row]:
    """Time a job in each library in turn."""
    work, calls = _JOBS[name]
    found: dict[str, list[float]] = {library: [] for library in scenes}

    def part() -> list[dict[str, float]]:
        items = [None] * calls
        return [{key: time_calls(getattr(at, name), items) for key, at in scenes.items()}]

    for sample in undisturbed([part] * rounds):
        for library, spent in sample.items():
            found[library].append(spent)
    limit = float(np.median(found["numpy"]))
    make = partial(make_row, limit=limit, limit_name="numpy")
    return [
        make_row(f"small.{name}.numpy", f"{work}, numpy", found["numpy"]),
        make(f"small.{name}.torch", f"{work}, torch", found["torch"]),
    ]


def measure(options: Namespace) -> list[Row]:
    """Measure each call, and a decode step of all layers."""
    torch.set_num_threads(1)
    scenes = {"numpy": _Scene(_numpy), "torch": _Scene(torch.from_numpy)}
    rounds = 5 if options.quick else 101
    return [row for name in _JOBS for row in _rows(name, scenes, rounds)]


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
