# SPDX-License-Identifier: Apache-2.0
"""A killed writer: every page that can be found afterwards equals the stored page."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from programs import HELPERS
from stored_pages import content, get, key, open_disk, put

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

# Forks a writer for each line of its input, so Python starts only once.
WRITERS = """
import os, sys
from pathlib import Path
from stored_pages import content, key, open_disk

def write(number):
    store = open_disk(Path(sys.argv[1]), 24)
    while True:
        numbers = range(number, number + 4)
        store.put_from([key(n) for n in numbers], [content(n) for n in numbers])
        store.remove([key(number)])
        number += 3
        print("put", flush=True)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        write(int(line))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""


class Writers:
    """A process that starts writers of a directory, one at a time, and kills each."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WRITERS, str(folder)],
            env=os.environ | {"PYTHONPATH": HELPERS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def write_and_die(self, begin: int, batches: int) -> int:
        """Write some batches from page `begin` on; return a number after the last page."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{begin}\n")
        self._process.stdin.flush()
        told: list[str] = []
        while told.count("put\n") < batches or not any(each.strip().isdigit() for each in told):
            told.append(self._process.stdout.readline())
            assert told[-1], "the writers have ended"
        os.kill(next(int(each) for each in told if each.strip().isdigit()), signal.SIGKILL)
        while told[-1] != "killed\n":
            told.append(self._process.stdout.readline())
        return begin + 3 * (told.count("put\n") + 2)

    def close(self) -> None:
        self._process.communicate()


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
    writers = Writers(folder)
    for _ in range(times):
        end = writers.write_and_die(begin, rng.randrange(1, 20))
        exact += check_all(folder, range(max(0, begin - 100), end))
        begin = end
    writers.close()
    assert exact > times  # the store has pages


def test_a_killed_writer_leaves_right_pages(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 5)


@pytest.mark.slow
def test_a_writer_killed_often_leaves_right_pages(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 60)


@pytest.mark.parametrize("damages", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_files_serve_no_wrong_page(tmp_path: Path, damages: int) -> None:
    """Bytes that change under an open store, or while no process has the directory open."""
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
