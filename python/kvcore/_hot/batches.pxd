# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
from libc.stdint cimport int64_t, uint64_t
from libcpp.vector cimport vector

from kvcore._hot.claims cimport ClaimTable
from kvcore._hot.contexts cimport TextGenerationContext
from kvcore.cpp cimport RequestView


# The requests of a call: pointers into contexts, or to the views of foreign ones.
cdef struct Batch:
    vector[RequestView*] rows
    vector[RequestView] foreign
    vector[RequestView] given  # the foreign ones, as their contexts know them
    uint64_t epoch  # of its contexts; 0 when some are foreign
    bint is_known  # the batch that was kept last: its contexts are recorded
    Py_ssize_t first_new  # rows whose contexts may have to be recorded
    Py_ssize_t end_new


@cython.final
cdef class BatchReader:
    cdef ClaimTable claims
    cdef object order  # a kvcore.support.step_order.StepOrder with runtime checks; else None
    cdef vector[RequestView*] last  # batch that was done with
    cdef uint64_t last_epoch

    cdef RequestView* request_of(self, TextGenerationContext own) except NULL
    cdef int view_of(self, object context, RequestView* view, list keep) except -1
    cdef list read(self, object batch, Batch* rows, list keep)
    cdef int look_up(self, list contexts, Batch* rows, list keep) except -1
    cdef void remember(self, Batch* rows) noexcept
    cdef int record(self, Batch* rows, list contexts, int64_t done) except -1
    cdef bint is_known(self, object batch) noexcept
    cdef bint is_last(self, list batch, const vector[RequestView*]& last) noexcept
    cdef bint read_own(self, list batch, Batch* rows) except -1
    cdef bint is_as_read(self, list batch, const vector[RequestView*]& read) noexcept
