# SPDX-License-Identifier: Apache-2.0
"""Groups of layers with pools on (emulated) GPUs: every layer reads what was written, in any order
of streams, over several devices and replicas, with pages in the host tier and without.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cuda_machine import Machine, emulated, require_emulation
from device_traffic import DeviceTraffic
from grouped_traffic import manager_of, params_of, with_host_tier
from kvcore import TextGenerationContext, ops
from kvcore.groups import ChunkedLocal, FullAttention, SlidingWindow

require_emulation()

SHAPES = {
    "one device": params_of(FullAttention([0, 3]), SlidingWindow([1, 2], 5)),
    "no full group": params_of(SlidingWindow([0, 1], 5)),
    "wide values": params_of(FullAttention([0]), SlidingWindow([1], 5), v_head_dim=8),
    "other heads": params_of(
        FullAttention([0, 1], n_kv_heads=2), SlidingWindow([2, 3], 6, n_kv_heads=1)
    ),
    "tp 2, dp 2": params_of(
        FullAttention([0]),
        SlidingWindow([1], 5),
        ChunkedLocal([2], 4),
        n_kv_heads=2,
        n_devices=4,
        data_parallel_degree=2,
    ),
}


@pytest.fixture
def machine() -> Iterator[Machine]:
    with emulated(devices=4) as made:
        yield made


@pytest.mark.parametrize("host_pages", [0, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_read_what_was_written(machine: Machine, shape: str, host_pages: int) -> None:
    params = with_host_tier(SHAPES[shape], host_pages) if host_pages else SHAPES[shape]
    traffic = DeviceTraffic(machine, params, seed=3)
    machine.in_any_order(seed=3)
    verbs = ["claim", "step", "step", "step", "fork", "release", "crowd_out"]
    traffic.act(verbs, 120)
    traffic.look()
    assert traffic.read > 1000
    assert (traffic.manager.metrics.h2d_blocks_copied > 0) == (host_pages > 0)
    traffic.end()


@pytest.mark.parametrize("seed", range(6))
def test_pages_given_back_are_written_by_others_in_order(machine: Machine, seed: int) -> None:
    """A window passes its pages on to the next request, on another stream."""
    manager = manager_of(params_of(SlidingWindow([0, 1], 4)), num_pages=14, devices=["cuda:0"])
    streams = [machine.kernels.Stream(0) for _ in range(2)]
    machine.in_any_order(seed)
    found = []
    contexts = [TextGenerationContext(name, [name] * 3) for name in range(2)]
    for context in contexts:
        manager.claim(context.request_id)
    for turn in range(24):
        machine.streams[0] = streams[turn % 2].ptr
        context = contexts[turn % 2]
        (inputs,) = manager.fetch([context])
        positions = np.arange(context.start_idx, context.active_idx, dtype=np.float32)
        rows = np.repeat(positions + 100 * (turn % 2), 4).reshape(-1, 1, 4)
        for layer in range(2):
            new = machine.array(rows + 1000 * layer)
            ops.append(inputs, layer, new, new, inputs.row_offsets)
            shape = (context.active_idx, 1, 4)
            out = tuple(machine.memory(shape, np.float32) for _ in range(2))
            ops.gather(inputs, layer, lengths=np.array([shape[0]], np.uint32), out=out)
            first = max(0, context.start_idx - 3)
            wanted = np.arange(first, shape[0]) + 100 * (turn % 2) + 1000 * layer
            found.append((out, first, wanted))
        context.update(int(positions[-1]) % 3)
        manager.step([context])
    for out, first, wanted in found:
        for array in out:
            seen = machine.host(array)[first:, 0, 0]
            np.testing.assert_array_equal(seen, wanted)
