# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from kvcore.cpp cimport RequestView


cdef inline bint has_moved(const RequestView& now, const RequestView& given) noexcept:
    return now.start != given.start or now.active != given.active


# Their code may run and change whatever was read.
cdef object read_plain(object context, RequestView* view, list keep)
cdef object read_foreign(object context, RequestView* view, list keep)
cdef int move_indices(object context, const RequestView& to, const RequestView& given) except -1
cdef int check_settable(object context) except -1
