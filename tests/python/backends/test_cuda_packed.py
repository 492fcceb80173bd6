# SPDX-License-Identifier: Apache-2.0
"""Page copies from and to vLLM's layout, on emulated GPUs and in pinned memory, against the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuda_machine import Machine, require_emulation
from kvcore import ops
from kvcore.support.dtypes import numpy_dtype

require_emulation()

from graph_steps import captured  # noqa: E402

IDS = [0, -1, 4, 3], [2, 1, 0, 4]
# Pages with and without tiles, for each element size; in the last case V has another width.
SIZES: dict[str, dict[str, Any]] = {
    "tiles of two bytes": {"page_size": 16, "head_dim": 24, "dtype": "bfloat16"},
    "tiles of one byte": {"page_size": 8, "head_dim": 32, "dtype": "float8_e4m3fn"},
    "tiles of four bytes": {"page_size": 4, "head_dim": 8, "dtype": "float32"},
    "an odd page": {"page_size": 3, "head_dim": 16, "dtype": "float16"},
    "a token a page": {"page_size": 1, "head_dim": 16, "dtype": "int8"},
    "wide values": {"page_size": 8, "head_dim": 16, "v_head_dim": 40, "dtype": "float16"},
    "odd values": {"page_size": 16, "head_dim": 16, "v_head_dim": 5, "dtype": "float16"},
}


def parts(cache: Any) -> list[Any]:
    return list(cache.arrays) if isinstance(cache.arrays, tuple) else [cache.arrays]


def caches(machine: Machine, case: str, names: list[str], places: list[str]) -> list[Any]:
    """Return caches of random bytes, equal in all places."""
    sizes: Any = {"pages": 5, "layers": 3, "heads": 2} | SIZES[case]
    made = []
    for seed, (name, place) in enumerate(zip(names, places, strict=True)):
        made.append(ops.PoolLayout.allocate(name, device=place, **sizes))
        rng = np.random.default_rng(seed)
        for part in parts(made[-1]):
            view = part if isinstance(part, np.ndarray) else machine.view(part)
            whole = view.reshape(-1).view(np.uint8)
            whole[...] = rng.integers(0, 256, whole.size, np.uint8)
    return made


def content(machine: Machine, cache: Any) -> bytes:
    machine.kernels.emulation.set_order(is_any=False)
    found = [p if isinstance(p, np.ndarray) else machine.host(p) for p in parts(cache)]
    return b"".join(part.tobytes() for part in found)


@pytest.mark.parametrize("places", [["cuda:1"] * 2, ["cuda:0", "pinned"], ["pinned", "cuda:0"]])
@pytest.mark.parametrize("other", ["max", "layer_first_hnd", "page_head", "page_first", "vllm"])
@pytest.mark.parametrize("is_source", [True, False])
@pytest.mark.parametrize("case", SIZES)
def test_pages_arrive_as_on_the_cpu(
    machine: Machine, case: str, is_source: bool, other: str, places: list[str]
) -> None:
    names = ["vllm", other] if is_source else [other, "vllm"]
    expected = caches(machine, case, names, ["cpu", "cpu"])
    found = caches(machine, case, names, places)
    for pair, limit in ((expected, 0), (found, 2)):
        ops.transfer(pair[0], pair[1], *IDS, layers=range(1, 3), max_blocks=limit)
    for ours, theirs in zip(found, expected, strict=True):
        assert content(machine, ours) == content(machine, theirs)


@pytest.mark.parametrize("case", ["tiles of two bytes", "an odd page"])
@pytest.mark.parametrize("is_source", [True, False])
def test_layers_apart_strided_heads_and_ids_on_the_device(
    machine: Machine, case: str, is_source: bool
) -> None:
    """vLLM has an array for each layer, cut out of a larger array."""
    page, dim = (SIZES[case][name] for name in ("page_size", "head_dim"))
    kind = numpy_dtype("float16")
    x, rng = 16 // kind.itemsize, np.random.default_rng(5)

    def layers_of(*shape: int) -> list[Any]:
        raw = rng.integers(0, 256, (2, *shape[:-1], shape[-1] * 2), np.uint8)
        return [*raw.view(kind)]

    host = [
        (layers_of(7, 3, dim // x, page, x), layers_of(7, 3, dim, page)),
        (layers_of(6, page, 3, dim), layers_of(6, page, 3, dim)),
    ]
    device = [tuple([machine.array(layer) for layer in kv] for kv in side) for side in host]

    def layouts(sides: Any) -> list[Any]:
        cut = (np.s_[1:, :2], np.s_[:, :, 1:])
        named = zip(sides, cut, ("vllm", "layer_first_nhd"), strict=True)
        made = [
            ops.PoolLayout(tuple([layer[at] for layer in kv] for kv in side), name)
            for side, at, name in named
        ]
        return made if is_source else made[::-1]

    ops.transfer(*layouts(host), *map(np.array, IDS))
    on_device = [machine.array(np.array(ids)) for ids in IDS]
    launch = captured(machine, lambda: ops.transfer(*layouts(device), *on_device))
    launch()
    for ours, theirs in zip(device, host, strict=True):
        for found, expected in zip(ours, theirs, strict=True):
            for one, other in zip(found, expected, strict=True):
                assert machine.host(one).tobytes() == other.tobytes()


def test_keys_alone_have_no_packed_layout(machine: Machine) -> None:
    (packed,) = caches(machine, "tiles of two bytes", ["vllm"], ["cuda:0"])
    latent = ops.PoolLayout(machine.array(np.zeros((5, 3, 16, 2, 24), np.uint16)), "max")
    before = content(machine, packed)
    with pytest.raises(ValueError, match="both or neither must have V"):
        ops.transfer(latent, packed, [0], [1])
    with pytest.raises(IndexError, match="page 5 is outside the pool of 5 pages"):
        ops.transfer(
            packed, caches(machine, "tiles of two bytes", ["max"], ["cuda:0"])[0], [5], [0]
        )
    assert content(machine, packed) == before
