# SPDX-License-Identifier: Apache-2.0
"""The contents of each column in a snapshot, independent of the order of its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvcore import PagedKVCacheManager
from kvcore.snapshots.cache import NAME, REPLICA, _runs_of
from kvcore.snapshots.format import SnapshotReader
from moved_requests import content, moving_manager, written_request
from same_arrays import assert_same

#: By replica, namespace and tokens up to the column's end: present pages, their bytes, the state.
Contents = dict[tuple[int, bytes, tuple[Any, ...]], tuple[tuple[bool, ...], bytes, bytes | None]]


def contents_of(path: Path) -> Contents:
    """Read a whole snapshot with valid checksums."""
    with path.open("rb") as file:
        reader = SnapshotReader(file)
        saved = _runs_of(reader)
        pages, good = reader.rows("pages", 0, reader.counts["pages"])
        assert good.all()
        states, good = reader.rows("states", 0, reader.counts["states"])
        assert good.all()
    state_of = dict(zip(saved.state_columns.tolist(), states, strict=True))
    starts = saved.starts()
    found: Contents = {}
    page = 0
    for i, run in enumerate(saved.runs.tolist()):
        tokens = [saved.stand_ins.get(t, t) for t in saved.prefix(i, starts).tolist()]
        size = saved.tokens.shape[1]
        end = len(tokens) // size
        for column in range(int(starts[i]), int(starts[i + 1])):
            depth = end - (int(starts[i + 1]) - column) + 1
            count = int(saved.present[column].sum())
            key = (run[REPLICA], saved.names[run[NAME]], tuple(tokens[: depth * size]))
            assert key not in found
            state = state_of.get(column)
            found[key] = (
                tuple(saved.present[column].tolist()),
                pages[page : page + count].tobytes(),
                None if state is None else state.tobytes(),
            )
            page += count
    assert page == len(pages)
    return found


def cached_in(manager: PagedKVCacheManager, folder: Path) -> Contents:
    """Return the contents of the cache, read from a saved file."""
    path = folder / "now.kvcache"
    manager.snapshot(path)
    return contents_of(path)


#: The prompts that `filled` caches.
PROMPTS = [[*range(8), *([i] * 9)] for i in range(5)]


def filled(**options: Any) -> PagedKVCacheManager:
    """Return a manager in which only prompts are cached."""
    manager = moving_manager(**options)
    for tokens in PROMPTS:
        written_request(manager, "r", tokens)
        manager.release("r")
    return manager


def assert_right(manager: PagedKVCacheManager, prompts: list[list[int]] = PROMPTS) -> int:
    """Check the contents of all cached tokens of the prompts; return the number of those tokens."""
    blocks, total = manager._shards[0][0][0], 0
    for tokens in prompts:
        n, pages = manager.match_prefix(tokens, return_pages=True)
        rows = blocks[pages].transpose(1, 2, 0, 3, 4, 5).reshape(2, 2, n, 2, 4)
        for layer in range(2):
            for part in range(2):
                wanted = content(layer, part, tokens[:n], 2, 4)
                assert_same(rows[part, layer], wanted)
        total += n
    return total
