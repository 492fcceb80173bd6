# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
from libc.stdint cimport int64_t

from kvcore.cpp cimport CacheManager, PinHandle
from kvcore.cpp cimport HeldPages as NativeHold
from kvcore.native.contexts cimport KeyedTrees


@cython.final
@cython.no_gc  # refers to no Python object
cdef class CacheCore:
    cdef CacheManager* manager


# The part of a manager that Cython code of other modules reads. Only StepEngine derives from it.
cdef class EngineBase:
    cdef bint _is_made
    cdef bint _is_closed
    cdef bint _checks
    cdef bint _is_alone  # no listener and no clock: no Python code of the caller runs
    cdef CacheManager* _native  # owned by `_core`
    cdef readonly CacheCore _core
    cdef readonly list _shards
    # Python objects of kvcore.backends.protocol and kvcore.observe.zmq_reset; each may be None.
    cdef readonly object _mover
    cdef readonly object _gpus
    cdef readonly object _listener
    cdef readonly object _clock  # () -> seconds; None if no policy needs the time


cdef int refuse(EngineBase engine) except -1
cdef int ask_others(EngineBase engine) except -1
# The trees in which an engine keeps tokens with extra keys.
cdef KeyedTrees trees_of_engine(EngineBase engine)


# The first check of every call: an engine whose constructor did not run has no parts.
cdef inline int require_made(EngineBase engine) except -1:
    if not engine._is_made:
        refuse(engine)
    return 0


# Called before the cache is read: reset the cache if the listener has received a request for it.
cdef inline int listen(EngineBase engine) except -1:
    return 0 if engine._is_alone else ask_others(engine)


# Called after every call that has changed something.
cdef inline int check(EngineBase engine) except -1:
    if engine._checks:
        engine._native.check_integrity()
    return 0


cdef class PinnedPrefix:
    cdef readonly int64_t num_tokens
    cdef object _manager  # the owner of the pinned pages
    cdef CacheManager* _native
    cdef PinHandle _pin
    cdef bint _checks
    cdef bint _released


@cython.final
@cython.no_gc_clear  # the pages are released before the manager is destroyed
cdef class HeldPages:
    cdef readonly object pages
    cdef object _manager  # the owner of the held pages
    cdef CacheManager* _native
    cdef NativeHold _held
    cdef bint _checks
    cdef bint _is_over
