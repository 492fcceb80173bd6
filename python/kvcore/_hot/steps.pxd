# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libcpp.vector cimport vector

from kvcore._hot.batches cimport BatchReader
from kvcore._hot.inputs cimport FetchBuffer, FetchBuffers
from kvcore._hot.settler cimport Settler
from kvcore.cpp cimport CacheManager, FetchTarget, LookupTable, SequenceHandle


@cython.final
cdef class InputMaker:
    cdef list shards
    cdef object gpus
    cdef int64_t total_pages
    cdef int32_t num_replicas
    cdef FetchBuffers buffers
    cdef object layers  # where layers lie, with groups; else None
    cdef vector[int64_t] pages_per_column  # of each bundle
    cdef int32_t num_bundles
    cdef int32_t state_groups
    cdef object states

    cdef int choose_buffers(
        self, list taken, vector[FetchTarget]& targets, vector[LookupTable*]& more
    ) except -1
    cdef int32_t bundle_of(self, object given) except -1
    cdef list pages_of(
        self, CacheManager* native, SequenceHandle sequence, int32_t bundle, int64_t first
    )
    cdef cnp.ndarray table(self, FetchBuffer buffer, const FetchTarget& target, int32_t bundle)
    cdef tuple more_tables(
        self, list taken, Py_ssize_t first, const FetchTarget& target, int32_t shard
    )
    cdef list outputs(self, list taken, vector[FetchTarget]& targets, int64_t num_steps)


cdef list fetch(
    BatchReader reader, Settler settler, InputMaker maker, object batch, int64_t steps
)
cdef cnp.ndarray commit(BatchReader reader, Settler settler, object batch)
