# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from kvcore._hot.parts cimport EngineParts


cdef class ReservingEngine(EngineParts):
    pass
