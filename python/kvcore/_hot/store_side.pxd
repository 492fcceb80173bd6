# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
from libc.stdint cimport int32_t, uint64_t
from libcpp.vector cimport vector

from kvcore.cpp cimport CacheManager, PageKey, StoreMoves


cdef bytes bytes_of(const PageKey& key)
cdef list listed_keys(const StoreMoves& moves)
cdef list listed_parts(const StoreMoves& moves)


@cython.final
cdef class StoreSide:
    cdef object core  # whose manager it is
    cdef CacheManager* native


@cython.final
cdef class StoreWrites:
    cdef StoreSide side
    cdef uint64_t ticket
    cdef readonly int32_t replica
    cdef uint64_t resets  # of the caches, when they were taken
    cdef vector[PageKey] written
    cdef readonly list parts
