# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, autotestdict=False
"""What a snapshot asks of a manager: what is cached, and columns that leave or are brought back."""

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
    """What is cached in a replica at one moment.

    Attributes
    ----------
    num_resets : int
        Of the caches until then.
    names : list of bytes
        Namespaces.
    runs : int32 [runs, 5]
        Parent (-1: none), namespace, columns in front, own columns, rank: of two runs that of less
        goes first. A run comes behind its parent, whose rank is no less.
    tokens : int32 [columns, tokens of a column]
        Of the runs, one behind the other, as the tree has them.
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
    """Return how often the caches of a manager were reset."""
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
    """What `name` and `tokens` are views of lives as long as the caller's."""
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
@cython.no_gc_clear  # what is held ends in front of the engine
cdef class ExportedColumns:
    """Hold cached columns for who copies them, until the end of ``with``.

    Attributes
    ----------
    pages : int32 [columns, lanes]
        Of each column lane by lane, -1 where it has none.
    parts : int32 [columns, 3]
        Windows that a column has pages of and those that requests passed, both as bits, and the
        slot of its checkpoint, -1 without.
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
    """Hold what is cached of columns `first` .. of a prefix, in a cache that was not reset since.

    Parameters
    ----------
    engine : StepEngine
    replica : int
    resets : int
        As of ``cached_runs``.
    name : bytes
        Of the namespace.
    tokens : int32 [n]
        Of the prefix, as the tree has them, whole columns.
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
    """Hold pages for columns that the caller brings, until the end of ``with``.

    Attributes
    ----------
    status : str
        "taken"; "known" where there is nothing to be filled, and to publish them is a use of what
        is cached. Else nothing is held: "no parent", "no room", or "reset".
    pages, parts
        As of ExportedColumns, for the columns that there is room for: pages to be filled, and the
        slot to be filled; -1 where there is nothing to be written.
    """

    cdef CacheImport _held
    cdef EngineBase _engine
    cdef readonly object status
    cdef readonly object pages
    cdef readonly object parts

    def publish(self, bint more):
        """Have them found, now that they are filled; `more`: the run goes on.

        Returns
        -------
        bool
            False where the caches were reset meanwhile.
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
    """Take free pages for columns `first` .. of a prefix.

    Parameters
    ----------
    engine, replica, resets, name, tokens, first
        As of ``export_columns``.
    parts : int32 [columns, 3]
        What there is of each, as of ExportedColumns; any number from 0 on for a checkpoint.

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
    """Keep stand-ins of tokens with extra keys, which a snapshot names, as long as it lives.

    A stand-in is a negative token that the prefix tree is shown; its name, which says what it
    stands for, is the same in every process.
    """

    cdef vector[TokenId] _held

    def __dealloc__(self):
        cdef size_t i
        for i in range(self._held.size()):
            stand_ins.release(self._held[i])

    def name_of(self, token):
        """Return the name of a token; None for one that stands for nothing.

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
        """Return the token that stands for a name here.

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
    """Tell whether low tokens in the caches of a manager are stand-ins."""
    require_made(engine)
    return trees_of_engine(engine).is_keyed


def expect_keys(EngineBase engine not None):
    """Have low tokens taken for stand-ins from now on.

    Raises
    ------
    ValueError
        The caches hold such tokens of requests without extra keys.
    """
    require_made(engine)
    trees_of_engine(engine).expect_keys()
