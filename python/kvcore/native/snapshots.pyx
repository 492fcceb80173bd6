# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, autotestdict=False
"""The calls of snapshots on a manager: list the cache, export columns and import columns."""

cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy
from libcpp.string cimport string
from libcpp.vector cimport vector

from kvcore.cpp cimport (
    BlockId,
    CachedColumn,
    CachedTree,
    CacheExport,
    CacheImport,
    ColumnSpan,
    ImportStatus,
    TokenId,
    string_view,
)
from kvcore.native cimport contexts
from kvcore.native.contexts cimport (
    HIGHEST_STAND_IN,
    PyBytes_AS_STRING,
    PyBytes_GET_SIZE,
    as_int,
    name_view,
    stand_ins,
)
from kvcore.native.engine cimport EngineBase, check, listen, require_made, trees_of_engine

from typing import Any, NamedTuple

import numpy as np

cnp.import_array()


cdef bytes as_bytes(const string& text):
    return PyBytes_FromStringAndSize(text.data(), text.size())


# ---- lists -----------------------------------------------------------------------------------


class CachedRuns(NamedTuple):
    """The cached runs of a replica at one moment.

    Attributes
    ----------
    num_resets : int
        Number of cache resets before this moment.
    names : list of bytes
        Namespaces.
    runs : int32 [runs, 5]
        Parent (-1: none), namespace, columns before the run, own columns, rank. Of two runs, the
        run with the lower rank is evicted first. A run follows its parent, whose rank is not lower.
    tokens : int32 [columns, tokens of a column]
        Tokens of the runs, concatenated, with the ids of the prefix tree.
    """

    num_resets: int
    names: list[bytes]
    runs: Any
    tokens: Any


def cached_runs(EngineBase engine not None, replica):
    """Return the CachedRuns of a replica. O(cached tokens)."""
    require_made(engine)
    listen(engine)
    cdef int32_t index = as_int(replica, "replica")
    cdef CachedTree found
    with nogil:
        found = engine._native.cached_tree(index)
    cdef cnp.ndarray runs = np.empty((found.runs.size(), 5), np.int32)
    cdef cnp.ndarray tokens = np.empty(
        (found.tokens.size() // engine._native.config().page_size,
         engine._native.config().page_size),
        np.int32,
    )
    cdef int32_t* row = <int32_t*>cnp.PyArray_DATA(runs)
    cdef size_t i
    for i in range(found.runs.size()):
        row[0] = found.runs[i].parent
        row[1] = found.runs[i].name_space
        row[2] = found.runs[i].first
        row[3] = found.runs[i].num_columns
        row[4] = found.runs[i].rank
        row += 5
    if found.tokens.size() > 0:
        memcpy(cnp.PyArray_DATA(tokens), found.tokens.data(), found.tokens.size() * sizeof(TokenId))
    cdef list names = []
    for i in range(found.name_spaces.size()):
        names.append(as_bytes(found.name_spaces[i]))
    return CachedRuns(found.num_resets, names, runs, tokens)


def num_resets(EngineBase engine not None):
    """Return the number of resets of a manager's caches."""
    require_made(engine)
    listen(engine)
    return engine._native.num_resets()


# ---- columns -----------------------------------------------------------------------------------


cdef cnp.ndarray as_prefix(object tokens):
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        raise TypeError("tokens must be an int32 array [n]")
    return np.ascontiguousarray(tokens)


cdef ColumnSpan span_of(
    object replica, object resets, bytes name, cnp.ndarray tokens, object first
) except *:
    """Return a ColumnSpan; it is valid while the caller holds `name` and `tokens`."""
    cdef ColumnSpan span
    span.replica = as_int(replica, "replica")
    span.num_resets = <uint64_t>resets
    span.name_space = name_view(name)
    span.tokens = <const TokenId*>cnp.PyArray_DATA(tokens)
    span.n = cnp.PyArray_DIM(tokens, 0)
    span.first = as_int(first, "first")
    return span


cdef cnp.ndarray pages_of(const vector[BlockId]& pages, size_t columns):
    cdef size_t lanes = pages.size() // columns if columns > 0 else 1
    cdef cnp.ndarray found = np.empty((columns, lanes), np.int32)
    if pages.size() > 0:
        memcpy(cnp.PyArray_DATA(found), pages.data(), pages.size() * sizeof(BlockId))
    return found


cdef cnp.ndarray parts_of(const vector[CachedColumn]& columns):
    cdef cnp.ndarray found = np.empty((columns.size(), 3), np.int32)
    cdef int32_t* row = <int32_t*>cnp.PyArray_DATA(found)
    cdef size_t i
    for i in range(columns.size()):
        row[0] = columns[i].windows
        row[1] = columns[i].passed
        row[2] = columns[i].state
        row += 3
    return found


@cython.final
@cython.no_gc_clear  # the columns are released before the engine is destroyed
cdef class ExportedColumns:
    """Cached columns that are held until the end of ``with``, so that the caller can copy them.

    Attributes
    ----------
    pages : int32 [columns, lanes]
        The page of each column and lane; -1 without a page.
    parts : int32 [columns, 3]
        Per column: the windows with pages as bits, the windows that requests have passed as bits,
        and the slot of its checkpoint; -1 without a checkpoint.
    """

    cdef CacheExport _held
    cdef EngineBase _engine
    cdef readonly object pages
    cdef readonly object parts

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._held = CacheExport()
        check(self._engine)


