# SPDX-License-Identifier: Apache-2.0
"""The disk store in Python: refused calls, one owner per directory, no leftovers after close."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import KVCacheError, _core
from kvcore.stores import DiskStore, DiskTier
from programs import HELPERS
from small_disks import small_disk
from stored_pages import FINGERPRINT, PAGE, content, get, key, open_disk, put, quota


def test_pages_are_kept_over_restarts(tmp_path: Path) -> None:
    store = open_disk(tmp_path, 8)
    assert put(store, 1, 2, 3) == 3
    assert store.remove([key(2)]) == 1
    store.close()
    store = open_disk(tmp_path, 8)
    assert store.contains([key(1), key(2), key(3)]) == [True, False, True]
    assert get(store, 1, 3) == 2
    assert store.stats()["restored"] == 2
    assert repr(store) == "DiskStore(2 of 8 pages)"
    store.close()
    assert "closed" in repr(store)


def test_pages_of_another_model_are_not_found(tmp_path: Path) -> None:
    store = open_disk(tmp_path, 4)
    put(store, 1)
    store.close()
    other = DiskStore(f"disk:{tmp_path}:{quota(4)}", page_bytes=PAGE, fingerprint=bytes(32))
    assert other.contains([key(1)]) == [False]
    assert other.stats()["foreign"] == 1
    other.close()


def test_arrays_of_numpy_go_in_and_come_out(tmp_path: Path) -> None:
    store = open_disk(tmp_path, 4, 4096 * 4)
    given = np.arange(4096, dtype=np.float32)
    assert store.put_from([key(1)], [given]).result() == 1
    assert store.parts_of([key(1), key(2)]) == [1, 0]
    found = np.zeros((64, 64), np.float32)
    assert store.get_into([key(1)], [found]).result() == 1
    assert (found.ravel() == given).all()
    store.close()


WRONG_KEYS: list[tuple[Any, type[Exception], str]] = [
    ([b"short"], ValueError, "has 5 bytes, must have 32"),
    (["x" * 32], TypeError, "is a str, must be bytes"),
    ([None], TypeError, "must be bytes"),
    ([key(1), key(2)], ValueError, "2 keys and 1 buffers"),
    ([], ValueError, "0 keys and 1 buffers"),
]
WRONG_BUFFERS: list[tuple[Any, type[Exception], str]] = [
    ([content(1)], TypeError, "writable"),
    ([None], TypeError, "contiguous"),
    ([7], TypeError, "buffers.0."),
    ([[]], ValueError, "without parts"),
    ([[None, None]], ValueError, "without parts"),
    ([bytearray()], ValueError, "at least 1"),
    ([bytearray(PAGE + 1)], ValueError, f"at most {PAGE}"),
    ([[bytearray(PAGE), bytearray(1)]], ValueError, f"at most {PAGE}"),
    ([[None] * 64 + [bytearray(1)]], ValueError, "less than 64"),
    ([np.zeros((8, 8), np.uint8)[:, ::2]], TypeError, "contiguous"),
]


@pytest.mark.parametrize(("keys", "error", "told"), WRONG_KEYS)
def test_wrong_keys_are_refused(
    tmp_path: Path, keys: Any, error: type[Exception], told: str
) -> None:
    store = open_disk(tmp_path, 4)
    for call in (store.get_into, store.put_from):
        with pytest.raises(error, match=told):
            call(keys, [bytearray(10)])
    if error is TypeError or len(keys) == 1:
        for verb in (store.contains, store.remove, store.parts_of):
            with pytest.raises(error):
                verb(keys)
    assert store.stats()["misses"] == store.stats()["written"] == 0
    store.close()


@pytest.mark.parametrize(("buffers", "error", "told"), WRONG_BUFFERS)
def test_wrong_buffers_are_refused(
    tmp_path: Path, buffers: Any, error: type[Exception], told: str
) -> None:
    store = open_disk(tmp_path, 4)
    put(store, 1)
    with pytest.raises(error, match=told):
        store.get_into([key(1)], buffers)
    assert store.stats()["misses"] == 0
    store.close()


def test_buffers_that_share_memory_are_refused(tmp_path: Path) -> None:
    store = open_disk(tmp_path, 4)
    put(store, 1, 2)
    memory = np.zeros(2 * PAGE, np.uint8)
    with pytest.raises(ValueError, match="share memory"):
        store.get_into([key(1), key(2)], [memory[:PAGE], memory[PAGE - 1 : -1]])
    assert not memory.any()
    assert store.get_into([key(1), key(2)], [memory[:PAGE], memory[PAGE:]]).result() == 2
    same = content(3)
    assert store.put_from([key(3), key(4)], [same, same]).result() == 2
    store.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"page_bytes": 0}, "page_bytes is 0"),
        ({"fingerprint": b"x"}, "fingerprint has 1 bytes"),
        ({"threads": 0}, "threads is 0"),
        ({"queue_pages": 0}, "queue_pages is 0"),
        ({"breaker_failures": 0}, "breaker_failures is 0"),
        ({"breaker_seconds": float("nan")}, "breaker_seconds"),
        ({"slow_seconds": -1.0}, "slow_seconds"),
        ({"tier": "host:1GiB"}, "must be a disk tier such as 'disk:"),
        ({"tier": "disk:/a"}, "lacks a size"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    right: dict[str, Any] = {
        "tier": f"disk:{tmp_path / 'new'}:{quota(4)}",
        "page_bytes": PAGE,
        "fingerprint": FINGERPRINT,
    }
    given = right | options
    with pytest.raises(ValueError, match=told):
        DiskStore(given.pop("tier"), **given)
    assert not (tmp_path / "new").exists()
    least = quota(1)
    with pytest.raises(ValueError, match=rf"quota of {least - 1} bytes, must be {least} "):
        DiskStore(DiskTier(((str(tmp_path), least - 1),)), page_bytes=PAGE, fingerprint=FINGERPRINT)


def test_a_second_store_is_told_who_has_the_directory(tmp_path: Path) -> None:
    store = open_disk(tmp_path, 4)
    with pytest.raises(KVCacheError, match=f"{tmp_path} is in use by process {os.getpid()};"):
        open_disk(tmp_path, 4)
    code = (
        "import sys\nfrom pathlib import Path\nfrom stored_pages import open_disk\n"
        "from kvcore import KVCacheError\n"
        "try:\n    open_disk(Path(sys.argv[1]), 4)\n"
        "except KVCacheError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    told = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": HELPERS},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{tmp_path} is in use by process {os.getpid()};" in told.stdout
    store.close()
    open_disk(tmp_path, 4).close()


def test_slots_of_another_size_are_refused(tmp_path: Path) -> None:
    open_disk(tmp_path, 4).close()
    with pytest.raises(KVCacheError, match="kvcore tier purge"):
        open_disk(tmp_path, 4, 3 * PAGE)


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KVCacheError, match="Not a directory"):
        open_disk(tmp_path / "file" / "store", 4)


def open_files() -> set[str]:
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(each.readlink()))
        except FileNotFoundError:  # the descriptor of this listing
            continue
    return found


def test_nothing_stays_behind_a_closed_store(tmp_path: Path) -> None:
    threads = len(list(Path("/proc/self/task").iterdir()))
    for _ in range(3):
        store = open_disk(tmp_path, 8, threads=5)
        assert put(store, 1, 2, 3, 4, 5) == 5
        assert any(str(tmp_path) in each for each in open_files())
        store.close()
        assert len(list(Path("/proc/self/task").iterdir())) <= threads
        assert not any(str(tmp_path) in each for each in open_files())
    del store
    gc.collect()
    dropped = open_disk(tmp_path, 8)
    del dropped
    open_disk(tmp_path, 8).close()


def test_a_handle_that_is_dropped_leaves_its_memory_until_the_end(tmp_path: Path) -> None:
    store = open_disk(tmp_path, 64, queue_pages=4)
    for number in range(32):
        store.put_from([key(number)], [bytearray(content(number))])
    assert get(store, *range(32)) == 32
    handle = store.put_from([key(40)], [memory := bytearray(content(40))])
    with pytest.raises(BufferError):
        memory.append(1)  # the handle keeps the buffer alive
    store.close()
    assert handle.done()
    assert handle.result() == 1
    with pytest.raises(
        ValueError, match="timeout is negative, must be at least 0 seconds, or None"
    ):
        handle.wait(-1)


def test_threads_share_a_store(tmp_path: Path) -> None:
    store = open_disk(tmp_path, 16, queue_pages=8)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(30):
                numbers = [(seed * 7 + i + j) % 20 for j in range(3)]
                put(store, *numbers)
                get(store, *numbers)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.health().hits > 0
    store._store.check_integrity()
    store.close()


FORK = """
import os, sys
from pathlib import Path
from stored_pages import get, open_disk, put
from kvcore import KVCacheError
store = open_disk(Path(sys.argv[1]), 4)
put(store, 1)
child = os.fork()
if child == 0:
    refused = 0
    for call in (lambda: put(store, 2), lambda: get(store, 1), store.stats):
        try:
            call()
        except KVCacheError as error:
            refused += "fork" in str(error)
    store.close()
    del store
    os._exit(0 if refused == 3 else 1)
