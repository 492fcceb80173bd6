# SPDX-License-Identifier: Apache-2.0
"""Count the Python calls between a request and a disk below the host tier, and time the pages.

``python bench/disk_calls.py [--rounds N] [--names]`` serves prompts of 4 pages of 64 KiB, which are
only on disk, with a new manager for each prompt. The rows: a ``maybe_reserve`` that loads the pages
before it returns; with ``async_onload``, a ``maybe_reserve``, the thread that loads the pages and
the ``wait`` for them; and the thread that writes 4 committed pages to the disk. Each row has the
Python functions that were called, in all threads, the files of kvcore that hold them, the calls of
native code in which the disk looks for pages, and the median time of a page.

``KVCORE_BENCH_DIR`` names a directory on the disk to measure. The default is the system's directory
for temporary files.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from types import FrameType
from typing import Any

import kvcore

_PAGE, _PAGES = 16, 4
_ROOT = str(Path(kvcore.__file__).parent)
_PARAMS = kvcore.KVCacheParams("bfloat16", 8, 64, 2, _PAGE, enable_prefix_caching=True)


class Calls:
    """Count the calls of Python functions in all threads, and the look-ups of a disk."""

    def __init__(self) -> None:
        self.functions: Counter[tuple[str, str]] = Counter()
        self.lookups = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count calls in this thread, and in threads that start meanwhile."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "c_call" and getattr(argument, "__name__", "") == "parts_of":
            self.lookups += 1
        if event == "call" and code.co_filename != __file__:
            self.functions[code.co_filename, code.co_qualname] += 1

    @property
    def files(self) -> set[str]:
        """The files of kvcore in which functions were called."""
        found = {name for name, _ in self.functions}
        return {name.removeprefix(_ROOT) for name in found if name.startswith(_ROOT)}


def _manager(folder: Path, *, async_onload: bool) -> kvcore.PagedKVCacheManager:
    tiers = kvcore.TierOptions(
        tiers=["host:64MiB", f"disk:{folder}:256MiB"], async_onload=async_onload
    )
    return kvcore.PagedKVCacheManager(_PARAMS, 4, 1024, num_pages=64, tiers=tiers)


def _prompt(number: int) -> list[int]:
    return [number, *range(_PAGES * _PAGE)]


def _commit(mgr: kvcore.PagedKVCacheManager, number: int) -> None:
    context = kvcore.TextGenerationContext("w", _prompt(number))
    mgr.claim("w")
    mgr.fetch([context])
    context.update(1)
    mgr.step([context])
    mgr.release("w")


def _load(mgr: kvcore.PagedKVCacheManager, number: int, measure: Callable[..., Any]) -> None:
    context = kvcore.TextGenerationContext("r", _prompt(number))
    mgr.claim("r")

    def work() -> None:
        assert mgr.maybe_reserve(context)
        assert mgr.wait(context, timeout=60)

    measure(work)
    assert context.start_idx == _PAGES * _PAGE
    mgr.release("r")


def _write(mgr: kvcore.PagedKVCacheManager, number: int, measure: Callable[..., Any]) -> None:
    def work() -> None:
        _commit(mgr, number)
        assert mgr.flush(timeout=60)

    measure(work)


def _measured(
    scene: Callable[..., None], folder: Path, rounds: int, *, async_onload: bool
) -> tuple[Calls, float]:
    """Return the calls of a scene, and the median of its us in `rounds` other managers."""
    calls, spent = Calls(), []

    def count(work: Callable[[], None]) -> None:
        with calls.counted():
            work()

    def time(work: Callable[[], None]) -> None:
        start = perf_counter_ns()
        work()
        spent.append((perf_counter_ns() - start) / 1e3)

    for i in range(rounds + 1):
        with _manager(folder, async_onload=async_onload) as mgr:
            scene(mgr, i, time if i < rounds else count)  # count after all imports
    return calls, statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--names", action="store_true", help="print the functions")
    args = parser.parse_args()
    print("| call | Python calls | files | look-ups | us per page |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVCORE_BENCH_DIR")) as name:
        disk = Path(name) / "disk"
        rows = [
            ("commit 4 pages and write them to the disk", _write, False),
            ("maybe_reserve that loads 4 pages", _load, False),
            ("the same in a thread, and wait", _load, True),
        ]
        for work, scene, is_async in rows:
            calls, spent = _measured(scene, disk, args.rounds, async_onload=is_async)
            total = calls.functions.total()
            print(f"| {work} | {total} | {len(calls.files)} | {calls.lookups} "
                  f"| {spent / _PAGES:.1f} |")  # fmt: skip
            if args.names:
                for (file, function), n in sorted(calls.functions.items()):
                    print(f"    {n:4} {file.removeprefix(_ROOT)} {function}")


if __name__ == "__main__":
    main()
