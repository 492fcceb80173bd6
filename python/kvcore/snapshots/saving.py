# SPDX-License-Identifier: Apache-2.0
"""A prefix cache into a file, while others use it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.snapshots import (
    CachedRuns,
    HeldStandIns,
    cached_runs,
    export_columns,
    is_keyed,
    num_resets,
)
from kvcore.errors import KVCacheError
from kvcore.layers.layer_map import column_tokens, pages_per_column
from kvcore.snapshots.files import replacing
from kvcore.snapshots.page_bytes import PageBytes
from kvcore.snapshots.rows import Pools
from kvcore.snapshots.saved_runs import SavedRuns, described, fingerprint, in_worth
from kvcore.snapshots.snapshot_files import SnapshotWriter

__all__ = ["SavedCache", "lanes_of", "portion_of", "require_cache", "save_cache"]

_TRIES = 16  # of a snapshot, while others reset the caches
_PORTION = 8 << 20  # bytes that are copied at a time
_PARENT, _NAME, _FIRST, _COLUMNS, _RANK = range(5)


@dataclass(frozen=True)
class SavedCache:
    """Tell what a snapshot has.

    Attributes
    ----------
    num_tokens : int
        Cached ones, of all replicas.
    num_pages : int
    num_states : int
        Checkpoints.
    num_bytes : int
        Of the file.
    """

    num_tokens: int
    num_pages: int
    num_states: int
    num_bytes: int


class _CacheWasResetError(Exception):
    """What was copied before is not what is cached now."""


def lanes_of(pools: Pools) -> int:
    """Return the pages that a column has at most."""
    return sum(pages_per_column(pools.params))


def portion_of(page_bytes: int, lanes: int) -> int:
    """Return the columns that are copied, and held, at a time."""
    return max(1, _PORTION // (page_bytes * lanes))


def require_cache(pools: Pools, verb: str) -> None:
    """Raise ValueError for a manager that has no cached pages whose bytes could be moved."""
    pools.require(verb)
    if not pools.params.enable_prefix_caching:
        raise ValueError(
            f"this manager has no prefix cache to {verb}; give its params "
            f"enable_prefix_caching=True"
        )


def save_cache(pools: Pools, path: str | os.PathLike[str], model: str | None) -> SavedCache:
    """Write what is cached to a path; see ``PagedKVCacheManager.snapshot``."""
    require_cache(pools, "save")
    for _ in range(_TRIES):
        try:
            with replacing(path) as file:
                return _Saving(pools, SnapshotWriter(file)).save(model)
        except _CacheWasResetError:
            continue
    raise KVCacheError(
        f"the prefix cache was reset {_TRIES} times while it was saved; save it between two resets"
    )


class _Saving:
    """Copy one replica after the other, column by column, each held while it is copied."""

    def __init__(self, pools: Pools, writer: SnapshotWriter) -> None:
        self._pools = pools
        self._writer = writer
        self._column = column_tokens(pools.params)
        self._stand_ins = HeldStandIns()
        self._names_of_tokens: dict[int, bytes] = {}
        self._resets = num_resets(pools.engine)
        self._names: dict[bytes, int] = {}
        self._runs: list[list[int]] = []
        self._tokens: list[NDArray[np.int32]] = []
        self._parts: list[NDArray[np.int32]] = []
        self._present: list[NDArray[np.bool_]] = []
        self._prefixes: list[tuple[int, bytes, NDArray[np.int32], int]] = []

    def save(self, model: str | None) -> SavedCache:
        params = self._pools.params
        for replica in range(params.data_parallel_degree):
            self._save_replica(replica)
        states = self._save_states()
        if num_resets(self._pools.engine) != self._resets:
            raise _CacheWasResetError
        lanes = lanes_of(self._pools)
        parts = np.concatenate([np.empty((0, 3), np.int32), *self._parts])
        tokens = [np.empty((0, self._column), np.int32), *self._tokens]
        saved = SavedRuns(
            np.array(self._runs, np.int32).reshape(-1, 5),
            list(self._names),
            np.concatenate(tokens),
            np.concatenate([np.empty((0, lanes), np.bool_), *self._present]),
            parts[:, 0].astype(np.uint8),
            parts[:, 1].astype(np.uint8),
            states,
            self._names_of_tokens,
        )
        about = {
            "model": model,
            "fingerprint": fingerprint(params, model),
            "params": described(params),
            "replicas": params.data_parallel_degree,
            "pages_per_column": lanes,
        }
        sizes = {
            "pages": PageBytes.of_pages(self._pools, 0).size,
            "states": PageBytes.of_states(self._pools, 0).size,
        }
        size = self._writer.finish(sizes, saved.index(), about)
        return SavedCache(saved.tokens.size, int(saved.present.sum()), len(states), size)

    def _save_replica(self, replica: int) -> None:
        found = cached_runs(self._pools.engine, replica)
        if found.num_resets != self._resets:
            raise _CacheWasResetError
        pages = PageBytes.of_pages(self._pools, replica)
        starts = np.concatenate([[0], np.cumsum(found.runs[:, _COLUMNS], dtype=np.int64)])
        numbers = np.full(len(found.runs), -1)  # in the file, of those that are there as a whole
        for run in in_worth(found.runs[:, _RANK], found.runs[:, _FIRST]):
            parent = found.runs[run, _PARENT]
            name = found.names[found.runs[run, _NAME]]
            if not _is_namespace(name) or (parent >= 0 and numbers[parent] < 0):
                continue
            prefix = _prefix(found, starts, int(run))
            if not self._knows(prefix):
                continue
            kept = self._save_run(replica, pages, name, prefix, int(found.runs[run, _FIRST]))
            if kept == 0:
                continue
            whole = kept == found.runs[run, _COLUMNS]
            number = len(self._runs)
            numbers[run] = number if whole else -1
            self._tokens.append(found.tokens[starts[run] : starts[run] + kept])
            above = -1 if parent < 0 else int(numbers[parent])
            place = self._names.setdefault(name, len(self._names))
            self._runs.append([replica, above, place, kept, int(found.runs[run, _RANK])])

    def _knows(self, prefix: NDArray[np.int32]) -> bool:
        """Remember what tokens of a prefix stand for; False where they stand for nothing any more.

        The lowest tokens do in a manager that has seen extra keys.
        """
        if not is_keyed(self._pools.engine):
            return True
        for token in np.unique(prefix[prefix < -(1 << 30)]).tolist():
            if token in self._names_of_tokens:
                continue
            name = self._stand_ins.name_of(token)
            if name is None:
                return False
            self._names_of_tokens[token] = name
        return True

    def _save_run(
        self, replica: int, pages: PageBytes, name: bytes, prefix: NDArray[np.int32], first: int
    ) -> int:
        """Copy the columns of a run from `first` on; return how many were still cached."""
        self._prefixes.append((replica, name, prefix, first))
        portion = portion_of(pages.size, lanes_of(self._pools))
        column, end = first, len(prefix) // self._column
        while column < end:
            until = min(column + portion, end)
            held = export_columns(
                self._pools.engine,
                replica,
                self._resets,
                name,
                prefix[: until * self._column],
                column,
            )
            with held:
                if len(held.parts) == 0:  # gone, or quotas leave no room to hold them
                    break
                present = held.pages >= 0
                content = pages.read(held.pages[present])
            self._writer.add("pages", content)
            self._parts.append(held.parts)
            self._present.append(present)
            column += len(held.parts)
            if column < until:
                break
        if column == first:
            self._prefixes.pop()
        return column - first

    def _save_states(self) -> NDArray[np.int64]:
        """Copy the checkpoints that are still there; return the columns that they belong to."""
        found: list[int] = []
        begin = 0
        parts = iter(self._parts)
        for (replica, name, prefix, first), run in zip(self._prefixes, self._runs, strict=True):
            states = np.empty((0, 3), np.int32)
            while len(states) < run[3]:
                states = np.concatenate([states, next(parts)])
            for i in np.nonzero(states[:, 2] >= 0)[0].tolist():
                end = (first + i + 1) * self._column
                if self._save_state(replica, name, prefix[:end], first + i):
                    found.append(begin + i)
            begin += run[3]
        return np.array(found, np.int64)

    def _save_state(
        self, replica: int, name: bytes, prefix: NDArray[np.int32], column: int
    ) -> bool:
        states = PageBytes.of_states(self._pools, replica)
        held = export_columns(self._pools.engine, replica, self._resets, name, prefix, column)
        with held:
            slots = held.parts[:, 2]
            if len(slots) == 0 or slots[0] < 0:
                return False
            content = states.read(slots)
        self._writer.add("states", content)
        return True


def _is_namespace(name: bytes) -> bool:
    """Tell whether somebody may ask for a namespace; those of imports are nobody else's."""
    return not name or name[0] in (1, 2, 3)


def _prefix(found: CachedRuns, starts: NDArray[Any], run: int) -> NDArray[np.int32]:
    parts = []
    while run >= 0:
        parts.append(found.tokens[starts[run] : starts[run + 1]])
        run = int(found.runs[run, _PARENT])
    return np.concatenate(parts[::-1]).reshape(-1)
