# SPDX-License-Identifier: Apache-2.0
"""Pages between caches on emulated GPUs and in pinned host memory, against the same on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, require_emulation
from kvcore import ops

require_emulation()

SIZES: dict[str, Any] = {"layers": 3, "page_size": 3, "heads": 2, "head_dim": 5, "dtype": "float16"}
LAYOUTS = ["max", "layer_first_nhd", "layer_first_hnd_paired", "page_first_direct", "page_head"]


def fill(array: Any, machine: Machine | None, seed: int) -> None:
    view = array if isinstance(array, np.ndarray) else machine.view(array)  # type: ignore[union-attr]
    bits = view.view(np.uint16)
    bits[...] = np.random.default_rng(seed).integers(0, 1 << 16, bits.shape, np.uint16)


def caches(layouts: tuple[str, ...], places: tuple[str, ...], machine: Machine) -> list[Any]:
    made = []
    for seed, (layout, place) in enumerate(zip(layouts, places, strict=True)):
        cache = ops.PoolLayout.allocate(layout, pages=5, device=place, **SIZES)
        fill(cache.arrays, machine, seed)
        made.append(cache)
    return made


def content(machine: Machine, cache: Any) -> bytes:
    array = cache.arrays
    return (array if isinstance(array, np.ndarray) else machine.host(array)).tobytes()


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("destination", LAYOUTS)
@pytest.mark.parametrize(
    "places", [("cuda:1", "cuda:1"), ("cuda:0", "pinned"), ("pinned", "cuda:0")]
)
def test_pages_arrive_as_on_the_cpu(
    machine: Machine, source: str, destination: str, places: tuple[str, str]
) -> None:
    expected = caches((source, destination), ("cpu", "cpu"), machine)
    found = caches((source, destination), places, machine)
    for pair, limit in ((expected, 0), (found, 2)):
        ops.transfer(pair[0], pair[1], [0, -1, 4], [2, 1, 0], layers=range(1, 3), max_blocks=limit)
    machine.kernels.emulation.set_order(is_any=False)
    assert content(machine, found[1]) == content(machine, expected[1])


@pytest.mark.parametrize("ids_from", ["device", "both"])
def test_ids_may_lie_on_the_device(machine: Machine, ids_from: str) -> None:
    expected = caches(("max", "page_head"), ("cpu", "cpu"), machine)
    found = caches(("max", "page_head"), ("cuda:0", "cuda:0"), machine)
    sources, destinations = np.array([0, 3]), np.array([2, 4])
    ops.transfer(expected[0], expected[1], sources, destinations)
    given = sources if ids_from == "both" else machine.array(sources)
    ops.transfer(found[0], found[1], given, machine.array(destinations))
    assert content(machine, found[1]) == content(machine, expected[1])


def test_layers_may_lie_apart(machine: Machine) -> None:
    whole = caches(("max", "max"), ("cpu", "cpu"), machine)[0]
    layers = [np.zeros((5, 2, 3, 2, 5), np.float16) for _ in range(3)]
    on_device = [machine.array(layer) for layer in layers]
    ops.transfer(whole, ops.PoolLayout(layers, "max"), [1, 2], [0, 3])
    source = ops.PoolLayout(machine.array(whole.arrays), "max")
    ops.transfer(source, ops.PoolLayout(on_device, "max"), [1, 2], [0, 3])
    for one, other in zip(on_device, layers, strict=True):
        assert machine.host(one).tobytes() == other.tobytes()


@pytest.mark.parametrize("seed", range(5))
def test_starts_of_pages_are_copied_as_if_in_order(machine: Machine, seed: int) -> None:
    host, device = (caches(("max",), (place,), machine)[0] for place in ("cpu", "cuda:0"))
    copies = [(0, 1, 2), (1, 2, 3), (3, 1, 1), (4, 3, 0)]
    ops.copy_partial(host, copies)
    machine.in_any_order(seed)
    ops.copy_partial(device, copies)
    assert content(machine, device) == content(machine, host)


def test_starts_on_the_device_are_copied(machine: Machine) -> None:
    host, device = (caches(("max",), (place,), machine)[0] for place in ("cpu", "cuda:0"))
    copies = np.array([(0, 1, 2), (3, 2, 1)])
    ops.copy_partial(host, copies)
    ops.copy_partial(device.arrays, machine.array(copies))
    assert content(machine, device) == content(machine, host)


def test_refusals_move_nothing(machine: Machine) -> None:
    source, destination = caches(("max", "max"), ("cuda:0", "cuda:0"), machine)
    before = content(machine, destination)
    with pytest.raises(IndexError, match="page 5 is outside the pool of 5 pages"):
        ops.transfer(source, destination, [0, 5], [1, 2])
    with pytest.raises(ValueError, match="to page 1 twice"):
        ops.transfer(source, destination, [0, 2], [1, 1])
    with pytest.raises(ValueError, match="max_blocks is -1, must be at least 0"):
        ops.transfer(source, destination, [0], [1], max_blocks=-1)
    with pytest.raises(IndexError, match=r"layers 3 .. 3 are asked for, the caches have 3"):
        ops.transfer(source, destination, [0], [1], layers=3)
    with pytest.raises(ValueError, match="overlap in memory"):
        ops.transfer(source, source, [0], [1])
    with pytest.raises(ValueError, match="tokens, a page holds 3"):
        ops.copy_partial(source, [(0, 1, 4)])
    assert content(machine, destination) == before


def test_host_memory_is_pinned(machine: Machine) -> None:
    source, destination = caches(("max", "max"), ("cuda:0", "cpu"), machine)
    with pytest.raises(ValueError, match="the destination is in host memory that is not pinned"):
        ops.transfer(source, destination, [0], [1])


def test_caches_are_on_one_device(machine: Machine) -> None:
    source, destination = caches(("max", "max"), ("cuda:0", "cuda:1"), machine)
    with pytest.raises(ValueError, match="destination is on cuda:1, must be on cuda:0 as source"):
        ops.transfer(source, destination, [0], [1])


def test_pools_on_a_gpu_are_zeros_of_their_exact_size(machine: Machine) -> None:
    before = machine.kernels.memory_info(1)[0]
    cache = ops.PoolLayout.allocate("max", pages=7, device="cuda:1", **SIZES)
    assert not machine.host(cache.arrays).any()
    assert before - machine.kernels.memory_info(1)[0] == cache.arrays.nbytes
    with pytest.raises(MemoryError, match="bytes are asked for on cuda:1"):
        ops.PoolLayout.allocate("max", pages=10**7, device="cuda:1", **SIZES)
    with pytest.raises(ValueError, match="device is cuda:2, this machine has 2"):
        ops.PoolLayout.allocate("max", pages=1, device="cuda:2", **SIZES)
