# SPDX-License-Identifier: Apache-2.0
"""kvcore's calls to a device backend; one module adds another kind of device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import kvcore
from kvcore.backends import host
from kvcore.backends.host import HOST
from kvcore.backends.protocol import Backend, Copier, DevicePools, Mover, Place, Shard
from kvcore.backends.selection import any_array, backend_of, place_of, zeros_on
from kvcore.device import DLPACK_TYPES, Device

PARAMS = kvcore.KVCacheParams("float32", 1, 2, 1, page_size=2, enable_prefix_caching=True)
TIERED = kvcore.KVCacheParams(
    "float32", 1, 2, 1, page_size=2, enable_prefix_caching=True,
    enable_kvcache_swapping_to_host=True, host_kvcache_swap_space_gb=1e-6,
)  # fmt: skip


class _Tray:
    """A backend in host memory that records the calls to it."""

    kind = "tray"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def array(self, value: Any, name: str) -> Any:
        self.asked.append("array")
        return host.BACKEND.array(value, name)

    def own(self, array: Any) -> Any:
        return array

    def device_of(self, array: Any) -> Device:
        return Device("tray", 1) if array.base is not None else Device("tray", 0)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], index: int) -> Any:
        self.asked.append(f"zeros on {index}")
        return np.zeros(shape, dtype)

    def pinned_zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return np.zeros(shape, dtype)

    def place(
        self, stream: Any, named: list[tuple[str, Any]], beside: tuple[Any, ...] = ()
    ) -> Place:
        return HOST

    def current_place(self, index: int) -> Place:
        return HOST

    def pools(
        self, devices: tuple[Device, ...], shards_per_replica: int, places: int
    ) -> DevicePools | None:
        self.asked.append(f"pools on {', '.join(map(str, devices))}")
        return None

    def copier(self, shards: list[list[Shard]], pools: Any) -> Copier:
        return host.BACKEND.copier(shards, pools)

    def mover(
        self,
        shards: list[list[Shard]],
        devices: tuple[Device, ...],
        num_pages: int,
        pools: Any,
        *,
        is_whole: bool = False,
        late_reads: Callable[[int], int] | None = None,
    ) -> Mover:
        self.asked.append("mover")
        return host.BACKEND.mover(shards, devices, num_pages, pools, is_whole=is_whole)


@pytest.fixture
def tray(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Tray]:
    backend = _Tray()
    module = ModuleType("kvcore.backends.tray")
    module.BACKEND = backend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(DLPACK_TYPES, "tray", 99)
    yield backend
    backend_of.cache_clear()


def test_another_kind_of_device_is_a_module_and_an_entry(tray: _Tray) -> None:
    mgr = kvcore.PagedKVCacheManager(TIERED, 2, 16, devices=[Device("tray")], num_pages=8)
    assert tray.asked == ["pools on tray:0", "zeros on 0", "mover"]
    context = kvcore.TextGenerationContext("a", [1, 2, 3])
    mgr.claim("a")
    assert mgr.fetch([context])[0].blocks.shape == (8, 2, 1, 2, 1, 2)


def test_pools_of_the_caller_are_seen_by_the_backend_of_their_device(tray: _Tray) -> None:
    pool = np.zeros((8, 2, 1, 2, 1, 2), np.float32)
    make = kvcore.PagedKVCacheManager
    make(PARAMS, 2, 16, devices=[Device("tray")], num_pages=8, blocks=[pool])
    assert tray.asked == ["pools on tray:0", "array"]
    with pytest.raises(ValueError, match=r"is on tray:1, must be on tray:0 as devices say"):
        make(PARAMS, 2, 16, devices=[Device("tray")], num_pages=8, blocks=[pool[:]])


def test_a_kind_is_one_backend() -> None:
    assert backend_of("cpu") is host.BACKEND
    assert backend_of("cuda") is backend_of("cuda")
    backend: Backend
    for backend in (host.BACKEND, backend_of("cuda")):
        assert backend.kind in DLPACK_TYPES


def test_arrays_in_host_memory_are_the_hosts() -> None:
    assert place_of(None, {"x": np.zeros(2), "y": [np.zeros(2), None]}) is HOST
    assert any_array(memoryview(b"ab"), "x").tolist() == [97, 98]
    assert zeros_on("cpu", (2, 3), np.dtype(np.int8)).tolist() == [[0, 0, 0]] * 2
    assert host.BACKEND.current_place(0) is HOST
    assert host.BACKEND.device_of(np.zeros(2)) == Device("cpu")
    with pytest.raises(ValueError, match="stream is given for arrays in host memory"):
        place_of(7, {"x": np.zeros(2)})


def test_the_host_takes_and_gives_its_own_arrays() -> None:
    array = np.arange(4)
    assert HOST.from_host(array) is array
    assert HOST.to_host(array) is array
    assert HOST.reaches(array)
    copy = HOST.copy_of(array)
    HOST.copy_into(copy, array[::-1])
    assert copy.tolist() == [3, 2, 1, 0]
    assert array.tolist() == [0, 1, 2, 3]
    HOST.wait()
