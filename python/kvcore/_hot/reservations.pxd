# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from kvcore._hot.batches cimport Batch
from kvcore._hot.parts cimport EngineParts
from kvcore._hot.settler cimport Call


cdef class ReservingEngine(EngineParts):
    pass


cdef int expect_moves(list contexts, Batch* requests, Call* call) except -1
