# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
from libc.stdint cimport int64_t

from kvcore.cpp cimport RequestTerms


@cython.final
cdef class Terms:
    cdef RequestTerms native
    cdef object priority
    cdef object ttl
    cdef tuple retention
    cdef object tenant  # a str, or None


# None where all is as it is without.
cdef Terms make_terms(object priority, object ttl, object retention, object tenant)
cdef int64_t nanoseconds(object seconds, str name) except? -1