assert os.waitpid(child, 0)[1] == 0
assert get(store, 1) == 1
try:
    open_disk(Path(sys.argv[1]), 4)
except KVCacheError:
    print("still the parent's")
store.close()
"""


def test_a_fork_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": HELPERS},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "still the parent's\n", done.stderr


def test_checksums_are_those_of_castagnoli() -> None:
    assert _core.crc32c(b"123456789") == 0xE3069283
    assert _core.crc32c(b"6789", _core.crc32c(b"12345")) == 0xE3069283
    with pytest.raises(TypeError, match="not 'str'; pass a contiguous array of bytes"):
        _core.crc32c("text")


@pytest.fixture
def full_soon(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "256k") as folder:
        yield folder


def test_a_full_disk_keeps_the_pages_that_fit(full_soon: Path) -> None:
    store = open_disk(full_soon, 64)  # 768 KiB
    for number in range(64):
        put(store, number)
        get(store, number)
    assert get(store, 63) == 1
    stats = store.stats()
    assert stats["errors"] > 0
    assert 8 <= stats["stored"] <= 21
    assert stats["corrupt"] == 0
    assert stats["breaker"] == "closed"
    store._store.check_integrity()
    store.close()
    store = open_disk(full_soon, 64)
    assert store.stats()["restored"] == stats["stored"]
    assert get(store, 63) == 1
    store.close()


def test_paths_need_not_be_unicode(tmp_path: Path) -> None:
    folder = tmp_path / "kv\udcff"
    store = open_disk(folder, 4)
    assert put(store, 1) == 1
    store.close()
    assert [*os.listdir(os.fsencode(tmp_path))] == [b"kv\xff"]  # noqa: PTH208 - as bytes
    store = open_disk(folder, 4)
    assert get(store, 1) == 1
    store.close()
