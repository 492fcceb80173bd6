# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a prefix cache: files written from, and read into, a cache that is in use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.backends.protocol import Place
from kvcore.backends.selection import place_of
from kvcore.backends.shards import arrays_of, tensors_of
from kvcore.errors import KVCacheError
from kvcore.layers.layer_map import column_tokens, pages_per_column
from kvcore.native.snapshots import (
    CachedRuns,
    HeldStandIns,
    ImportedColumns,
    cached_runs,
    expect_keys,
    export_columns,
    import_columns,
    is_keyed,
    num_resets,
)
from kvcore.params import KVCacheParams
from kvcore.snapshots.format import (
    SnapshotReader,
    SnapshotWriter,
    damaged,
    opened_regular,
    replacing,
)
from kvcore.snapshots.request import Pools

__all__ = [
    "PageBytes",
    "RestoredCache",
    "SavedCache",
    "SavedRuns",
    "check_snapshot",
    "column_starts",
    "in_worth",
    "lanes_of",
    "portion_of",
    "require_cache",
    "restore_cache",
    "save_cache",
    "texts",
]

# ---- runs of tokens ------------------------------------------------------------------------------


#: Columns of ``runs``.
REPLICA, PARENT, NAME, COLUMNS, RANK = range(5)


def column_starts(columns: NDArray[Any]) -> NDArray[np.int64]:
    """Return the first column of each run and the end of the last run: int64 [runs + 1]."""
    starts = np.zeros(len(columns) + 1, np.int64)
    np.cumsum(columns, out=starts[1:])
    return starts


