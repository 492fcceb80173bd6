# SPDX-License-Identifier: Apache-2.0
"""What is in a snapshot beside bytes: runs of tokens, and what each of their columns has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcore.params import KVCacheParams
from kvcore.snapshots.tensors import damaged

__all__ = ["SavedRuns", "column_starts", "in_worth", "texts"]

#: Columns of ``runs``.
REPLICA, PARENT, NAME, COLUMNS, RANK = range(5)


def column_starts(columns: NDArray[Any]) -> NDArray[np.int64]:
    """Return where each run begins, and where the last one ends: int64 [runs + 1]."""
    starts = np.zeros(len(columns) + 1, np.int64)
    np.cumsum(columns, out=starts[1:])
    return starts


def in_worth(ranks: NDArray[Any], firsts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the order of runs in which the last one to be evicted comes first, behind parents.

    Parameters
    ----------
    ranks : int [runs]
        Of a parent no less than of what continues it.
    firsts : int [runs]
        Columns in front of each.
    """
    return np.lexsort((np.arange(len(ranks)), firsts, -ranks.astype(np.int64)))


def texts(data: NDArray[np.uint8], ends: NDArray[np.int64]) -> list[bytes]:
    """Return byte strings that lie one behind the other."""
    whole = data.tobytes()
    begins = [0, *ends.tolist()]
    return [whole[a:b] for a, b in pairwise(begins)]


def of_texts(given: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Do the reverse."""
    ends = np.cumsum([len(text) for text in given], dtype=np.int64)
    return np.frombuffer(b"".join(given), np.uint8), ends


def described(params: KVCacheParams) -> dict[str, Any]:
    """Name what tells the bytes of pages apart, for error texts."""
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
    """Return the fingerprint of the bytes of pages, as hex."""
    from kvcore.keys import format_fingerprint  # `import kvcore` does without

    return format_fingerprint(params, model or "").hex()


@dataclass(frozen=True)
class SavedRuns:
    """Hold the index of a snapshot, checked.

    Attributes
    ----------
    runs : int32 [runs, 5]
        Replica, parent (-1: none), namespace, columns, rank. The most valuable first, each behind
        its parent.
    names : list of bytes
    tokens : int32 [columns, tokens of a column]
        Of the runs, one behind the other; as the tree of the writer was shown them.
    present : bool [columns, lanes]
        Which pages a column has; these lie one behind the other.
    windows, passed : uint8 [columns]
        As of ``kvcore._hot.snapshots.ExportedColumns``, as bits.
    state_columns : int64 [states]
        Columns with a checkpoint, ascending.
    stand_ins : dict of int to bytes
        Tokens that stand for tokens with extra keys, and their names.
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
            They do not belong together: nobody has written such a file.
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
        """Raise ValueError where the tensors do not belong together."""
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
            "a run stands in front of its parent",
        )
        below = parents >= 0
        same = runs[below][:, [REPLICA, NAME]] == runs[parents[below]][:, [REPLICA, NAME]]
        _require(bool(same.all()), "a run has a parent elsewhere")
        states = self.state_columns
        _require(len(states) == counts["states"], "the states are not those of columns")
        _require(_are_rising(states, columns), "states of other columns")

    # ---- runs --------------------------------------------------------------------------------

    def starts(self) -> NDArray[np.int64]:
        """Return the columns at which runs begin, and the end of the last one."""
        return column_starts(self.runs[:, COLUMNS])

    def prefix(self, run: int, starts: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the tokens of a run and of all in front of it, int32 [n]."""
        parts = [self.tokens[starts[each] : starts[each + 1]] for each in self.path(run)]
        return np.concatenate(parts[::-1]).reshape(-1)

    def path(self, run: int) -> Iterator[int]:
        """Return a run, its parent, and so on."""
        while run >= 0:
            yield run
            run = int(self.runs[run, PARENT])


def _require(holds: bool, what: str) -> None:  # noqa: FBT001 - what is asked
    if not holds:
        raise damaged(what)


def _are_ends(ends: NDArray[np.int64], size: int) -> bool:
    last = int(ends[-1]) if len(ends) else 0
    return last == size and bool((np.diff(ends, prepend=0) >= 0).all())


def _are_rising(values: NDArray[np.int64], end: int) -> bool:
    inside = bool(((values >= 0) & (values < end)).all())
    return inside and bool((np.diff(values) > 0).all())
