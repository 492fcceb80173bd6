# SPDX-License-Identifier: Apache-2.0
"""Steps of a model on an emulated GPU that a graph could capture, and managers for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import kvcore
from cuda_machine import Machine
from grouped_traffic import manager_of, params_of
from kvcore import KVCacheParams, RaggedKVCacheInputs, TextGenerationContext
from kvcore import ops as verbs
from kvcore.cuda import GraphBatch
from kvcore.groups import FullAttention, SlidingWindow

SHAPES = {
    "plain": KVCacheParams(
        "float32", 1, 4, num_layers=2, page_size=2, enable_prefix_caching=True
    ),
    "windows": params_of(FullAttention([0]), SlidingWindow([1], 5)),
    "other pages": params_of(
        FullAttention([0], n_kv_heads=2), SlidingWindow([1], 6, n_kv_heads=1)
    ),
}  # fmt: skip
ROWS = 5


def wide(layer: int, params: KVCacheParams) -> int:
    """Return the number of heads of a layer."""
    if params.groups is None:
        return params.n_kv_heads
    (found,) = [group for group in params.groups if layer in group.layers]
    return getattr(found, "n_kv_heads", None) or params.n_kv_heads


class Model:
    """A step of a model that a graph captures, with K and V at fixed addresses.

    With `splits` its layers also run attention, each with its K as queries.
    """

    def __init__(
        self, machine: Machine, params: KVCacheParams, tokens: int, splits: int = 0
    ) -> None:
        self.machine, self.params, self.tokens, self.splits = machine, params, tokens, splits
        self.k = [self._memory(layer) for layer in range(params.num_layers)]
        self.out = [self._memory(layer) for layer in range(params.num_layers)]
        heads = max(wide(layer, params) for layer in range(params.num_layers))
        self.scratch = machine.memory((splits * tokens * heads * 5,), np.float32)
        self.skipped = machine.memory((1,), np.int32)

    def _memory(self, layer: int) -> Any:
        return self.machine.memory((self.tokens, wide(layer, self.params), 4), np.float32)

    def compute(self, contexts: list[TextGenerationContext]) -> None:
        """Compute the values that depend on the tokens; on a GPU the graph's kernels do this."""
        self.machine.kernels.emulation.set_order(is_any=False)  # waits for all work in flight
        rows = [c.tokens[c.start_idx : c.active_idx] for c in contexts]
        new = np.concatenate([np.empty(0, np.int32), *rows])
        for layer, k in enumerate(self.k):
            view = self.machine.view(k)
            view[: len(new)] = (10 * layer + new.astype(np.float32))[:, None, None]
            view[len(new) :] = np.nan  # padding: no call may write it to a page
            self.machine.view(self.out[layer])[...] = 0

    def step(self, batch: GraphBatch) -> None:
        batch.build_slots()
        for layer, k in enumerate(self.k):
            verbs.append_slots(batch.inputs, layer, k, k, batch.slots(layer), out=self.skipped)
            self.attend(batch.inputs, layer, batch.row_offsets, len(k))
        batch.advance()

    def eager(self, inputs: RaggedKVCacheInputs) -> None:
        offsets = self.machine.array(inputs.row_offsets)
        n = int(inputs.row_offsets[-1])
        for layer, k in enumerate(self.k):
            verbs.append(inputs, layer, k[:n], k[:n], offsets)
            self.attend(inputs, layer, offsets, n)

    def attend(self, inputs: RaggedKVCacheInputs, layer: int, offsets: Any, n: int) -> None:
        if self.splits:
            verbs.attention(
                inputs, layer, self.k[layer][:n], offsets, out=self.out[layer][:n],
                splits=self.splits, scratch=self.scratch,
            )  # fmt: skip


@contextmanager
def nothing_from_outside(machine: Machine) -> Iterator[None]:
    """Forbid allocations and copies to the device, and check that all addresses are on devices."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a captured call allocates or copies")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "memory", refuse)
        patch.setattr("kvcore.backends.cuda.driver.empty", refuse)
        patch.setattr("kvcore.backends.cuda.place.DevicePlace.copy_into", refuse)
        yield


def captured(machine: Machine, step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step on a new current stream of device 0; return its replay."""
    side = machine.kernels.Stream(0)
    machine.streams[0] = side.ptr
    emulation = machine.kernels.emulation
    emulation.begin_capture(0, side.ptr)
    with nothing_from_outside(machine):
        step()
    graph = emulation.end_capture(0, side.ptr)
    return lambda: emulation.replay(graph, 0, side.ptr)


class Run:
    """A manager, and requests that start and end; `run` runs each step."""

    def __init__(self, params: KVCacheParams) -> None:
        self.manager = manager_of(params, num_pages=500, devices=["cuda:0"])
        self.contexts: list[TextGenerationContext] = []
        self.count = 0

    def begin(self, n: int, seed: int, most: int = 6) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(n):
            prompt = [7, *rng.integers(0, 50, int(rng.integers(0, most))).tolist()]
            self.contexts.append(TextGenerationContext(str(self.count), prompt))
            self.manager.claim(str(self.count))
            self.count += 1

    def end(self, n: int) -> None:
        for context in self.contexts[:n]:
            self.manager.release(context.request_id)
        del self.contexts[:n]

    def step(self, model: Model, run: Callable[[RaggedKVCacheInputs], None]) -> None:
        (inputs,) = self.manager.fetch(self.contexts)
        model.compute(self.contexts)
        run(inputs)
        sampled = np.array([c.end_idx + int(c.tokens[-1]) for c in self.contexts], np.int32)
        kvcore.update_batch(self.contexts, sampled % 50)
        self.manager.step(self.contexts)