def in_worth(ranks: NDArray[Any], firsts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the order of runs from the last to be evicted to the first, parents before children.

    Parameters
    ----------
    ranks : int [runs]
        The rank of each run. The rank of a parent is at least that of its children.
    firsts : int [runs]
        The number of columns before each run.
    """
    return np.lexsort((np.arange(len(ranks)), firsts, -ranks.astype(np.int64)))


def texts(data: NDArray[np.uint8], ends: NDArray[np.int64]) -> list[bytes]:
    """Split concatenated byte strings at their ends."""
    whole = data.tobytes()
    begins = [0, *ends.tolist()]
    return [whole[a:b] for a, b in pairwise(begins)]


def of_texts(given: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Concatenate byte strings, and return their ends also."""
    ends = np.cumsum([len(text) for text in given], dtype=np.int64)
    return np.frombuffer(b"".join(given), np.uint8), ends


def described(params: KVCacheParams) -> dict[str, Any]:
    """Return the params that the layout of a page depends on, by name, for error texts."""
    return {
        "dtype": params.dtype,
        "page_size": params.page_size,
        "num_layers": params.num_layers,
        "n_kv_heads": params.n_kv_heads,
        "row_widths": list(params.row_widths),
        "kv_dim": params.kv_dim,
        "kv_scale_granularity": params.kv_scale_granularity,
        "tensor_parallel_degree": params.tensor_parallel_degree,
        "groups": [repr(group) for group in params.groups or ()],
    }


def fingerprint(params: KVCacheParams, model: str | None) -> str:
    """Return the fingerprint of the layout of pages, as hex."""
    from kvcore.keys import format_fingerprint  # `import kvcore` does not need this module

    return format_fingerprint(params, model or "").hex()


@dataclass(frozen=True)
class SavedRuns:
    """The checked index of a snapshot.

    Attributes
    ----------
    runs : int32 [runs, 5]
        Replica, parent (-1: no parent), namespace, columns, rank. The most valuable run comes
        first, and each run comes after its parent.
    names : list of bytes
    tokens : int32 [columns, tokens of a column]
        Tokens of the runs, concatenated, as the writer's tree stored them.
    present : bool [columns, lanes]
        The pages that each column has. The file stores these pages in this order, without gaps.
    windows, passed : uint8 [columns]
        Bit sets, see ``kvcore.native.snapshots.ExportedColumns``.
    state_columns : int64 [states]
        Columns with a checkpoint, ascending.
    stand_ins : dict of int to bytes
        Tokens that replace tokens with extra keys, and the names of these replacements.
    """

    runs: NDArray[np.int32]
    names: list[bytes]
    tokens: NDArray[np.int32]
    present: NDArray[np.bool_]
    windows: NDArray[np.uint8]
    passed: NDArray[np.uint8]
    state_columns: NDArray[np.int64]
    stand_ins: dict[int, bytes]

    # ---- as tensors --------------------------------------------------------------------------

    def index(self) -> dict[str, NDArray[Any]]:
        """Return the tensors of a file."""
        names, name_ends = of_texts(self.names)
        stand_in_names, stand_in_ends = of_texts(list(self.stand_ins.values()))
        return {
            "runs": self.runs,
            "names": names,
            "name_ends": name_ends,
            "tokens": self.tokens,
            "present": np.packbits(self.present, axis=1),
            "windows": self.windows,
            "passed": self.passed,
            "state_columns": self.state_columns,
            "stand_ins": np.array(list(self.stand_ins), np.int32),
            "stand_in_names": stand_in_names,
            "stand_in_ends": stand_in_ends,
        }

    @classmethod
    def of_index(
        cls, index: Mapping[str, NDArray[Any]], lanes: int, counts: Mapping[str, int], replicas: int
    ) -> SavedRuns:
        """Check the tensors of a file.

        Raises
        ------
        ValueError
            The tensors contradict each other, so ``snapshot`` did not write this file.
        """
        for name, ends in (("names", "name_ends"), ("stand_in_names", "stand_in_ends")):
            _require(_are_ends(index[ends], len(index[name])), f"{ends} are no ends of {name}")
        stand_ins = index["stand_ins"].tolist()
        names = texts(index["stand_in_names"], index["stand_in_ends"])
        _require(len(stand_ins) == len(names) == len(set(stand_ins)), "stand_ins have no name each")
        columns = len(index["tokens"])
        packed = index["present"]
        _require(packed.shape == (columns, -(-lanes // 8)), "present has another shape")
        present = np.unpackbits(packed, axis=1, count=lanes).view(np.bool_)
        found = cls(
            index["runs"],
            texts(index["names"], index["name_ends"]),
            index["tokens"],
            present,
            index["windows"],
            index["passed"],
            index["state_columns"],
            dict(zip(stand_ins, names, strict=True)),
        )
        found.check(counts, replicas)
        return found

    def check(self, counts: Mapping[str, int], replicas: int) -> None:
        """Raise ValueError if the tensors contradict each other."""
        runs, columns = self.runs, len(self.tokens)
        _require(runs.shape[1:] == (5,), "runs have another shape")
        _require(
            len(self.windows) == len(self.passed) == columns, "windows are not those of columns"
        )
        _require(int(self.present.sum()) == counts["pages"], "the pages are not those of columns")
        _require(bool((runs[:, COLUMNS] >= 1).all()), "a run has no column")
        _require(int(runs[:, COLUMNS].sum(dtype=np.int64)) == columns, "runs have other columns")
        for column, end in ((REPLICA, replicas), (NAME, len(self.names))):
            inside = (runs[:, column] >= 0) & (runs[:, column] < end)
            _require(bool(inside.all()), "runs name replicas or namespaces that there are not")
        parents = runs[:, PARENT]
        _require(
            bool(((parents >= -1) & (parents < np.arange(len(runs)))).all()),
            "a run comes before its parent",
        )
        below = parents >= 0
        same = runs[below][:, [REPLICA, NAME]] == runs[parents[below]][:, [REPLICA, NAME]]
        _require(bool(same.all()), "a run has a parent elsewhere")
        states = self.state_columns
        _require(len(states) == counts["states"], "the states are not those of columns")
        _require(_are_rising(states, columns), "states of other columns")

    # ---- runs --------------------------------------------------------------------------------

    def starts(self) -> NDArray[np.int64]:
        """Return the first column of each run and the end of the last run."""
        return column_starts(self.runs[:, COLUMNS])

    def prefix(self, run: int, starts: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the tokens of a run and of all its ancestors, from the root: int32 [n]."""
        parts = [self.tokens[starts[each] : starts[each + 1]] for each in self.path(run)]
        return np.concatenate(parts[::-1]).reshape(-1)

    def path(self, run: int) -> Iterator[int]:
        """Yield a run, its parent, and so on up to the root."""
        while run >= 0:
            yield run
            run = int(self.runs[run, PARENT])


def _require(holds: bool, what: str) -> None:  # noqa: FBT001 - the condition
    if not holds:
        raise damaged(what)


def _are_ends(ends: NDArray[np.int64], size: int) -> bool:
    last = int(ends[-1]) if len(ends) else 0
    return last == size and bool((np.diff(ends, prepend=0) >= 0).all())


def _are_rising(values: NDArray[np.int64], end: int) -> bool:
    inside = bool(((values >= 0) & (values < end)).all())
    return inside and bool((np.diff(values) > 0).all())


# ---- whole pages ---------------------------------------------------------------------------------


class PageBytes:
    """Reads and writes the pages, or the state slots, of one replica.

    Parameters
    ----------
    pools : Pools
    replica : int
    arrays : list of array
        Arrays with six axes and one row per page, with any strides. The arrays of the first device
        come first.

    Attributes
    ----------
    size : int
        Bytes of a page in all arrays together.

    Notes
    -----
    The caller pins the pages. On GPUs, a copy runs after all earlier work on the pools, and the
    host waits for the copy.
    """

    def __init__(self, pools: Pools, replica: int, arrays: list[Any]) -> None:
        self._pools = pools
        self._replica = replica
        # The copies do not convert elements, so any dtype of the same size is correct.
        self._arrays = [array.view(f"u{array.itemsize}") for array in arrays]
        self._sizes = [math.prod(array.shape[1:]) * array.itemsize for array in arrays]
        self.size = sum(self._sizes)

    @classmethod
    def of_pages(cls, pools: Pools, replica: int) -> PageBytes:
        """Return the pages of a replica: K, V and their scales."""
        shards = pools.shards[replica]
        return cls(pools, replica, [array for shard in shards for array in arrays_of(shard)])

    @classmethod
    def of_states(cls, pools: Pools, replica: int) -> PageBytes:
        """Return the state slots of a replica, ordered by group, name and device."""
        tp = pools.params.tensor_parallel_degree
        return cls(
            pools,
            replica,
            [
                array.reshape(len(array), 1, 1, 1, 1, -1)
                for group in pools.states
                for arrays in group.values()
                for array in arrays[replica * tp : (replica + 1) * tp]
            ],
        )

    def read(self, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Copy pages.

        Parameters
        ----------
        ids : int32 [n]

        Returns
        -------
        uint8 [n, size]
        """
        found = np.empty((len(ids), self.size), np.uint8)
        if not found.size:
            return found
        self._pools.enter(self._replica)
        begin = 0
        for array, size in zip(self._arrays, self._sizes, strict=True):
            place = place_of(None, {"pool": array})
            staged = place.empty((len(ids), *array.shape[1:]), array.dtype)
            _copy(place, array, staged, np.stack([ids, np.arange(len(ids))], axis=1))
            rows = place.to_host(staged).reshape(len(ids), -1).view(np.uint8)
            found[:, begin : begin + size] = rows
            begin += size
        return found

    def write(self, ids: NDArray[np.int32], content: NDArray[np.uint8]) -> None:
        """Fill pages, and wait for the copy.

        Parameters
        ----------
        ids : int32 [n]
            Distinct page ids.
        content : uint8 [n, size]
        """
        if not content.size:
            return
        self._pools.enter(self._replica)
        begin = 0
        for array, size in zip(self._arrays, self._sizes, strict=True):
            place = place_of(None, {"pool": array})
            rows = np.ascontiguousarray(content[:, begin : begin + size]).view(array.dtype)
            staged = place.from_host(rows.reshape(len(ids), *array.shape[1:]))
            _copy(place, staged, array, np.stack([np.arange(len(ids)), ids], axis=1))
            place.wait()
            begin += size


def _copy(place: Place, source: Any, target: Any, pairs: NDArray[Any]) -> None:
    wanted = place.index_array(np.ascontiguousarray(pairs, np.int64), "pairs")
    caches = (tensors_of(source), False), (tensors_of(target), False)
    place.transfer(*caches, wanted, (0, source.shape[2]), 0, 1)


# ---- save ----------------------------------------------------------------------------------------


_TRIES = 16  # attempts at a snapshot, while other threads reset the caches
_PORTION = 8 << 20  # bytes per copy
_PARENT, _NAME, _FIRST, _COLUMNS, _RANK = range(5)


@dataclass(frozen=True)
class SavedCache:
    """The contents of a snapshot.

    Attributes
    ----------
    num_tokens : int
        Cached tokens of all replicas.
    num_pages : int
    num_states : int
        Number of checkpoints.
    num_bytes : int
        Size of the file.
    """

    num_tokens: int
    num_pages: int
    num_states: int
    num_bytes: int


class _CacheWasResetError(Exception):
    """The caches were reset after pages were copied, so the copies are out of date."""


def lanes_of(pools: Pools) -> int:
    """Return the maximum number of pages in a column."""
    return sum(pages_per_column(pools.params))


def portion_of(page_bytes: int, lanes: int) -> int:
    """Return the number of columns that are pinned and copied together."""
    return max(1, _PORTION // (page_bytes * lanes))


def require_cache(pools: Pools, verb: str) -> None:
    """Raise ValueError for a manager without a pool or without a prefix cache."""
    pools.require(verb)
    if not pools.params.enable_prefix_caching:
        raise ValueError(
            f"this manager has no prefix cache to {verb}; give its params "
            f"enable_prefix_caching=True"
        )


def save_cache(pools: Pools, path: str | os.PathLike[str], model: str | None) -> SavedCache:
    """Write the prefix caches to a path; see ``PagedKVCacheManager.snapshot``."""
    require_cache(pools, "save")
    for _ in range(_TRIES):
        try:
            with replacing(path) as file:
                return _Saving(pools, SnapshotWriter(file)).save(model)
        except _CacheWasResetError:
            continue
    raise KVCacheError(
        f"the prefix cache was reset {_TRIES} times during the snapshot; save it between two resets"
    )


class _Saving:
    """Copies one replica after another, column by column, and pins the columns of each copy."""

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
        numbers = np.full(len(found.runs), -1)  # row in the file of each run saved as a whole
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
        """Record the names of a prefix's stand-in tokens; return false if a stand-in has no name.

        Once a manager has received extra keys, its lowest tokens are stand-ins.
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
        """Copy the columns of a run from `first` on; return how many of them were still cached."""
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
                if len(held.parts) == 0:  # evicted, or a quota leaves no room to pin them
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
        """Copy the checkpoints that are still cached; return their columns."""
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
    """Return false for the private namespace of an imported request, which no prompt can hit."""
    return not name or name[0] in (1, 2, 3)


def _prefix(found: CachedRuns, starts: NDArray[Any], run: int) -> NDArray[np.int32]:
    parts = []
    while run >= 0:
        parts.append(found.tokens[starts[run] : starts[run + 1]])
        run = int(found.runs[run, _PARENT])
    return np.concatenate(parts[::-1]).reshape(-1)


# ---- restore -------------------------------------------------------------------------------------


_AT_A_TIME = 8 << 20  # bytes per read when a file is checked

_LOWEST_PLAIN = -(1 << 30)  # with extra keys, lower tokens are stand-ins


@dataclass(frozen=True)
class RestoredCache:
    """The result of a restore.

    Attributes
    ----------
    num_tokens : int
        Tokens of the file that are cached now, including tokens that were cached before.
    num_pages, num_states : int
        Pages and checkpoints that were written to the pools.
    damaged : int
        Pages and checkpoints that fail their checksums, and were left out.
    is_whole : bool
        True if all tokens of the file are cached now. False if pages were damaged, the pools had
        no room, or the caches were reset during the restore.
    """

    num_tokens: int
    num_pages: int
    num_states: int
    damaged: int
    is_whole: bool


def restore_cache(pools: Pools, path: str | os.PathLike[str], model: str | None) -> RestoredCache:
    """Read a snapshot into the prefix caches; see ``PagedKVCacheManager.restore``."""
    require_cache(pools, "restore")
    with opened_regular(path) as file:
        reader = SnapshotReader(file)
        _check_format(pools, reader, model)
        return _Restoring(pools, reader, _runs_of(reader)).restore()


def check_snapshot(path: str | os.PathLike[str]) -> SavedCache:
    """Read a whole snapshot and check all its checksums, without a manager.

    Parameters
    ----------
    path : str or path

    Returns
    -------
    SavedCache

    Raises
    ------
    ValueError
        A checksum fails, the file has another version, or `path` is not a regular file.
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
                    raise damaged(
                        f"the checksum of row {row} of tensor {name!r} does not match its bytes"
                    )
        size = file.seek(0, os.SEEK_END)
    return SavedCache(saved.tokens.size, reader.counts["pages"], reader.counts["states"], size)


def _runs_of(reader: SnapshotReader) -> SavedRuns:
    for name in ("replicas", "pages_per_column"):
        value = reader.about[name]
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise damaged(f"{name} is {str(value)[:40]}, must be 1 .. {(1 << 31) - 1}")
    lanes, replicas = reader.about["pages_per_column"], reader.about["replicas"]
    return SavedRuns.of_index(reader.index, lanes, reader.counts, replicas)


def _check_format(pools: Pools, reader: SnapshotReader, model: str | None) -> None:
    about, params = reader.about, pools.params
    if about["model"] is not None and not isinstance(about["model"], str):
        raise damaged("its model is not a text")
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
    """Copies the pages of a file into free pages, the most valuable first."""

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
        """Replace the file's stand-in tokens by the stand-ins of this process."""
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
                raise damaged(f"stand-in token {token} has no name")
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
        """Return the runs in the order of their last use, if all of them have room.

        Policies that evict by entry order, such as FIFO, thereby get the old order. If the room is
        too small, the most valuable runs come first, as in the file.
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
        """Restore the columns of a run that have room; return false if the pool is full."""
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
        """Restore columns `begin` .. `end` - 1 of the file; return how many are cached now.

        -1: the pool has no room for all of them.
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
            self._count(run, taken)  # no publish: cached columns do not count as used
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
        """Write the pages and checkpoints of columns, if all of them match their checksums.

        If some do not, write nothing, and return the columns to take instead: the columns before
        the first damaged page, without the damaged checkpoints.
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
        """Mark a run as the most recently used, if all its restored columns are still cached."""
        begin = int(self._starts[run])
        parts = self._parts(begin, begin + int(self._cached[run]))
        if len(parts) == 0:
            return
        replica = int(self._saved.runs[run, REPLICA]) % self._pools.params.data_parallel_degree
        with self._taken(replica, run, begin, parts) as taken:
            if taken.status == "known" and len(taken.parts) == len(parts):
                taken.publish(False)
