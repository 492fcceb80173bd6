# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t

from kvcore.cpp cimport LookupTable


cdef class RaggedKVCacheInputs:
    cdef readonly object blocks
    cdef readonly object cache_lengths
    cdef readonly object lookup_table
    cdef readonly object max_lengths
    cdef readonly object kv_scales
    cdef object _tables  # of all bundles; None where there is one
    cdef tuple _states  # slots by State group; None without
    cdef readonly object _layers  # where layers lie, with groups; else None
    cdef readonly object _loads  # by which layers arrive from the host tier; else None
    cdef readonly object _fetched  # the event that the arrays are there on a GPU; else None
    cdef cnp.ndarray _new_lengths  # uint32 of a fetch, of at least B rows; None where unknown
    cdef cnp.ndarray _row_offsets  # once asked for


# As the class makes them, without reading arguments.
cdef inline RaggedKVCacheInputs new_inputs(
    object blocks, object cache_lengths, object lookup_table, object max_lengths, object kv_scales
):
    cdef RaggedKVCacheInputs inputs = RaggedKVCacheInputs.__new__(RaggedKVCacheInputs)
    inputs.blocks = blocks
    inputs.cache_lengths = cache_lengths
    inputs.lookup_table = lookup_table
    inputs.max_lengths = max_lengths
    inputs.kv_scales = kv_scales
    return inputs


@cython.final
cdef class TableMemory:
    cdef cnp.ndarray array
    cdef bint is_exported


@cython.final
cdef class FetchBuffer:
    cdef cnp.ndarray memory  # of both where it is pinned, else None
    cdef cnp.ndarray table
    cdef cnp.ndarray lengths
    cdef cnp.ndarray new_lengths  # held by the inputs handed out
    cdef cnp.ndarray states  # of the last fetch, theirs too
    cdef TableMemory held  # by the tables handed out
    cdef LookupTable* rows
    cdef bint busy  # a fetch that is not over writes it
    # Arrays handed out last, to be handed out again when nobody holds them any more.
    cdef cnp.ndarray last_table
    cdef cnp.ndarray last_lengths

    cdef bint is_free(self)
    cdef cnp.ndarray unread_new_lengths(self)
    cdef cnp.ndarray new_states(self)
    cdef int take(self) except -1


@cython.final
cdef class FetchBuffers:
    cdef list by_replica
    cdef uint32_t unassigned  # what pads the tables
    cdef object allocate  # uint32 [n] of pinned memory; None for memory that no device reads

    cdef FetchBuffer take(self, int32_t replica, int64_t rows, int64_t width)


# Of a fetch, over the start of a buffer's.
cdef cnp.ndarray table_of(FetchBuffer buffer, cnp.npy_intp* shape, cnp.npy_intp* strides)
cdef cnp.ndarray lengths_of(FetchBuffer buffer, cnp.npy_intp* shape, cnp.npy_intp* strides)
cdef cnp.ndarray make_max_lengths(int64_t longest_new, int64_t longest_active, int64_t num_steps)
