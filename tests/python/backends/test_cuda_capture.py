# SPDX-License-Identifier: Apache-2.0
"""Calls on a stream that is captured into a graph: captured calls, and refused calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, require_emulation
from kvcore import KVCacheParams, PagedBatch, PagedKVCacheManager, TextGenerationContext, ops

KERNELS = require_emulation()

OFFSETS, LENGTHS = np.array([0, 2, 3], np.uint32), np.array([1, 0], np.uint32)


class Scene:
    """A batch on the device and named arguments of calls; ``side`` is the captured stream."""

    def __init__(self, machine: Machine, dtype: str = "float32") -> None:
        rng = np.random.default_rng(1)
        self.machine = machine
        self.side = KERNELS.Stream(0)
        self.table = np.array([[1, 3], [2, 0]], np.uint32)
        self.host_pools: list[Any] = [
            rng.integers(0, 9, (5, 2, 2, 4)).astype(dtype) for _ in range(2)
        ]
        self.pools = [machine.array(pool) for pool in self.host_pools]
        self.lengths = machine.array(LENGTHS)
        k_pool, v_pool = self.pools
        self.batch = PagedBatch(k_pool, v_pool, machine.array(self.table), self.lengths)
        self.host_k = rng.normal(size=(3, 2, 4)).astype(np.float32)
        self.k = machine.array(self.host_k)
        self.offsets = machine.array(OFFSETS)
        self.ids = machine.array(np.array([1, 2]))
        self.slots = machine.array(np.full(3, -1))

    def on_host(self, lengths: Any = LENGTHS) -> PagedBatch:
        """Return the same batch in host memory."""
        return PagedBatch(self.host_pools[0], self.host_pools[1], self.table, lengths)

    def put(self, array: Any) -> Any:
        return self.machine.array(array)

    def layouts(self) -> list[ops.PoolLayout]:
        lists = [
            [self.put(np.full((5, 2, 2, 4), side + layer, np.int8)) for layer in range(2)]
            for side in (10, 20)
        ]
        return [ops.PoolLayout(arrays, "max") for arrays in lists]


def merge(s: Scene) -> None:
    lse = s.put(np.zeros((3, 2), np.float32))
    ops.merge_states(s.k, lse, s.k, lse)


def quantize_strided(s: Scene) -> None:
    out = s.put(np.zeros((2, 3, 4), np.int8)), s.put(np.zeros((2, 3, 1), np.float32))
    ops.quantize(s.k.transpose(1, 0, 2), "int8", 4, out=out)


def transfer(s: Scene) -> None:
    source, target = s.layouts()
    ops.transfer(source, target, np.array([1, 2]), s.ids)


def append_by_head(s: Scene) -> None:
    s = Scene(s.machine, "int8")
    ops.append(s.batch, 0, s.k, s.k, s.offsets, scale=[0.5, 0.25])


def key_scales(s: Scene) -> None:
    pools = [s.put(np.zeros((5, 2, 2, 4), np.int8)) for _ in range(2)]
    scales: dict[str, Any] = {"key_scales": 0.5, "value_scales": 0.5}
    PagedBatch(pools[0], pools[1], s.put(s.table), s.lengths, **scales)


REFUSED: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "row offsets": (lambda s: ops.append(s.batch, 0, s.k, s.k, OFFSETS), "row_offsets is in host"),
    "a list": (lambda s: ops.append(s.batch, 0, s.k, s.k, [0, 2, 3]), "row_offsets is in host"),
    "scales of heads": (append_by_head, "scale is in host memory"),
    "scales of a batch": (key_scales, "key_scales or value_scales is in host memory"),
    "lengths": (lambda s: ops.gather(s.batch, 0, lengths=LENGTHS), "lengths is in host memory"),
    "tokens": (lambda s: ops.gather(s.batch, 0), r"out\[2\], the row offsets, would be new memory"),
    "row offsets of tokens": (
        lambda s: ops.gather(s.batch, 0, out=(s.k, s.put(s.host_k))),
        r"out\[2\], the row offsets, would be new memory",
    ),
    "ids": (lambda s: ops.fill_pages(s.pools[0], [1], 7), "ids is in host memory"),
    "pairs": (lambda s: ops.copy_pages(s.pools[0], [(1, 2)]), "pairs is in host memory"),
    "digests": (lambda s: ops.checksum(s.pools[0], s.ids), "the digests would be new memory"),
    "source ids": (transfer, "source_ids is in host memory"),
    "copies": (
        lambda s: ops.copy_partial(s.put(np.zeros((3, 1, 1, 2, 1, 4), np.int8)), [(0, 1, 1)]),
        "copies is in host memory",
    ),
    "offsets of slots": (
        lambda s: ops.build_slots(s.batch, OFFSETS, out=s.slots),
        "row_offsets is in host memory",
    ),
    "slots": (
        lambda s: ops.append_slots(
            s.batch, 0, s.k, s.k, np.arange(3), out=s.put(np.zeros(1, np.int32))
        ),
        "slots is in host memory",
    ),
    "count": (
        lambda s: ops.append_slots(s.batch, 0, s.k, s.k, s.slots),
        "the count would be new memory",
    ),
    "offsets of lengths": (
        lambda s: ops.advance_lengths(s.lengths, OFFSETS, out=s.lengths),
        "row_offsets is in host memory",
    ),
    "new lengths": (
        lambda s: ops.advance_lengths(s.lengths, s.offsets),
        "the lengths would be new memory",
    ),
    "codes": (lambda s: ops.quantize(s.k, "int8", 4), "the values would be new memory"),
    "a strided x": (quantize_strided, "a copy of x, which is not in C order, would be new memory"),
    "states": (merge, "would be new memory, while the stream is captured into a graph"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_hold_is_refused_by_name(machine: Machine, name: str) -> None:
    call, text = REFUSED[name]
    scene = Scene(machine)
    machine.streams[0] = scene.side.ptr
    KERNELS.emulation.begin_capture(0, scene.side.ptr)
    with pytest.raises(ValueError, match=text) as raised:
        call(scene)
    assert "captured into a graph" in str(raised.value)
    graph = KERNELS.emulation.end_capture(0, scene.side.ptr)
    machine.in_any_order(1)
    KERNELS.emulation.replay(graph, 0, scene.side.ptr)
    assert KERNELS.emulation.num_waiting() == 0, "something was captured"
    call(scene)  # outside of a capture the call is allowed


def test_another_stream_that_is_captured_is_nobodys_business(machine: Machine) -> None:
    scene = Scene(machine)
    KERNELS.emulation.begin_capture(0, scene.side.ptr)
    ops.append(scene.batch, 0, scene.k, scene.k, OFFSETS)
    KERNELS.emulation.end_capture(0, scene.side.ptr)
    assert not np.array_equal(machine.host(scene.pools[0]), scene.host_pools[0])


# ---- contents of a graph -------------------------------------------------------------------------
class Graph:
    """A captured graph; after the capture, the test overwrites all free memory."""

    def __init__(self, scene: Scene, step: Callable[[], Any]) -> None:
        self._scene = scene
        machine = scene.machine
        machine.streams[0] = scene.side.ptr
        KERNELS.emulation.begin_capture(0, scene.side.ptr)
        allocated = machine.cupy.num_allocated
        step()
        assert machine.cupy.num_allocated == allocated
        self._number = KERNELS.emulation.end_capture(0, scene.side.ptr)
        gc.collect()

    def replay(self) -> None:
        KERNELS.emulation.replay(self._number, 0, self._scene.side.ptr)


def test_a_scale_for_all_is_part_of_the_graph(machine: Machine) -> None:
    scene = Scene(machine, "int8")
    scales = [np.float32(0.25)]
    graph = Graph(
        scene, lambda: ops.append(scene.batch, 0, scene.k, scene.k, scene.offsets, scale=scales[0])
    )
    scales[0] = np.float32(9)
    host = scene.on_host()
    for k in (scene.host_k, -2 * scene.host_k):
        machine.view(scene.k)[...] = k
        graph.replay()
        ops.append(host, 0, k, k, OFFSETS, scale=0.25)
        assert np.array_equal(machine.host(scene.pools[0]), scene.host_pools[0])


def test_lists_of_layers_are_part_of_the_graph(machine: Machine) -> None:
    """The list has more layers than one kernel takes."""
    layers = 55
    scene = Scene(machine)
    sides = [
        [machine.array(np.full((3, 2, 1, 4), 100 * side + i, np.uint8)) for i in range(layers)]
        for side in range(2)
    ]
    ids = machine.array(np.array([2, -1])), machine.array(np.array([0, 1]))

    def step() -> None:
        pools = [ops.PoolLayout(list(arrays), "max") for arrays in sides]
        ops.transfer(pools[0], pools[1], ids[0], ids[1], layers=range(1, layers))

    graph = Graph(scene, step)
    graph.replay()
    for i, array in enumerate(sides[1]):
        host = machine.host(array)
        assert (host[0] == (i if i > 0 else 100)).all()
        assert (host[1:] == 100 + i).all()


def test_tokens_and_their_offsets_are_gathered_by_lengths_of_the_replay(machine: Machine) -> None:
    scene = Scene(machine)
    out = tuple(machine.array(np.zeros((4, 2, 4), np.float32)) for _ in range(2))
    ends = machine.array(np.zeros(3, np.uint32))
    graph = Graph(scene, lambda: ops.gather(scene.batch, 0, out=(*out, ends)))
    for lengths in ([3, 1], [0, 2]):
        taken = np.array(lengths, np.uint32)
        machine.view(scene.lengths)[...] = taken
        graph.replay()
        host = scene.on_host(taken)
        k, v, offsets = ops.gather(host, 0)
        assert machine.host(ends).tolist() == offsets.tolist()
        assert np.array_equal(machine.host(out[0])[: len(k)], k)
        assert np.array_equal(machine.host(out[1])[: len(v)], v)


def test_slots_beyond_the_pool_are_counted_anew_by_each_replay(machine: Machine) -> None:
    scene = Scene(machine)
    bad = machine.array(np.full(1, 77, np.int32))
    graph = Graph(
        scene,
        lambda: ops.append_slots(scene.batch, 0, scene.k, scene.k, scene.slots, out=bad),
    )
    for slots, expected in (([1, 99, 88], 2), ([-1, 0, 99], 1)):
        machine.view(scene.slots)[...] = slots
        graph.replay()
        assert machine.host(bad).tolist() == [expected]


# ---- the same outputs outside of graphs ----------------------------------------------------------
@pytest.mark.parametrize("where", ["host", "device"])
def test_counts_and_offsets_go_where_the_caller_says(machine: Machine, where: str) -> None:
    scene = Scene(machine)
    batch, k = scene.batch, scene.k
    put: Callable[[Any], Any] = machine.array
    put_host: Callable[[Any], Any] = machine.host
    if where == "host":
        batch, k = scene.on_host(), scene.host_k
        put = put_host = np.asarray
    bad, ends = put(np.full(1, 7, np.int32)), put(np.full(3, 7, np.uint32))
    assert ops.append_slots(batch, 0, k, k, np.array([0, 99, -1]), out=bad) is bad
    assert put_host(bad).tolist() == [1]
    out = tuple(put(np.zeros((1, 2, 4), np.float32)) for _ in range(2))
    assert ops.gather(batch, 0, out=(*out, ends))[2] is ends
    assert put_host(ends).tolist() == [0, 1, 1]
    for wrong in (put(np.zeros(2, np.int32)), put(np.zeros(1, np.int64))):
        with pytest.raises(ValueError, match=r"out has shape .*, must be int32 \(1,\)"):
            ops.append_slots(batch, 0, k, k, np.array([0, 9, -1]), out=wrong)
    with pytest.raises(ValueError, match=r"out\[2\] has shape \(2,\) .* must be \(3,\) and uint32"):
        ops.gather(batch, 0, out=(*out, put(np.zeros(2, np.uint32))))


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_gather_that_fails_leaves_the_offsets(machine: Machine, where: str) -> None:
    scene = Scene(machine)
    batch = scene.on_host()
    ends: Any = np.full(3, 7, np.uint32)
    out = tuple(np.zeros((1, 2, 5), np.float32) for _ in range(2))
    if where == "device":
        batch, ends = scene.batch, machine.array(ends)
        out = tuple(map(machine.array, out))
    with pytest.raises(ValueError, match="must be"):
        ops.gather(batch, 0, out=(*out, ends))
    assert np.asarray(machine.host(ends) if where == "device" else ends).tolist() == [7, 7, 7]


# ---- managers ------------------------------------------------------------------------------------
def test_calls_of_a_manager_are_refused_and_change_nothing(machine: Machine) -> None:
    params = KVCacheParams("float32", 1, 4, num_layers=1, page_size=2, enable_prefix_caching=True)
    manager = PagedKVCacheManager(params, 2, 16, devices=["cuda:0"], num_pages=8)
    side = KERNELS.Stream(0)
    machine.streams[0] = side.ptr
    context = TextGenerationContext("a", [1, 2, 3])
    manager.claim("a")
    KERNELS.emulation.begin_capture(0, side.ptr)
    for _ in range(2):
        with pytest.raises(
            ValueError, match="is captured into a graph, which cannot contain calls of a manager"
        ):
            manager.fetch([context])
    KERNELS.emulation.end_capture(0, side.ptr)
    manager.check_integrity()
    (inputs,) = manager.fetch([context])
    assert machine.host(inputs.lookup_table).tolist() == [manager.get_req_blocks("a")]
    context.update(4)
    manager.step([context])
