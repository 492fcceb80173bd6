# SPDX-License-Identifier: Apache-2.0
"""Pages that return from the host tier layer by layer, on (emulated) GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, emulated, require_emulation
from kvcore import KVCacheParams, PagedKVCacheManager, TextGenerationContext, TierOptions, ops

require_emulation()

from kvcore.cuda import GraphBatch  # noqa: E402

LAYERS, TOKENS = 4, 9


def params_of(**more: Any) -> KVCacheParams:
    fields: dict[str, Any] = {"n_kv_heads": 2, "head_dim": 8, "num_layers": LAYERS, "page_size": 4}
    return KVCacheParams("float32", enable_prefix_caching=True, **(fields | more))


class Scene:
    """Prompts whose pages move to the host tier and back, with a pool for one prompt."""

    def __init__(
        self, machine: Machine, params: KVCacheParams | None = None, *, by_layer: bool = True
    ) -> None:
        self.machine = machine
        params = params or params_of()
        self.manager = PagedKVCacheManager(
            params, 4, 64, devices=["cuda:0"], num_pages=4, enable_runtime_checks=True,
            tiers=TierOptions([f"host:{40 * params.bytes_per_page}B"], layerwise_loads=by_layer),
        )  # fmt: skip

    def fetch(self, prompt: int) -> Any:
        """Fetch a prompt of nine equal tokens; append K and V that depend on token and layer."""
        context = TextGenerationContext(prompt, [prompt] * TOKENS)
        self.manager.claim(prompt)
        (inputs,) = self.manager.fetch([context])
        return inputs, context

    def finish(self, context: TextGenerationContext) -> None:
        context.update(7)
        self.manager.step([context])
        self.manager.release(context.request_id)

    def append(self, inputs: Any, context: TextGenerationContext) -> None:
        n = context.active_idx - context.start_idx
        for layer in range(LAYERS):
            k = np.full((n, 2, 8), 100 * layer + int(context.tokens[0]), np.float32)
            there = self.machine.array(k)
            ops.append(inputs, layer, there, there, self.machine.array(np.array([0, n], np.uint32)))

    def run(self, prompt: int) -> None:
        inputs, context = self.fetch(prompt)
        self.append(inputs, context)
        self.finish(context)

    def fill(self) -> None:
        """Leave prompts 1 and 2 in the host tier and prompt 3 on the device, with all work done."""
        for prompt in (1, 2, 3):
            self.run(prompt)
        self.machine.kernels.emulation.set_order(is_any=False)
        (inputs,) = self.manager.fetch([])
        self.machine.view(inputs.blocks)[...] = -1  # rows without a load keep -1

    def gather(self, inputs: Any, layer: int) -> Any:
        out = tuple(self.machine.memory((TOKENS, 2, 8), np.float32) for _ in "kv")
        ops.gather(inputs, layer, lengths=np.array([TOKENS], np.uint32), out=out)
        return out[0]


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_layer_does_not_wait_for_later_ones(by_layer: bool) -> None:
    """In some stream orders the first layer is read before the last layer is loaded."""
    early = [first_is_read_early(by_layer, seed) for seed in range(20)]
    assert any(early) == by_layer


def first_is_read_early(by_layer: bool, seed: int) -> bool:
    with emulated() as machine:  # an older machine would be freed during the test, and wait
        scene = Scene(machine, by_layer=by_layer)
        scene.fill()
        machine.in_any_order(seed)
        inputs, context = scene.fetch(1)
        assert scene.manager.metrics.h2d_blocks_copied == 2
        first = scene.gather(inputs, 0)
        machine.kernels.synchronize(0, machine.streams.get(0, 0))
        is_early = machine.kernels.emulation.num_waiting() > 0
        assert (machine.view(first)[:8] == 1).all()
        scene.append(inputs, context)
        layers = [*reversed(range(LAYERS))]
        seen = [scene.gather(inputs, layer) for layer in layers]
        scene.finish(context)
        for layer, found in zip(layers, seen, strict=True):
            assert (machine.host(found) == 100 * layer + 1).all()
    return bool(is_early)


def test_what_a_callers_kernel_does_waits_by_wait_layer() -> None:
    """The driver copies a layer's pages; this copy does not wait for loads by itself."""
    assert all(is_copied_right(seed, waits=True) for seed in range(20))
    assert not all(is_copied_right(seed, waits=False) for seed in range(20))


def is_copied_right(seed: int, *, waits: bool) -> bool:
    with emulated() as machine:
        scene = Scene(machine)
        scene.fill()
        machine.in_any_order(seed)
        inputs, context = scene.fetch(1)
        page = int(scene.manager.get_req_blocks(1)[0])
        if waits:
            ops.wait_layer(inputs, LAYERS - 1)
        source = inputs.blocks[page, 0, LAYERS - 1]
        target = machine.memory(source.shape, np.float32)
        stream = machine.streams.get(0, 0)
        machine.kernels.copy(target.data.ptr, source.data.ptr, source.nbytes, 0, stream)
        machine.kernels.synchronize(0, stream)
        found = machine.view(target).copy()
        scene.append(inputs, context)
        scene.finish(context)
    return bool((found == 100 * (LAYERS - 1) + 1).all())


def captures(machine: Machine, call: Callable[[], Any]) -> Any:
    side = machine.kernels.Stream(0)
    machine.kernels.emulation.begin_capture(0, side.ptr)
    try:
        with pytest.raises(ValueError, match="loads from the host tier are in flight") as raised:
            call_on(machine, side.ptr, call)
        return raised.value
    finally:
        machine.kernels.emulation.end_capture(0, side.ptr)


def call_on(machine: Machine, stream: int, call: Callable[[], Any]) -> None:
    machine.streams[0] = stream
    try:
        call()
    finally:
        del machine.streams[0]


def test_a_captured_stream_is_refused_and_a_graph_batch_waits(machine: Machine) -> None:
    scene = Scene(machine)
    scene.fill()
    machine.in_any_order(1)
    inputs, context = scene.fetch(1)
    captures(machine, lambda: ops.wait_layer(inputs, 0))
    batch = GraphBatch(inputs, 1, 16)
    batch.load(inputs)
    assert batch.inputs._loads is None
    found = scene.gather(batch.inputs, LAYERS - 1)  # waits for no layer
    scene.append(inputs, context)
    scene.finish(context)
    assert (machine.host(found)[:8] == 100 * (LAYERS - 1) + 1).all()


def test_inputs_without_loads_wait_for_nothing(machine: Machine) -> None:
    scene = Scene(machine)
    inputs, context = scene.fetch(1)
    assert inputs._loads is None
    ops.wait_layer(inputs, 0)
    with pytest.raises(IndexError, match="layer is 4"):
        ops.wait_layer(inputs, LAYERS)
    scene.append(inputs, context)
    scene.finish(context)
    by_layer = TierOptions(layerwise_loads=True)
    on_cpu = PagedKVCacheManager(params_of(), 4, 64, num_pages=4, tiers=by_layer)
    ops.wait_layer(on_cpu.fetch([])[0], 0)
    with pytest.raises(TypeError, match="layerwise_loads is a str"):
        TierOptions(layerwise_loads="yes")  # type: ignore[arg-type]
