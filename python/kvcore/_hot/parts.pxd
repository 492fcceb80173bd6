# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from kvcore._hot.batches cimport BatchReader
from kvcore._hot.claims cimport ClaimTable
from kvcore._hot.settler cimport Settler
from kvcore._hot.steps cimport InputMaker
from kvcore._hot.terms cimport nanoseconds
from kvcore.cpp cimport CacheManager, CallTimes


cdef class EngineParts:
    cdef bint _is_made
    cdef bint _is_closed
    cdef bint _checks
    cdef bint _is_alone  # neither a listener nor a clock: no code of the caller's runs
    cdef CacheManager* _native  # of `_core`
    cdef CallTimes _times
    cdef ClaimTable _claims
    cdef BatchReader _reader
    cdef Settler _settler
    cdef InputMaker _maker
    cdef readonly object _core
    cdef readonly list _shards
    # Of Python: kvcore.backends.protocol, kvcore.observe.zmq_reset; each None where there is none.
    cdef readonly object _copier
    cdef readonly object _mover
    cdef readonly object _gpus
    cdef readonly object _listener
    cdef readonly object _clock  # () -> seconds; None where no policy asks for the time
    cdef object _onload  # kvcore.stores.tiers.onload.Onload, where requests wait for it; else None


# First of all in every call: without its constructor an engine has no parts.
cdef inline int require_made(EngineParts engine) except -1:
    if not engine._is_made:
        refuse(engine)
    return 0


cdef int refuse(EngineParts engine) except -1


cdef inline int require_new(EngineParts engine) except -1:
    if engine._is_made:
        raise RuntimeError(
            f"this {type(engine).__name__} is initialised already; make another one"
        )
    return 0


# What is given back is written by nobody before work on a GPU is done; code of the caller's runs.
cdef inline int reuse_after(EngineParts engine, object after) except -1:
    if engine._gpus is None:
        raise ValueError(
            f"after is {after!r}, but this manager has no pool on a GPU; leave it out"
        )
    engine._gpus.reuse_after(after)
    return 0


# Before what depends on the order of eviction; code of the caller's runs.
cdef inline int tell_time(EngineParts engine) except -1:
    if engine._clock is not None:
        engine._native.advance(nanoseconds(engine._clock(), "the clock"))
    return 0


# Before the cache is read: forget it where somebody asks for that.
cdef inline int listen(EngineParts engine) except -1:
    return 0 if engine._is_alone else ask_others(engine)


cdef inline int ask_others(EngineParts engine) except -1:
    require_made(engine)
    if engine._listener is not None and engine._listener.is_asked():
        engine.reset_prefix_cache()
    tell_time(engine)
    return require_made(engine)  # it may have been closed meanwhile


# After every call that has changed something.
cdef inline int check(EngineParts engine) except -1:
    if engine._checks:
        engine._native.check_integrity()
    return 0


# The same, behind what the call returns.
cdef inline object checked(EngineParts engine, object result):
    check(engine)
    return result
