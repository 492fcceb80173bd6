# SPDX-License-Identifier: Apache-2.0
"""Stores across processes and threads: restarts, forks, full disks, many threads at once."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from kvcore import KVCacheError, TextGenerationContext
from kvcore.stores import MemoryStore
from moved_requests import write_chunk
from programs import printed, program
from small_disks import small_disk
from tiered_requests import LONG, DictStore, kvcore_threads, run, served_by, tiered_manager

ALL = (len(LONG) - 1) // 4 * 4


def test_another_process_finds_the_same_bytes(tmp_path: Path) -> None:
    text = """
        from tiered_requests import LONG, run, tiered_manager
        with tiered_manager(f"disk:{sys.argv[1]}:4MiB", fingerprint="m") as manager:
            print(run(manager, LONG, extra_keys=[(21, 3, b"cat")], cache_salt="s"))
            print(run(manager, LONG, "other", cache_salt="t"))
    """
    assert printed(text, tmp_path, seed=1) == [0, 0]
    assert printed(text, tmp_path, seed=2) == [ALL, ALL]


def test_a_process_that_is_killed_leaves_pages_that_are_right(tmp_path: Path) -> None:
    text = """
        from tiered_requests import run, tiered_manager
        manager = tiered_manager(f"disk:{sys.argv[1]}:8MiB", num_pages=64)
        for i in range(10**6):
            run(manager, [(i * 7 + j) % 11 for j in range(30)], i)
            print(i, flush=True)
    """
    writer = program(text, tmp_path, seed=1)
    assert writer.stdout is not None
    for line in writer.stdout:
        if int(line) >= 20:
            break
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    with tiered_manager(f"disk:{tmp_path}:8MiB", num_pages=64) as manager:
        found = [
            run(manager, [(i * 7 + j) % 11 for j in range(30)], i) for i in range(11)
        ]  # checks every byte
        assert manager.tier_metrics["disk"].corrupt <= 4  # of concurrent writers
    assert sum(found) > 0


# Other libraries of this process, and Python since 3.12, warn at every fork.
@pytest.mark.filterwarnings(
    "ignore:os.fork:RuntimeWarning", "ignore:This process:DeprecationWarning"
)
def test_a_child_of_fork_touches_no_store(tmp_path: Path) -> None:
    store = MemoryStore(1 << 20)
    with tiered_manager(f"disk:{tmp_path}:1MiB", store) as manager:
        run(manager, LONG)
        assert manager.flush()
        child = os.fork()
        if child == 0:
            os._exit(in_child(manager))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert manager.flush()
        assert run(manager, [*LONG, 3], "later") >= ALL
    assert served_by([f"disk:{tmp_path}:1MiB"]) == ALL


def in_child(manager: Any) -> int:
    """Return 0 if a manager works without its stores."""
    try:
        assert run(manager, LONG, "child") >= ALL  # the device has it
        assert run(manager, [7] * 20, "new") == 0
        for call in (manager.flush, lambda: manager.prefetch(LONG)):
            with pytest.raises(KVCacheError, match="of which this one is a fork"):
                call()
        manager.reset_prefix_cache()
        manager.close()
        with pytest.raises(KVCacheError, match="closed"):
            manager.claim("r")
    except BaseException as error:  # noqa: BLE001 - what a test would print
        os.write(2, repr(error).encode())
        return 1
    return 0


def test_a_full_disk_is_a_shorter_hit(tmp_path: Path) -> None:
    prompts = [[(i * 7 + j) % 11 for j in range(30)] for i in range(11)]
    with small_disk(tmp_path, "192k") as folder:
        tiers = ["host:32KiB", f"disk:{folder}:64MiB"]
        with tiered_manager(*tiers, num_pages=64) as manager:
            for i, prompt in enumerate(prompts):
                run(manager, prompt, i)
            manager.flush(timeout=60)
            assert manager.tier_metrics["disk"].errors > 0
        with tiered_manager(*tiers, num_pages=64) as manager:
            last_first = reversed([*enumerate(prompts)])  # the last used prompts are cached
            assert 0 < sum(run(manager, prompt, i) for i, prompt in last_first) < 11 * 28
    assert not [*kvcore_threads()]


class Rough(DictStore):
    """A slow store that sometimes fails."""

    def get_into(self, keys: Any, buffers: Any) -> Any:
        if random.random() < 0.1:
            raise OSError("gone for a moment")
        if random.random() < 0.05:
            self.flip(random.randrange(10**6))
        return super().get_into(keys[: random.randint(0, len(keys))], buffers[: len(keys)])


@pytest.mark.parametrize("is_async", [False, True])
def test_many_threads_reserve_release_and_reset(tmp_path: Path, is_async: bool) -> None:
    options: dict[str, Any] = {"max_batch_size": 24, "num_pages": 300, "async_onload": is_async}
    options |= {"enable_runtime_checks": False}
    tiers = ["host:64KiB", MemoryStore(1 << 17), Rough(), f"disk:{tmp_path}:1MiB"]
    errors: list[BaseException] = []
    stop = Event()

    def serve(manager: Any, seed: int) -> None:
        own = random.Random(seed)
        try:
            for i in range(25):
                start = own.randrange(6)
                tokens = [(start * 3 + j) % 11 for j in range(own.randint(5, 60))]
                act(manager, own, (seed, i), tokens)
        except BaseException as error:  # noqa: BLE001 - what the test raises
            errors.append(error)

    def reset(manager: Any) -> None:
        while not stop.wait(0.01):
            manager.reset_prefix_cache()

    with tiered_manager(*tiers, **options) as manager:
        others = Thread(target=reset, args=(manager,))
        others.start()
        threads = [Thread(target=serve, args=(manager, seed)) for seed in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stop.set()
        others.join()
        assert errors == []
        manager.check_integrity()
        assert manager.num_free_blocks == 300
        manager.flush(timeout=60)
    assert not [*kvcore_threads()]


def act(manager: Any, own: random.Random, name: Any, tokens: list[int]) -> None:
    """Run a random action of an engine with a prompt."""
    kind = own.randrange(4)
    if kind == 0:
        manager.prefetch(tokens)
    elif kind == 1:  # plans, and leaves
        manager.claim(name)
        manager.maybe_reserve(TextGenerationContext(name, tokens))
        manager.release(name)
    else:
        run(manager, tokens, name)


@pytest.mark.parametrize("is_async", [False, True])
def test_close_while_everybody_is_busy(tmp_path: Path, is_async: bool) -> None:
    options: dict[str, Any] = {"max_batch_size": 8, "num_pages": 300, "async_onload": is_async}
    options |= {"enable_runtime_checks": False}
    manager = tiered_manager(f"disk:{tmp_path}:1MiB", Rough(), **options)
    begun = Event()
    errors: list[BaseException] = []

    def serve(seed: int) -> None:
        for i in range(10**6):
            name = (seed, i)
            try:
                context = TextGenerationContext(name, [(seed + j) % 11 for j in range(40)])
                manager.claim(name)
                write_chunk(manager, context, 9)
                manager.release(name)
            except BaseException as error:  # noqa: BLE001 - what the test raises
                if "closed" not in str(error):
                    errors.append(error)
                return
            if i == 3:
                begun.set()

    threads = [Thread(target=serve, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    manager.close()
    for thread in threads:
        thread.join()
    assert errors == []
    assert not [*kvcore_threads()]


def files_of(folder: Path) -> list[str]:
    """Return the open files of this process in a folder."""
    links = [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return [str(each.readlink()) for each in links if str(folder) in str(each.readlink())]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="there is no /proc")
def test_no_file_stays_open_after_close(tmp_path: Path) -> None:
    with tiered_manager(f"disk:{tmp_path}:1MiB") as manager:
        run(manager, LONG)
        assert files_of(tmp_path)
    assert not files_of(tmp_path)
