# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
from libc.stdint cimport int64_t

from kvcore.cpp cimport CacheManager, PinHandle
from kvcore.cpp cimport HeldPages as NativeHold
from kvcore.native.contexts cimport KeyedTrees


# What C code of other modules sees of a manager. StepEngine is the one class that derives from it.
cdef class EngineBase:
    cdef bint _is_made
    cdef bint _is_closed
    cdef bint _checks
    cdef bint _is_alone  # neither a listener nor a clock: no code of the caller's runs
    cdef CacheManager* _native  # of `_core`
    cdef readonly object _core
    cdef readonly list _shards
    # Of Python: kvcore.backends.protocol, kvcore.observe.zmq_reset; each None where there is none.
    cdef readonly object _copier
    cdef readonly object _mover
    cdef readonly object _gpus
    cdef readonly object _listener
    cdef readonly object _clock  # () -> seconds; None where no policy asks for the time


cdef int refuse(EngineBase engine) except -1
cdef int ask_others(EngineBase engine) except -1
# Where an engine keeps tokens with extra keys.
cdef KeyedTrees trees_of_engine(EngineBase engine)


# First of all in every call: without its constructor an engine has no parts.
cdef inline int require_made(EngineBase engine) except -1:
    if not engine._is_made:
        refuse(engine)
    return 0


# Before the cache is read: forget it where somebody asks for that.
cdef inline int listen(EngineBase engine) except -1:
    return 0 if engine._is_alone else ask_others(engine)


# After every call that has changed something.
cdef inline int check(EngineBase engine) except -1:
    if engine._checks:
        engine._native.check_integrity()
    return 0


cdef class PinnedPrefix:
    cdef readonly int64_t num_tokens
    cdef object _manager  # whose pages are pinned
    cdef CacheManager* _native
    cdef PinHandle _pin
    cdef bint _checks
    cdef bint _released


@cython.final
@cython.no_gc_clear  # what is held ends in front of the manager
cdef class HeldPages:
    cdef readonly object pages
    cdef object _manager  # whose pages are held
    cdef CacheManager* _native
    cdef NativeHold _held
    cdef bint _checks
    cdef bint _is_over
