# SPDX-License-Identifier: Apache-2.0
"""A prefix cache out of a file: pages are found once they are filled and checked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore._hot.snapshots import (
    HeldStandIns,
    ImportedColumns,
    expect_keys,
    import_columns,
    is_keyed,
    num_resets,
)
from kvcore.layers.layer_map import column_tokens
from kvcore.snapshots.files import opened_regular
from kvcore.snapshots.page_bytes import PageBytes
from kvcore.snapshots.rows import Pools
from kvcore.snapshots.saved_runs import (
    COLUMNS,
    NAME,
    PARENT,
    RANK,
    REPLICA,
    SavedRuns,
    column_starts,
    described,
    fingerprint,
)
from kvcore.snapshots.saving import SavedCache, lanes_of, portion_of, require_cache
from kvcore.snapshots.snapshot_files import SnapshotReader
from kvcore.snapshots.tensors import damaged

__all__ = ["RestoredCache", "check_snapshot", "restore_cache"]

_AT_A_TIME = 8 << 20  # bytes that are read to be checked

_LOWEST_PLAIN = -(1 << 30)  # lower tokens stand for others where extra keys are used


@dataclass(frozen=True)
class RestoredCache:
    """Tell what came back of a snapshot.

    Attributes
    ----------
    num_tokens : int
        That are cached now, those that were before included.
    num_pages, num_states : int
        That were written.
    damaged : int
        Pages and checkpoints that are not what was written, and were left out.
    is_whole : bool
        All tokens of the file are cached now; else pages were damaged, there was no room, or the
        caches were reset meanwhile.
    """

    num_tokens: int
    num_pages: int
    num_states: int
    damaged: int
    is_whole: bool


def restore_cache(pools: Pools, path: str | os.PathLike[str], model: str | None) -> RestoredCache:
    """Bring back what was saved; see ``PagedKVCacheManager.restore``."""
    require_cache(pools, "restore")
    with opened_regular(path) as file:
        reader = SnapshotReader(file)
        _check_format(pools, reader, model)
        return _Restoring(pools, reader, _runs_of(reader)).restore()


def check_snapshot(path: str | os.PathLike[str]) -> SavedCache:
    """Read a snapshot and compare all of it with its checksums, without a manager.

    Parameters
    ----------
    path : str or path

    Returns
    -------
    SavedCache

    Raises
    ------
    ValueError
        Anything in it is not what was written, it is of another version, or no regular file.
    OSError
        The file cannot be read.

    Notes
    -----
    Costs reading the file.
    """
    with opened_regular(path) as file:
        reader = SnapshotReader(file)
        saved = _runs_of(reader)
        for name, count in reader.counts.items():
            step = max(1, _AT_A_TIME // max(1, reader.sizes[name]))
            for first in range(0, count, step):
                _, is_good = reader.rows(name, first, min(step, count - first))
                if not is_good.all():
                    row = first + int(np.argmin(is_good))
                    raise damaged(f"the checksum of row {row} of tensor {name!r} is another")
        size = file.seek(0, os.SEEK_END)
    return SavedCache(saved.tokens.size, reader.counts["pages"], reader.counts["states"], size)


def _runs_of(reader: SnapshotReader) -> SavedRuns:
    for name in ("replicas", "pages_per_column"):
        value = reader.about[name]
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise damaged(f"it has no number of {name}")
    lanes, replicas = reader.about["pages_per_column"], reader.about["replicas"]
    return SavedRuns.of_index(reader.index, lanes, reader.counts, replicas)


def _check_format(pools: Pools, reader: SnapshotReader, model: str | None) -> None:
    about, params = reader.about, pools.params
    if about["model"] is not None and not isinstance(about["model"], str):
        raise damaged("its model is no text")
    if model is not None and about["model"] != model:
        raise ValueError(
            f"the snapshot has model {about['model']!r}, must be {model!r}; restore it where that "
            f"model runs"
        )
    own = described(params)
    if about["fingerprint"] != fingerprint(params, about["model"]):
        found = about["params"] if isinstance(about["params"], dict) else {}
        others = [
            f"{name} {str(found.get(name))[:80]}, must be {str(own[name])[:80]}"
            for name in own
            if found.get(name) != own[name]
        ]
        text = "; ".join(others) or "another layout of pages"
        raise ValueError(f"the snapshot has {text}; restore it into a manager for the same model")
    wanted = {
        "pages": PageBytes.of_pages(pools, 0).size,
        "states": PageBytes.of_states(pools, 0).size,
    }
    lanes = reader.about["pages_per_column"]
    if (
        reader.sizes != wanted
        or lanes != lanes_of(pools)
        or reader.index["tokens"].shape[1] != column_tokens(params)
    ):
        raise damaged(f"its pages and states have {reader.sizes} bytes, not {wanted}")


class _Restoring:
    """Fill free pages with those of a file, the most valuable first."""

    def __init__(self, pools: Pools, reader: SnapshotReader, saved: SavedRuns) -> None:
        self._pools = pools
        self._reader = reader
        self._saved = self._with_own_stand_ins(saved)
        self._resets = num_resets(pools.engine)
        self._column = column_tokens(pools.params)
        self._starts = saved.starts()
        self._page_starts = column_starts(saved.present.sum(axis=1))
        self._has_state = np.zeros(len(saved.tokens), np.bool_)
        self._has_state[saved.state_columns] = True
        self._cached = np.zeros(len(saved.runs), np.int64)  # columns of each run
        self._written = np.zeros(len(saved.runs), np.bool_)
        self._num_pages = self._num_states = self._damaged = 0
        self._is_reset = False

    def _with_own_stand_ins(self, saved: SavedRuns) -> SavedRuns:
        """Replace what stands for tokens with extra keys by what does in this process."""
        self._stand_ins = HeldStandIns()
        low = saved.tokens < _LOWEST_PLAIN
        if not saved.stand_ins:
            if low.any() and is_keyed(self._pools.engine):
                raise ValueError(
                    f"the snapshot holds token {saved.tokens.min()}, must be at least "
                    f"{_LOWEST_PLAIN} where extra_keys are used; restore it into a manager of its "
                    f"own"
                )
            return saved
        expect_keys(self._pools.engine)
        tokens = saved.tokens.copy()
        own = {each: self._stand_ins.token_of(name) for each, name in saved.stand_ins.items()}
        for place in np.argwhere(low):
            token = int(tokens[tuple(place)])
            if token not in own:
                raise damaged(f"token {token} stands for nothing")
            tokens[tuple(place)] = own[token]
        fields = {name: getattr(saved, name) for name in saved.__dataclass_fields__}
        return SavedRuns(**fields | {"tokens": tokens})

    # ---- runs --------------------------------------------------------------------------------

    def restore(self) -> RestoredCache:
        replicas = self._pools.params.data_parallel_degree
        runs = self._saved.runs
        for replica in range(replicas):
            own = np.nonzero(runs[:, REPLICA] % replicas == replica)[0]
            self._restore_replica(replica, own)
        for run in np.argsort(runs[:, RANK], kind="stable"):
            if self._written[run] and not self._is_reset:
                self._use(int(run))
        cached = int(self._cached.sum())
        return RestoredCache(
            cached * self._column,
            self._num_pages,
            self._num_states,
            self._damaged,
            not self._is_reset and cached == len(self._saved.tokens) and self._damaged == 0,
        )

    def _restore_replica(self, replica: int, runs: NDArray[Any]) -> None:
        pages = PageBytes.of_pages(self._pools, replica)
        has_room = True
        for run in self._in_order(replica, runs):
            parent = int(self._saved.runs[run, PARENT])
            is_whole = parent < 0 or self._cached[parent] == self._saved.runs[parent, COLUMNS]
            if is_whole and has_room and not self._is_reset:
                has_room = self._restore_run(replica, pages, run)

    def _in_order(self, replica: int, runs: NDArray[Any]) -> list[int]:
        """Return the runs as they were used, the last one behind, where all of them have room.

        So policies that go by what entered first have their order again. Else the most valuable
        ones come first, as in the file.
        """
        needed = sum(
            int(self._page_starts[self._starts[run + 1]] - self._page_starts[self._starts[run]])
            for run in runs
        )
        if needed > self._pools.engine._core.stats(replica).free_pages:  # noqa: SLF001
            return list(map(int, runs))
        order: dict[int, None] = {}
        for run in runs[np.argsort(self._saved.runs[runs, RANK], kind="stable")]:
            path = list(self._saved.path(int(run)))
            order |= dict.fromkeys(path[::-1])
        return list(order)

    def _restore_run(self, replica: int, pages: PageBytes, run: int) -> bool:
        """Bring back what there is room for; return whether there was for all of it."""
        first, end = int(self._starts[run]), int(self._starts[run + 1])
        portion = portion_of(pages.size, lanes_of(self._pools))
        at = first
        while at < end:
            until = min(at + portion, end)
            found = self._restore_columns(replica, pages, run, at, until)
            if found < 0:
                return False
            at += found
            self._cached[run] += found
            if at < until:
                break
        return True

    # ---- columns -----------------------------------------------------------------------------

    def _restore_columns(
        self, replica: int, pages: PageBytes, run: int, begin: int, end: int
    ) -> int:
        """Bring back columns `begin` .. `end` - 1 of the file; return how many are cached now.

        -1: there is no room for all of them.
        """
        parts = self._parts(begin, end)
        while len(parts):
            with self._taken(replica, run, begin, parts) as taken:
                if taken.status not in ("taken", "known"):
                    self._is_reset |= taken.status == "reset"
                    return -1 if taken.status == "no room" else 0
                count = len(taken.parts)
                good = self._fill(replica, pages, begin, parts, taken)
                if good is not None:
                    parts = good
                    continue
                more = begin + count < self._starts[run + 1]
                if taken.status == "taken" and not taken.publish(more):
                    self._is_reset = True
                    return 0
            self._count(run, taken)  # what was known is not used by that
            if count < len(parts):
                self._cached[run] += count
                return -1
            return count
        return 0

    def _parts(self, begin: int, end: int) -> NDArray[np.int32]:
        parts = np.empty((end - begin, 3), np.int32)
        parts[:, 0] = self._saved.windows[begin:end]
        parts[:, 1] = self._saved.passed[begin:end]
        parts[:, 2] = np.where(self._has_state[begin:end], 0, -1)
        return parts

    def _taken(
        self, replica: int, run: int, begin: int, parts: NDArray[np.int32]
    ) -> ImportedColumns:
        prefix = self._saved.prefix(run, self._starts)
        own = len(prefix) // self._column - int(self._saved.runs[run, COLUMNS])
        first = own + begin - int(self._starts[run])
        tokens = prefix[: (first + len(parts)) * self._column]
        name = self._saved.names[self._saved.runs[run, NAME]]
        return import_columns(self._pools.engine, replica, self._resets, name, tokens, first, parts)

    def _count(self, run: int, taken: ImportedColumns) -> None:
        pages, states = int((taken.pages >= 0).sum()), int((taken.parts[:, 2] >= 0).sum())
        self._num_pages += pages
        self._num_states += states
        self._written[run] |= pages + states > 0

    def _fill(
        self,
        replica: int,
        pages: PageBytes,
        begin: int,
        parts: NDArray[np.int32],
        taken: ImportedColumns,
    ) -> NDArray[np.int32] | None:
        """Write what is to be written, where all of it is whole.

        Else return what is to be taken in its place: the columns in front of the first page that is
        damaged, without checkpoints that are.
        """
        good = parts[: len(taken.parts)].copy()
        wanted = taken.pages >= 0
        present = self._saved.present[begin : begin + len(wanted)]
        if (wanted & ~present).any():
            raise damaged("a column lacks pages of its windows")
        content, is_good = self._pages_of(begin, wanted, present)
        bad = np.zeros(wanted.shape, np.bool_)
        bad[wanted] = ~is_good
        states, is_good_state = self._states_of(begin, taken.parts)
        bad_states = np.nonzero(taken.parts[:, 2] >= 0)[0][~is_good_state]
        self._damaged += int(bad.sum()) + len(bad_states)
        if bad.any() or len(bad_states):
            good[bad_states, 2] = -1
            self._has_state[begin + bad_states] = False
            columns = np.nonzero(bad.any(axis=1))[0]
            return good[: columns[0]] if len(columns) else good
        pages.write(taken.pages[wanted], content)
        slots = taken.parts[taken.parts[:, 2] >= 0, 2]
        if len(slots):
            PageBytes.of_states(self._pools, replica).write(slots, states)
        return None

    def _pages_of(
        self, begin: int, wanted: NDArray[np.bool_], present: NDArray[np.bool_]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        numbers = np.cumsum(present.reshape(-1)).reshape(present.shape) - 1
        rows = numbers[wanted]
        if len(rows) == 0:
            return np.empty((0, 0), np.uint8), np.empty(0, np.bool_)
        low, high = int(rows.min()), int(rows.max()) + 1
        first = int(self._page_starts[begin]) + low
        content, is_good = self._reader.rows("pages", first, high - low)
        return content[rows - low], is_good[rows - low]

    def _states_of(
        self, begin: int, parts: NDArray[np.int32]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        columns = begin + np.nonzero(parts[:, 2] >= 0)[0]
        rows = np.searchsorted(self._saved.state_columns, columns)
        found = [self._reader.rows("states", int(row), 1) for row in rows]
        size = self._reader.sizes["states"]
        content = [np.empty((0, size), np.uint8), *(state for state, _ in found)]
        is_good = [np.empty(0, np.bool_), *(good for _, good in found)]
        return np.concatenate(content), np.concatenate(is_good)

    def _use(self, run: int) -> None:
        """Have a run be used last of all: what was cached before goes in front of it."""
        begin = int(self._starts[run])
        parts = self._parts(begin, begin + int(self._cached[run]))
        if len(parts) == 0:
            return
        replica = int(self._saved.runs[run, REPLICA]) % self._pools.params.data_parallel_degree
        with self._taken(replica, run, begin, parts) as taken:
            if taken.status == "known" and len(taken.parts) == len(parts):
                taken.publish(False)
