# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from kvcore._hot.claims cimport ClaimTable
from kvcore.cpp cimport CacheManager, PinHandle
from kvcore.cpp cimport HeldPages as NativeHold


cdef class PinnedPrefix:
    cdef readonly int64_t num_tokens
    cdef object _manager  # whose pages are pinned
    cdef CacheManager* _native
    cdef PinHandle _pin
    cdef bint _checks
    cdef bint _released


@cython.final
@cython.no_gc_clear  # what is held ends in front of the manager
cdef class HeldPages:
    cdef readonly object pages
    cdef object _manager  # whose pages are held
    cdef CacheManager* _native
    cdef NativeHold _held
    cdef bint _checks
    cdef bint _is_over


# The id behind the last page: what stands for no page.
cdef inline int32_t end_page(CacheManager* native) noexcept nogil:
    return <int32_t>(native.config().num_pages + native.config().first_page)


cdef object counters(CacheManager* native)
cdef int32_t recommend_replica(ClaimTable claims, object context) except -1
# Tokens as the prefix tree is shown them.
cdef object match(
    CacheManager* native, int32_t replica, cnp.ndarray tokens, bytes name, bint return_pages,
    bint touches, int32_t bundle
)
cdef object match_ahead(
    CacheManager* native, int32_t replica, cnp.ndarray tokens, bytes name, bint return_pages,
    bint touches, int64_t ahead, cnp.ndarray out, int32_t* to,
    int32_t bundle
)
# Of both, and of a tree by itself.
cdef PinnedPrefix pin(
    object manager, CacheManager* native, int32_t replica, cnp.ndarray tokens, bytes name,
    bint checks
)
# Ids of pages, of a list or an array of any integers.
cdef cnp.ndarray as_pages(object pages)
cdef int64_t forget(CacheManager* native, int32_t replica, cnp.ndarray pages) except -1
cdef cnp.ndarray next_pages(CacheManager* native, int32_t replica)
cdef HeldPages hold(
    object manager, CacheManager* native, int32_t replica, cnp.ndarray pages, bint checks
)
