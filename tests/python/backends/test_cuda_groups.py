# SPDX-License-Identifier: Apache-2.0
"""Groups of layers with pools on (emulated) GPUs: every layer reads the written K and V, in any
order of streams, on several devices and replicas, with and without pages in the host tier.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, emulated, require_emulation
from device_traffic import DeviceTraffic
from grouped_traffic import manager_of, params_of, with_host_tier
from kvcore import PagedBatch, TextGenerationContext, ops
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


@pytest.mark.parametrize(
    ("host_pages", "by_layer"), [(0, False), (200, False), (200, True)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES)
def test_layers_read_what_was_written(
    machine: Machine, shape: str, host_pages: int, by_layer: bool
) -> None:
    params = with_host_tier(SHAPES[shape], host_pages) if host_pages else SHAPES[shape]
    traffic = DeviceTraffic(machine, params, seed=3, layerwise_loads=by_layer)
    machine.in_any_order(seed=3)
    verbs = ["claim", "step", "step", "step", "fork", "release", "crowd_out"]
    traffic.act(verbs, 120)
    traffic.look()
    assert traffic.read > 1000
    assert (traffic.manager.metrics.h2d_blocks_copied > 0) == (host_pages > 0)
    traffic.end()


@pytest.mark.parametrize("seed", range(6))
def test_pages_given_back_are_written_by_others_in_order(machine: Machine, seed: int) -> None:
    """A window gives its pages to the next request, which runs on another stream."""
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


def read_left_pages_elsewhere(machine: Machine, seed: int, *, ordered: bool) -> float:
    """Read a page on a stream that no fetch used; a step frees the page, and others write it."""
    manager = manager_of(params_of(SlidingWindow([0], 4)), num_pages=3, devices=["cuda:0"])
    machine.in_any_order(seed)
    other = machine.kernels.Stream(0)
    out = machine.memory((6, 1, 4), np.float32), machine.memory((6, 1, 4), np.float32)
    for turn, name in enumerate("ab"):
        context = TextGenerationContext(name, [turn] * (6 - 4 * turn))
        manager.claim(name)
        (inputs,) = manager.fetch([context])
        new = machine.array(np.full((context.active_idx, 1, 4), turn + 1, np.float32))
        ops.append(inputs, 0, new, new, inputs.row_offsets)
        if turn == 0:
            event = machine.kernels.Event(0)
            machine.kernels.record(event.ptr, 0, 0)
            machine.kernels.wait(event.ptr, 0, other.ptr)
            ops.gather(inputs, 0, lengths=np.array([6], np.uint32), out=out, stream=other)
        context.update(0)
        manager.step([context], after=other if ordered else None)
        assert manager.num_free_blocks == 1 - turn  # each step frees one page of three
    return float(machine.host(out[0])[0, 0, 0])


def test_reuse_waits_for_what_step_names(machine: Machine) -> None:
    found: dict[bool, set[float]] = {}
    for ordered in (False, True):
        found[ordered] = {read_left_pages_elsewhere(machine, s, ordered=ordered) for s in range(20)}
    assert found[True] == {1.0}
    assert found[False] == {1.0, 2.0}, "the test would not notice a missing order"


def test_a_step_that_refuses_what_it_is_to_wait_for_commits_nothing(machine: Machine) -> None:
    manager = manager_of(params_of(SlidingWindow([0], 4)), devices=["cuda:0"])
    on_cpu = manager_of(params_of(SlidingWindow([0], 4)))
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (manager, "later", TypeError, "stream is a str"),
        (on_cpu, 7, ValueError, "no pool on a GPU; leave it out"),
    ]
    for each, after, error, text in wrong:
        context = TextGenerationContext("a", [1, 2, 3])
        each.claim("a")
        each.fetch([context])
        context.update(4)
        with pytest.raises(error, match=text):
            each.step([context], after=after)
        assert each.match_prefix([1, 2]) == 0
        each.step([context])
        assert each.match_prefix([1, 2]) == 2


@pytest.mark.parametrize("shape", ["one device", "other heads"])
def test_pools_of_all_layers_on_a_gpu(machine: Machine, shape: str) -> None:
    """The caller's arrays hold rows of one shape, or rows of several shapes."""
    params = SHAPES[shape]
    manager = manager_of(params, num_pages=20, devices=["cuda:0"])
    context = TextGenerationContext("a", list(range(7)))
    manager.claim("a")
    (inputs,) = manager.fetch([context])
    rows = {
        layer: ops.batch.layer_pools(inputs, layer).pools[0].shape[2:]
        for layer in range(params.num_layers)
    }
    heads = max(heads for heads, _ in rows.values())
    keys, values = (
        [machine.memory((20, 2, heads, 4), np.float32) for _ in range(params.layers_per_page)]
        for _ in range(2)
    )
    batch = PagedBatch(keys, values, inputs.tables, inputs.cache_lengths, params=params)
    for layer, (wide, dim) in rows.items():
        new = machine.array(np.full((7, wide, dim), layer + 1, np.float32))
        ops.append(batch, layer, new, new, inputs.row_offsets)
    for layer, (wide, dim) in rows.items():
        out = tuple(machine.memory((7, wide, dim), np.float32) for _ in range(2))
        ops.gather(batch, layer, lengths=np.array([7], np.uint32), out=out)
        assert all((machine.host(each) == layer + 1).all() for each in out)
