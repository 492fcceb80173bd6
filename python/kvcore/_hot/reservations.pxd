# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from libc.stdint cimport int64_t

from kvcore._hot.batches cimport Batch, BatchReader
from kvcore._hot.settler cimport Call, Settler

cdef bint reserve(BatchReader reader, Settler settler, object context, int64_t steps) except -1
cdef int64_t reserve_batch(
    BatchReader reader, Settler settler, object batch, int64_t steps
) except -1
cdef object plan(BatchReader reader, Settler settler, object context, int64_t steps)
cdef int expect_moves(list contexts, Batch* requests, Call* call) except -1