def export_columns(EngineBase engine not None, replica, resets, bytes name, tokens, first):
    """Hold the cached columns of a prefix from column `first` on, if there was no reset since.

    Parameters
    ----------
    engine : StepEngine
    replica : int
    resets : int
        ``num_resets`` of ``cached_runs``.
    name : bytes
        Name of the namespace.
    tokens : int32 [n]
        Tokens of the prefix in whole columns, with the ids of the prefix tree.
    first : int

    Returns
    -------
    ExportedColumns
    """
    require_made(engine)
    cdef cnp.ndarray prefix = as_prefix(tokens)
    cdef ColumnSpan span = span_of(replica, resets, name, prefix, first)
    cdef ExportedColumns found = ExportedColumns.__new__(ExportedColumns)
    found._engine = engine
    with nogil:
        found._held = engine._native.export_columns(span)
    found.parts = parts_of(found._held.columns())
    found.pages = pages_of(found._held.pages(), found._held.columns().size())
    return found


@cython.final
@cython.no_gc_clear
cdef class ImportedColumns:
    """Pages for columns that the caller imports; held until the end of ``with``.

    Attributes
    ----------
    status : str
        "taken"; or "known" if all columns are cached: there is nothing to fill, and ``publish``
        counts as a use of the cached columns. With "no parent", "no room" or "reset", nothing is
        held.
    pages, parts
        As in ExportedColumns, for the columns that have room: the pages and the slots to fill; -1
        if there is nothing to write.
    """

    cdef CacheImport _held
    cdef EngineBase _engine
    cdef readonly object status
    cdef readonly object pages
    cdef readonly object parts

    def publish(self, bint more):
        """Add the filled columns to the cache; `more`: further columns of the run will follow.

        Returns
        -------
        bool
            False if the caches were reset since.
        """
        cdef bint is_wanted
        with nogil:
            is_wanted = self._engine._native.publish(self._held, more)
        return is_wanted

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._held = CacheImport()
        check(self._engine)


cdef object status_of(ImportStatus status):
    if status == ImportStatus.kTaken:
        return "taken"
    if status == ImportStatus.kKnown:
        return "known"
    if status == ImportStatus.kNoParent:
        return "no parent"
    return "no room" if status == ImportStatus.kNoRoom else "reset"


def import_columns(EngineBase engine not None, replica, resets, bytes name, tokens, first, parts):
    """Take free pages for the columns of a prefix from column `first` on.

    Parameters
    ----------
    engine, replica, resets, name, tokens, first
        As for ``export_columns``.
    parts : int32 [columns, 3]
        The available parts of each column, as in ExportedColumns; any number from 0 on stands for a
        checkpoint.

    Returns
    -------
    ImportedColumns
    """
    require_made(engine)
    cdef cnp.ndarray prefix = as_prefix(tokens)
    cdef ColumnSpan span = span_of(replica, resets, name, prefix, first)
    cdef int32_t page = engine._native.config().page_size
    cdef cnp.ndarray given = np.ascontiguousarray(parts, np.int32)
    cdef int64_t n = span.n // page - span.first
    if cnp.PyArray_NDIM(given) != 2 or len(given) != max(n, 0) or given.shape[1] != 3:
        raise ValueError(f"parts has shape {np.shape(given)}, must be ({n}, 3)")
    cdef vector[CachedColumn] offered
    cdef const int32_t* row = <const int32_t*>cnp.PyArray_DATA(given)
    cdef CachedColumn column
    for _ in range(n):
        column.windows = row[0] & 0xff
        column.passed = row[1] & 0xff
        column.state = row[2]
        offered.push_back(column)
        row += 3
    cdef ImportedColumns found = ImportedColumns.__new__(ImportedColumns)
    found._engine = engine
    with nogil:
        found._held = engine._native.import_columns(span, offered.data())
    found.status = status_of(found._held.status())
    found.parts = parts_of(found._held.columns())
    found.pages = pages_of(found._held.pages(), found._held.columns().size())
    return found


# ---- tokens with extra keys ----------------------------------------------------------------------


@cython.final
cdef class HeldStandIns:
    """Stand-ins of tokens with extra keys that a snapshot uses; kept while this object lives.

    A stand-in is a negative id for the prefix tree. Its name consists of the token and the keys.
    The name is the same in every process.
    """

    cdef vector[TokenId] _held

    def __dealloc__(self):
        cdef size_t i
        for i in range(self._held.size()):
            stand_ins.release(self._held[i])

    def name_of(self, token):
        """Return the name of a stand-in; None for a token that is no stand-in.

        Parameters
        ----------
        token : int

        Returns
        -------
        bytes or None
        """
        cdef TokenId stand_in = as_int(token, "token")
        if stand_in > HIGHEST_STAND_IN:
            return None
        self._held.reserve(self._held.size() + 1)
        cdef string name = stand_ins.hold(stand_in)
        if name.empty():
            return None
        self._held.push_back(stand_in)
        return as_bytes(name)

    def token_of(self, bytes name not None):
        """Return the stand-in for a name in this process.

        Raises
        ------
        CapacityError
            All stand-ins are in use.
        """
        contexts.keys_in_use = True
        self._held.reserve(self._held.size() + 1)
        cdef TokenId token = stand_ins.acquire(
            string_view(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
        )
        self._held.push_back(token)
        return token


def is_keyed(EngineBase engine not None):
    """Return True if low ids in the caches of a manager are stand-ins."""
    require_made(engine)
    return trees_of_engine(engine).is_keyed


def expect_keys(EngineBase engine not None):
    """Treat low ids in the caches as stand-ins from now on.

    Raises
    ------
    ValueError
        The caches hold low tokens of requests without extra keys.
    """
    require_made(engine)
    trees_of_engine(engine).expect_keys()
