# SPDX-License-Identifier: Apache-2.0
"""A process keeps only the images of living requests and of its caches, with any callers."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import numpy as np

import kvcore
from builders import claimed, make_context, make_manager, put_in_cache
from kvcore.native.contexts import drop_unused, num_stand_ins

ANY_ORDER_OF_CALLS = True  # no engine makes random calls

FEWEST = 4096  # a sweep begins at this number of images


def known() -> int:
    gc.collect()
    drop_unused()
    return num_stand_ins()


def test_unique_images_are_forgotten_with_their_pages() -> None:
    start = known()
    manager = make_manager(2, 64, enable_runtime_checks=False)
    most = 0
    for n in range(100_000):
        context = claimed(manager, [1, 2, 3, 4, 5], extra_keys=[(2, 2, b"%d" % n)])
        assert manager.maybe_reserve(context)
        assert context.start_idx == (0 if n == 0 else 2)
        manager.fetch([context])
        context.update(0)
        manager.step([context])
        manager.release(context.request_id)
        most = max(most, num_stand_ins())
    assert most <= max(FEWEST, 2 * (start + 64)) + 1
    assert known() <= start + 64
    assert manager.match_prefix([1, 2, 3, 4], extra_keys=[(2, 2, b"99999")]) == 4
    del manager, context
    assert known() == start


def test_what_lives_is_never_forgotten() -> None:
    start = known()
    manager = make_manager(2, 64)
    tree = kvcore.PrefixTree(1)
    held = [make_context([7, 8], extra_keys=[(0, 2, b"held %d" % n)]) for n in range(50)]
    put_in_cache(manager, [1, 2, 3], extra_keys=[(0, 2, b"cached")])
    tree.insert([1], [5], extra_keys=[(0, 1, b"in a tree")])
    for n in range(3 * FEWEST):
        make_context([1], extra_keys=[(0, 1, b"passing %d" % n)])
    assert num_stand_ins() < start + 3 * FEWEST
    assert known() == start + 52
    assert manager.match_prefix([1, 2, 3], extra_keys=[(0, 2, b"cached")]) == 2
    assert tree.match([1], extra_keys=[(0, 1, b"in a tree")])[0].tolist() == [5]
    for context in held:
        manager.claim(context.request_id)
        assert manager.maybe_reserve(context)
        assert context.start_idx == 0
        manager.release(context.request_id)
    del tree
    manager.reset_prefix_cache()
    assert known() == start + 50
    for context in held:
        context.rewind(1)
        assert context.extra_keys is not None
    held.clear()
    del context
    assert known() == start


def test_threads_with_managers_of_their_own_and_a_common_one() -> None:
    start = known()
    common = make_manager(2, 400, enable_runtime_checks=False)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        own = make_manager(2, 40, enable_runtime_checks=False)
        try:
            for step in range(1500):
                for manager in (own, common):
                    use(manager, rng, f"{seed}-{step}")
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    def use(manager: Any, rng: random.Random, name: str) -> None:
        image = b"%d" % rng.randrange(3000)
        context = make_context([1, 2, 3, 3, 4, 5], name, extra_keys=[(2, 2, image)])
        manager.claim(name)
        if manager.maybe_reserve(context):
            manager.fetch([context])
            before = np.array(manager.get_req_blocks(name)[:2])
            context.update(0)
            manager.step([context])
            size, pages = manager.match_prefix(
                [1, 2, 3, 3], extra_keys=[(2, 2, image)], return_pages=True
            )
            assert size == 4
            assert pages[0] == before[0] or len(pages) == 2
        manager.release(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drop_unused()
    for thread in threads:
        thread.join()
    assert not errors, errors
    common.check_integrity()
    common.reset_prefix_cache()
    assert known() == start
