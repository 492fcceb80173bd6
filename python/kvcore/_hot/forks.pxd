# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from libc.stdint cimport int64_t

from kvcore._hot.batches cimport BatchReader
from kvcore._hot.claims cimport ClaimTable
from kvcore._hot.settler cimport Settler

cdef int fork(ClaimTable claims, Settler settler, object parent_id, tuple children) except -1
cdef int truncate(
    ClaimTable claims, Settler settler, object request_id, int64_t num_tokens
) except -1
cdef int accept(ClaimTable claims, Settler settler, object context, int64_t num_tokens) except -1
cdef int64_t leave_windows(
    ClaimTable claims, Settler settler, object request_id, int64_t num_tokens
) except -1
cdef list shared_prefixes(BatchReader reader, object batch)
