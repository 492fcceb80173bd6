# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
from libc.stdint cimport int32_t

from kvcore.cpp cimport CacheEvent


@cython.internal
cdef class PageEvent:
    cdef CacheEvent made


@cython.final
cdef class PagesStored(PageEvent):
    cdef int32_t size  # tokens of a page


@cython.final
cdef class PagesRemoved(PageEvent):
    pass


@cython.final
cdef class CacheCleared:
    cdef readonly int32_t replica
