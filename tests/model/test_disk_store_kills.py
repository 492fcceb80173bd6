# SPDX-License-Identifier: Apache-2.0
"""A writer that is killed: every page that can be found afterwards is the one that was stored."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stored_pages import content, get, key, open_disk, put

WRITER = """
import sys
from pathlib import Path
from stored_pages import content, key, open_disk
store = open_disk(Path(sys.argv[1]), 24)
number = int(sys.argv[2])
print("open", flush=True)
while True:
    numbers = range(number, number + 4)
    store.put_from([key(n) for n in numbers], [content(n) for n in numbers])
    store.remove([key(number)])
    number += 3
    print("put", flush=True)
"""


def kill_a_writer(folder: Path, begin: int, rng: random.Random) -> int:
    """Let it write some batches; return a number beyond all of its pages."""
    support = str(Path(__file__).parents[1] / "support")
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(begin)],
        env=os.environ | {"PYTHONPATH": support},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    batches = rng.randrange(1, 40)
    for _ in range(batches):
        assert process.stdout.readline() == "put\n"
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().count("put")
    process.wait()
    process.stdout.close()
    return begin + 3 * (batches + rest + 2)


def check_all(folder: Path, numbers: range) -> int:
    store = open_disk(folder, 24)
    found = [n for n in numbers if store.contains([key(n)]) == [True]]
    exact = sum(get(store, n) for n in found)  # compares bytes
    assert exact + store.health().corrupt == len(found)
    assert put(store, -1) == get(store, -1) == 1
    assert store.remove([key(-1)]) == 1
    store._store.check_integrity()
    store.close()
    return exact


def kill_again_and_again(folder: Path, times: int) -> None:
    rng = random.Random(times)
    begin = exact = 0
    for _ in range(times):
        end = kill_a_writer(folder, begin, rng)
        exact += check_all(folder, range(max(0, begin - 100), end))
        begin = end
    assert exact > times  # the store was not merely empty


def test_a_killed_writer_leaves_right_pages(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 5)


@pytest.mark.slow
def test_a_writer_killed_often_leaves_right_pages(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 60)


@pytest.mark.parametrize("damages", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_files_serve_no_wrong_page(tmp_path: Path, damages: int) -> None:
    """Bytes that change under a store, or while none has the directory."""
    rng = random.Random(damages)
    store = open_disk(tmp_path, 8)
    file = tmp_path / "segment-000000.kv"
    corrupt = 0
    for i in range(damages):
        missing = [n for n in range(8) if store.contains([key(n)]) == [False]]
        assert put(store, *missing) == len(missing)
        size = file.stat().st_size
        at, kind = rng.randrange(size), rng.randrange(20)
        if kind == 0:
            os.truncate(file, at)
        else:
            with file.open("r+b") as target:
                target.seek(at)
                byte = target.read(1)
                target.seek(at)
                target.write(bytes([byte[0] ^ rng.randrange(1, 256)]))
        if i % 10 == 0:
            corrupt += store.health().corrupt
            store.close()
            store = open_disk(tmp_path, 8)
        for number in rng.sample(range(8), 4):
            get(store, number)  # compares bytes
    corrupt += store.health().corrupt
    assert corrupt > damages // 10
    store._store.check_integrity()
    store.close()
    assert content(0) != content(1)
