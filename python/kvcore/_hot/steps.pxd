# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libcpp.vector cimport vector

from kvcore._hot.batches cimport BatchReader
from kvcore._hot.inputs cimport FetchBuffers
from kvcore._hot.settler cimport Settler
from kvcore.cpp cimport FetchTarget


@cython.final
cdef class InputMaker:
    cdef list shards
    cdef object gpus
    cdef int64_t total_pages
    cdef int32_t num_replicas
    cdef FetchBuffers buffers

    cdef int choose_buffers(self, list taken, vector[FetchTarget]& targets) except -1
    cdef list outputs(self, list taken, vector[FetchTarget]& targets, int64_t num_steps)


cdef list fetch(
    BatchReader reader, Settler settler, InputMaker maker, object batch, int64_t steps
)
cdef cnp.ndarray commit(BatchReader reader, Settler settler, object batch)
