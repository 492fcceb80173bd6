# SPDX-License-Identifier: Apache-2.0
"""A manager's cache events: their kinds, keys, tokens and names."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from event_mirror import Mirror, manager_of, run, taken
from kvcore import KVCacheParams, TextGenerationContext
from kvcore.cache_events import CacheCleared, PagesRemoved, PagesStored
from kvcore.errors import KVCacheError
from kvcore.groups import FullAttention, SlidingWindow
from kvcore.keys import page_keys


def test_a_prompt_and_what_goes_on_from_it() -> None:
    mgr = manager_of()
    run(mgr, [1, 2, 3, 4, 5])
    run(mgr, [1, 2, 3, 4, 7, 8, 9])
    first, second = taken(mgr)
    keys = page_keys([1, 2, 3, 4, 7, 8], 2, seed=mgr.fingerprint)
    assert isinstance(first, PagesStored)
    assert isinstance(second, PagesStored)
    assert (first.keys, first.parent_key, first.parent_hash) == (keys[:2], None, None)
    assert first.hashes == [int.from_bytes(key[-8:], "big") for key in keys[:2]]
    assert (second.keys, second.parent_key) == (keys[2:], keys[1])
    assert second.parent_hash == first.hashes[1]
    assert first.tokens.tolist() == [1, 2, 3, 4]
    assert first.tokens.dtype == np.int32
    assert second.tokens.tolist() == [7, 8]
    assert (first.medium, first.group_idx, first.replica, first.page_size) == ("GPU", None, 0, 2)
    assert (first.extra_key, first.cache_salt, first.extra_keys) == (None, None, None)
    assert repr(second) == "PagesStored(1 pages, GPU, replica 0)"
    assert taken(mgr) == []


def test_evicted_pages_and_a_reset() -> None:
    mgr = manager_of(num_pages=4)
    run(mgr, [1, 2, 3, 4, 5])
    run(mgr, [6, 7, 8, 9, 10, 11, 12])
    stored, removed, other = taken(mgr)
    assert isinstance(removed, PagesRemoved)
    assert set(removed.keys) == set(stored.keys)
    assert removed.hashes == [int.from_bytes(key[-8:], "big") for key in removed.keys]
    assert len(other) == 3
    run(mgr, [20, 21, 22])
    mgr.reset_prefix_cache()
    (cleared,) = taken(mgr)
    assert isinstance(cleared, CacheCleared)
    assert repr(cleared) == "CacheCleared(replica 0)"


def test_what_is_held_over_a_reset_is_not_told_again() -> None:
    mgr = manager_of()
    context = TextGenerationContext("r", [1, 2, 3, 4, 5])
    mgr.claim("r")
    mgr.fetch([context])
    context.update(0)
    mgr.step([context])
    assert not mgr.reset_prefix_cache()
    (cleared,) = taken(mgr)
    assert isinstance(cleared, CacheCleared)
    for _ in range(4):
        mgr.fetch([context])
        context.update(0)
        mgr.step([context])
    mgr.release("r")
    assert taken(mgr) == []


def test_names_and_extra_keys() -> None:
    mgr = manager_of()
    run(mgr, [1, 2, 3, 4, 5], cache_salt="tenant", extra_key="lora")
    images = [(1, 4, b"cat"), (5, 2, b"dog")]
    run(mgr, list(range(1, 10)), extra_keys=images)
    run(mgr, [*range(1, 9), 30, 31, 32], extra_keys=images)
    named, seen, more = taken(mgr)
    options: dict[str, Any] = {"cache_salt": "tenant", "extra_key": "lora"}
    assert named.keys == page_keys([1, 2, 3, 4], 2, seed=mgr.fingerprint, **options)
    assert (named.extra_key, named.cache_salt) == ("lora", "tenant")
    prompt = [*range(1, 9), 30, 31]
    keys = page_keys(prompt, 2, seed=mgr.fingerprint, extra_keys=images)
    assert seen.keys + more.keys == keys
    assert seen.tokens.tolist() + more.tokens.tolist() == prompt
    assert seen.extra_keys == [
        [(b"cat", 1, 4)],
        [(b"cat", -1, 4)],
        [(b"cat", -3, 4), (b"dog", 1, 2)],
        [(b"dog", -1, 2)],
    ]
    assert more.extra_keys is None


def test_a_key_that_goes_on_in_later_chunks() -> None:
    mgr = manager_of()
    tokens = list(range(40, 61))
    context = TextGenerationContext("r", tokens, extra_keys=[(1, 18, b"video")])
    mgr.claim("r")
    for end in (3, 8, 13, 21):
        context.active_idx = end
        mgr.fetch([context])
        context.update(0)
        mgr.step([context])
    told = taken(mgr)
    assert len(told) == 4
    found = [key for event in told for key in event.keys]
    assert found == page_keys(tokens[:20], 2, seed=mgr.fingerprint, extra_keys=[(1, 18, b"video")])


def test_replicas_and_the_host_tier() -> None:
    params = KVCacheParams(
        "float32", 1, 4, 1, page_size=2, enable_prefix_caching=True, data_parallel_degree=2,
        n_devices=2,
    )  # fmt: skip
    mgr = manager_of(params, devices=["cpu", "cpu"], tiers=["host:4KiB"], num_pages=4)
    mirror = Mirror()
    for first in range(0, 120, 12):
        run(mgr, list(range(first, first + 7)), replica=(first // 12) % 2)
        mirror.read(taken(mgr))
        for replica in range(2):
            assert len(mirror.of(replica)) == mgr._core.stats(replica).cached_pages
            below = mgr._core.stats(replica).host_cached_pages
            assert len(mirror.of(replica, "CPU")) == below
    assert mirror.of(1, "CPU") - mirror.of(1)


def test_a_window_that_is_lost_is_one_groups() -> None:
    params = KVCacheParams(
        "float32", 1, 4, 2, page_size=2, enable_prefix_caching=True,
        groups=(FullAttention([0]), SlidingWindow([1], 4)),
    )  # fmt: skip
    mgr = manager_of(params, num_pages=22)
    mirror = Mirror()
    for first in range(0, 100, 20):
        run(mgr, list(range(first, first + 13)))
        mirror.read(taken(mgr))
        prompt = list(range(first, first + 12))
        keys = page_keys(prompt, 2, seed=mgr.fingerprint)
        assert set(keys) <= mirror.of(group=0)
        assert keys[-1] in mirror.of(group=1)
    assert mirror.of(group=1) < mirror.of(group=0)


@pytest.mark.parametrize("events", [8, 1])
def test_a_queue_that_overflows_begins_again(events: int) -> None:
    mgr = manager_of(events=events)
    mirror = Mirror()
    for first in range(0, 200, 20):
        for shift in range(3):
            run(mgr, list(range(first + 100 * shift, first + 100 * shift + 7)))
        told = taken(mgr)
        assert isinstance(told[0], CacheCleared)
        mirror.read(told)
        assert len(mirror.of()) == mgr.num_cached_blocks
    run(mgr, list(range(1000, 1003)))
    told = taken(mgr)
    assert any(isinstance(event, PagesStored) for event in told)
    mirror.read(told)
    assert len(mirror.of()) == mgr.num_cached_blocks


def test_snapshots_and_moved_requests(tmp_path: Any) -> None:
    mgr, other = manager_of(), manager_of()
    run(mgr, [1, 2, 3, 4, 5])
    mgr.snapshot(tmp_path / "cache")
    other.restore(tmp_path / "cache")
    mirror = Mirror()
    mirror.read(taken(other))
    assert mirror.of() == set(page_keys([1, 2, 3, 4], 2, seed=mgr.fingerprint))


def test_stores_tell_what_they_have(tmp_path: Any) -> None:
    with manager_of(tiers=["host:4KiB", f"disk:{tmp_path}:1MiB"]) as mgr:
        run(mgr, [1, 2, 3, 4, 5])
        assert mgr.flush(10.0)
        mirror = Mirror()
        told = taken(mgr)
        mirror.read(told)
        keys = page_keys([1, 2, 3, 4], 2, seed=mgr.fingerprint)
        assert mirror.of(medium="STORAGE") == set(keys)
        stored = [event for event in told if event.medium == "STORAGE"]
        assert (stored[0].parent_key, stored[0].tokens.size) == (None, 0)


def test_eight_threads() -> None:
    mgr = manager_of(num_pages=64)
    mirror = Mirror()
    stop = threading.Event()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(60):
                name = f"{number}.{i}"
                context = TextGenerationContext(name, [number % 4, i % 5, *range(i % 7, i % 7 + 5)])
                mgr.claim(name)
                mgr.fetch([context])
                context.update(0)
                mgr.step([context])
                mgr.release(name)
                if i % 20 == 0:
                    mgr.reset_prefix_cache()
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    def read() -> None:
        try:
            while not stop.is_set():
                mirror.read(taken(mgr))
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    reader = threading.Thread(target=read)
    for thread in [*threads, reader]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    reader.join()
    assert failures == []
    mirror.read(taken(mgr))
    assert len(mirror.of()) == mgr.num_cached_blocks


def test_wrong_arguments_and_managers_without_events() -> None:
    mgr = manager_of(events=False)
    with pytest.raises(ValueError, match="events=True"):
        taken(mgr)
    for events, kind in [(0, ValueError), (-1, ValueError), ("yes", TypeError), (1.5, TypeError)]:
        with pytest.raises(
            kind, match=r"events is a .*, must be an int|events is -?[0-9]+, must be "
        ):
            manager_of(events=events)
    with pytest.raises(TypeError, match="call take_events"):
        PagesStored()
    with pytest.raises(TypeError, match="call take_events"):
        CacheCleared()
    mgr.close()
    with pytest.raises(KVCacheError, match="is closed; make another one"):
        taken(mgr)
