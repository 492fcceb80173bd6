# SPDX-License-Identifier: Apache-2.0
"""The values that ``tiers=`` takes and refuses, and the tiers that a manager has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import require
from kvcore import CapacityError, KVCacheError
from kvcore.stores import DiskStore, MemoryStore
from moved_requests import moving_manager, moving_params
from tables import table
from tiered_requests import DictStore, kvcore_threads, tiered_manager

SWAP = {"enable_kvcache_swapping_to_host": True, "host_kvcache_swap_space_gb": 0.001}


class NoRemove(DictStore):
    remove = None  # type: ignore[assignment]
    clear = None  # type: ignore[assignment]


@table(
    ("tiers", "error", "text"),
    [
        (["host:lots"], ValueError, "host:8GiB"),
        (["floppy:/a:1MiB"], ValueError, "must begin with one of host:, disk:"),
        (["disk:/tmp/kv"], ValueError, "disk:/var/cache/kv:200GiB"),
        (["host:1MiB", "host:1MiB"], ValueError, "a host tier is the first"),
        (["disk:/tmp/none:1MiB", "host:1MiB"], ValueError, r"tiers\[1\] is 'host:1MiB'"),
        (["disk:/tmp/n:1MiB", "disk:/tmp/n:1MiB"], ValueError, "name a directory twice"),
        ("host:1MiB", TypeError, "must be a list"),
        (7, TypeError, "must be a list"),
        ([7], TypeError, "has no contains, get_into"),
        ([NoRemove()], TypeError, "NoRemove.*has no remove, clear"),
        ([DictStore], TypeError, "the class itself"),
        (["host:1"], CapacityError, "holds no page"),
    ],
)  # fmt: skip
def test_wrong_tiers_are_refused(tiers: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        moving_manager(tiers=tiers)


def test_one_store_is_named_once() -> None:
    store = MemoryStore(1 << 20)
    with pytest.raises(ValueError, match="one store twice"):
        tiered_manager(store, store)


def test_tiers_need_a_pool_and_prefix_caching() -> None:
    with pytest.raises(ValueError, match="blocks is None"):
        tiered_manager("host:1MiB", blocks=None)
    with pytest.raises(ValueError, match="enable_prefix_caching is off"):
        tiered_manager("host:1MiB", params=moving_params(enable_prefix_caching=False))


def test_a_host_tier_is_given_once() -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        tiered_manager("host:1MiB", params=moving_params(**SWAP))
    manager = tiered_manager(MemoryStore(1 << 20), params=moving_params(**SWAP))
    assert manager.total_num_host_pages == 2**30 // 1000 // manager.params.bytes_per_page
    manager.close()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("fingerprint", 7, TypeError),
        ("async_onload", 1, TypeError),
        ("store_timeout", 0, ValueError),
        ("store_timeout", float("inf"), ValueError),
        ("max_write_wait", -1.0, ValueError),
        ("max_write_wait", "1", TypeError),
    ],
)
def test_wrong_options_are_refused(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        tiered_manager(MemoryStore(1 << 20), **{name: value})


def test_a_host_item_is_the_swap_space_of_each_replica() -> None:
    params = moving_params(n_devices=2, data_parallel_degree=2)
    with tiered_manager("host:64KiB", params=params) as manager:
        assert manager.total_num_host_pages == 2 * (65536 // params.bytes_per_page)
        assert [*manager.tier_metrics] == ["host"]


def test_stores_get_a_host_tier_of_what_two_requests_need() -> None:
    with tiered_manager(MemoryStore(1 << 20), num_pages=8, max_seq_len=200) as manager:
        assert manager.total_num_host_pages == 2 * 50
    with tiered_manager(MemoryStore(1 << 20), num_pages=300, max_seq_len=200) as manager:
        assert manager.total_num_host_pages == 300


def test_without_tiers_nothing_is_made() -> None:
    nothing: list[Any] = [None, []]
    for tiers in nothing:
        with moving_manager(tiers=tiers) as manager:
            assert dict(manager.tier_metrics) == {}
            assert manager.total_num_host_pages == 0
            assert manager.flush()
            assert manager.poll() == []


def test_tiers_have_names(tmp_path: Path) -> None:
    one, two = tmp_path / "a", tmp_path / "b"
    with tiered_manager(f"disk:{one}:1MiB", DictStore()) as manager:
        assert [*manager.tier_metrics] == ["host", "disk", "dictstore"]
    several = f"disk:{one}:1MiB", f"disk:{two}:1MiB", DictStore(), DictStore()
    with tiered_manager(*several) as manager:
        names = ["host", f"disk:{one}", f"disk:{two}", "dictstore-1", "dictstore-2"]
        assert [*manager.tier_metrics] == names
        disk = manager.tier_metrics[names[1]]
        assert disk["hits"] == disk.hits == 0
        assert dict(disk)["breaker"] == "closed"
        with pytest.raises(KeyError, match="hits, misses"):
            disk["pages"]


def test_a_disk_that_cannot_be_opened_leaves_nothing_behind(tmp_path: Path) -> None:
    free, taken = tmp_path / "free", tmp_path / "taken"
    with tiered_manager(f"disk:{taken}:1MiB"):
        with pytest.raises(KVCacheError, match="in use by process"):
            tiered_manager(f"disk:{free}:1MiB", f"disk:{taken}:1MiB")
        tiered_manager(f"disk:{free}:1MiB").close()
    assert not [*kvcore_threads()]


def test_a_disk_store_for_smaller_pages_is_refused(tmp_path: Path) -> None:
    store = DiskStore(f"disk:{tmp_path}:1MiB", page_bytes=64, fingerprint=bytes(32))
    with pytest.raises(ValueError, match="pages of 64 bytes, must be for 512"):
        tiered_manager(store)
    store.close()


def test_a_refused_manager_lets_its_endpoint_go(tmp_path: Path) -> None:
    require("zmq")
    endpoint = f"ipc://{tmp_path}/reset"
    with tiered_manager(f"disk:{tmp_path}/d:1MiB"):
        with pytest.raises(KVCacheError, match=r"is in use by process .*; close that store first"):
            tiered_manager(f"disk:{tmp_path}/d:1MiB", zmq_endpoint_base=endpoint)
        moving_manager(zmq_endpoint_base=endpoint).close()
