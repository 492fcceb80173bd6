# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from kvcore._hot.reservations cimport ReservingEngine


cdef class StepEngine(ReservingEngine):
    pass
