# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libcpp.vector cimport vector

from kvcore._hot.batches cimport Batch
from kvcore.cpp cimport (
    CacheManager,
    MovedRequest,
    PageMove,
    RequestView,
    ReserveOptions,
    SequenceHandle,
    StateMove,
    Transfers,
)
from kvcore.cpp cimport PageCopier as CppPageCopier


# What an attempt says.
cdef enum:
    DONE
    AGAIN  # with what is left, or with more room
    WAIT  # for what is copied into the pages of `waits_for`


cdef class Settler
cdef struct Call

# Calls C++ once; `own` is the verb's, or its one context.
ctypedef int (*Attempt)(Settler settler, Call* call, object own) except -1

# Makes an error of C++ name the request it is about.
ctypedef object (*Explain)(object error, list contexts, Call* call, object own)


# A native call, as often as it is attempted.
cdef struct Call:
    Explain explain  # NULL where the attempt answers for errors itself
    RequestView** rows
    int64_t n
    int64_t steps
    const ReserveOptions* options  # of `reserve` alone
    int64_t first  # row that the last attempt began with
    int64_t done  # rows, in order
    SequenceHandle waits_for
    RequestView* foreign  # views that rows point to; NULL where no context moves by itself
    RequestView* given  # these, as their contexts know them
    Transfers transfers  # that the last attempt gave out


@cython.final
cdef class Settler:
    cdef object core  # whose manager `native` is
    cdef CacheManager* native
    cdef bint copies_itself
    cdef CppPageCopier* native_copier  # of `copier`, where that is the library's own
    cdef object copier
    cdef object mover
    cdef object below  # asks stores below the host tier, see set_below; None without
    cdef object store_side  # kvcore._hot.store_side.StoreSide, where there is `below`
    cdef object states  # kvcore.pools.StateArrays; None without arrays of states
    cdef int32_t num_bundles  # of layers, each with pages of its own

    cdef int set_copier(self, object copier) except -1
    cdef list carry_out(self, Attempt attempt, Call* call, list contexts, object own)
    cdef list settle(self, Transfers* transfers, RequestView** rows, list contexts)
    cdef int perform(self, Transfers* transfers) except -1
    cdef int settle_owed(self, SequenceHandle sequence) except -1
    cdef int set_back(
        self, RequestView* request, const RequestView* left, const MovedRequest* before
    ) except -1
    cdef int take_back(self, const RequestView* request) except -1
    cdef int write_back_all(self, Call* call, list contexts) except -1
    cdef int write_back(
        self, object context, const RequestView& now, const RequestView& given
    ) except -1


# Of no foreign contexts; nothing is attempted yet.
cdef inline void begin_call(
    Call* call, Explain explain, RequestView** rows, int64_t n, int64_t steps
) noexcept:
    call.explain = explain
    call.rows = rows
    call.n = n
    call.steps = steps
    call.first = call.done = 0
    call.foreign = call.given = NULL


cdef object name_row(object error, list contexts, Call* call, object own)
cdef int expect_moves(list contexts, Batch* requests, Call* call) except -1


# Where a call puts what is to be copied; without a pool, on the list of take_copies.
cdef inline Transfers* room_for(Settler settler, Call* call) noexcept nogil:
    return &call.transfers if settler.copies_itself else NULL


# The same of calls that copy nothing but states.
cdef inline Transfers* room_for_states(Settler settler, Transfers* transfers) noexcept:
    return transfers if settler.states is not None else NULL


cdef cnp.ndarray int32_rows(int64_t n, int64_t columns)
cdef cnp.ndarray copies_array(const vector[PageMove]& copies)
cdef cnp.ndarray grouped_copies_array(const vector[StateMove]& copies, int32_t num_groups)
