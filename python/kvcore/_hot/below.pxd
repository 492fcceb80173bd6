# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp.vector cimport vector

from kvcore._hot.settler cimport Settler
from kvcore._hot.store_side cimport StoreSide
from kvcore.cpp cimport ColumnParts, PageKey, RequestView, StoreSearch, TokenId


# Before a request is reserved, where there are stores below: they bring what they have of it. Code
# of theirs runs. A hit of at most `max_hit` tokens is wanted.
cdef int bring(
    Settler settler, RequestView* request, object context, bint now, int64_t max_hit
) except -1
# The same of the requests of a batch; `contexts` is nobody else's.
cdef int bring_all(
    Settler settler, vector[RequestView*]& rows, list contexts, bint now
) except -1


@cython.final
cdef class BelowSearch:
    cdef StoreSide side
    cdef object holder  # what keeps the extra keys of the tokens in mind
    cdef StoreSearch found
    cdef readonly object max_hit
    cdef bytes name
    cdef vector[TokenId] tokens
    cdef vector[PageKey] made  # from column `found.stored` on
    cdef vector[PageKey] front  # in front of that, once one was asked for
    cdef int32_t asked  # columns of the hit that was asked for last

    cdef int make_keys(self, int32_t last) except -1
    cdef int make_front(self) except -1
    cdef const PageKey* key_of(self, int64_t column) noexcept
    cdef int keys_of(self, const vector[ColumnParts]& items, vector[PageKey]& keys) except -1


@cython.final
cdef class Fill:
    cdef StoreSide side
    cdef object search  # with the holder
    cdef uint64_t ticket
    cdef readonly int32_t replica
    cdef readonly list keys
    cdef readonly list parts
