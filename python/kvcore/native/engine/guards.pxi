# SPDX-License-Identifier: Apache-2.0
"""The checks of an engine's methods before and after their work."""


@cython.no_gc_clear  # objects destroyed together with a manager may still call it
cdef class EngineBase:
    """The fields that every method of an engine reads first."""


cdef int refuse(EngineBase engine) except -1:
    cdef str name = type(engine).__name__
    if engine._is_closed:
        raise KVCacheError(f"this {name} is closed; make another one")
    raise RuntimeError(
        f"this {name} was not initialised; call __init__ of the base class before anything else"
    )


cdef inline int require_new(EngineBase engine) except -1:
    if engine._is_made:
        raise RuntimeError(
            f"this {type(engine).__name__} is initialised already; make another one"
        )
    return 0


# Delay writes into released pages until work on a GPU is done. Runs Python code of the caller.
cdef inline int reuse_after(EngineBase engine, object after) except -1:
    if engine._gpus is None:
        raise ValueError(
            f"after is {after!r}, but this manager has no pool on a GPU; leave it out"
        )
    engine._gpus.reuse_after(after)
    return 0


# Called before work that depends on the order of eviction. Runs Python code of the caller.
cdef inline int tell_time(EngineBase engine) except -1:
    if engine._clock is not None:
        engine._native.advance(nanoseconds(engine._clock(), "the clock"))
    return 0


cdef int ask_others(EngineBase engine) except -1:
    require_made(engine)
    if engine._listener is not None and engine._listener.is_asked():
        engine.reset_prefix_cache()
    tell_time(engine)
    return require_made(engine)  # the listener or the clock may have closed the engine


cdef KeyedTrees trees_of_engine(EngineBase engine):
    return (<StepEngine>engine)._claims.trees


# Run ``check`` after a call, and return the result of the call.
cdef inline object checked(EngineBase engine, object result):
    check(engine)
    return result


cdef object only_context(object ctx, object given, str name):
    """Return the context of a call that got it as the keyword `name`."""
    if ctx is not None:
        raise TypeError(f"ctx and {name} are both given, must be one of them; pass ctx")
    return given
