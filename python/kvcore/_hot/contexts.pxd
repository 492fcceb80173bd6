# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport numpy as cnp
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint64_t

from kvcore._hot.extra_keys cimport ExtraKeys
from kvcore._hot.terms cimport Terms
from kvcore.cpp cimport RequestView, SequenceHandle

cdef extern from "Python.h":
    # Borrowed, without counting references per row of a batch.
    PyObject* PyList_GET_ITEM(object list, Py_ssize_t i)
    ctypedef struct PyTypeObject:
        pass
    PyTypeObject* Py_TYPE(PyObject* o)
    bint PyObject_TypeCheck(PyObject* o, PyTypeObject* type) noexcept
    # Of a borrowed pointer: an object argument would count the argument itself.
    Py_ssize_t Py_REFCNT(PyObject* o)

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define KVCORE_PREFETCH(address) __builtin_prefetch(address)
    #else
    #define KVCORE_PREFETCH(address) ((void)(address))
    #endif
    """
    void KVCORE_PREFETCH(const void* address) noexcept


cdef class TextGenerationContext:
    # May be subclassed: what a manager reads of it is here, and cannot be overridden.
    # Two cache lines, where CPython puts objects of this size: what a walk that does not know the
    # batch reads, then the request as C++ sees it, which is all that a step of a known batch reads.
    cdef uint64_t _manager_uid  # of the claim below; stale when its slot has another generation
    cdef SequenceHandle _recorded  # the claim of that manager that knows this context
    cdef int32_t _capacity  # tokens that can be appended in place: none with extra keys
    cdef int32_t _pending  # pages for it are on their way
    cdef bytes _name  # of the prefix-cache namespace, whose bytes the request points to
    cdef cnp.ndarray _buffer
    cdef RequestView _request  # with the claim it was last seen with
    cdef readonly object request_id
    cdef readonly object extra_key
    cdef readonly object cache_salt
    cdef Terms _terms  # None where it asks for nothing
    cdef ExtraKeys _keys  # None without; else what the request's tokens point to
    cdef object _past  # the claim of it that ended last, or None; three lines in all

    cdef int _make_buffer(self, int64_t capacity) except -1
    cdef int _move_buffer(self, int64_t capacity) except -1
    cdef int _append(self, const int32_t* tokens, int64_t n) except -1
    cdef int _append_shown(self, const int32_t* tokens, int64_t n) except -1
    cdef void _show(self, ExtraKeys keys) noexcept
    cdef int _update(self, int32_t token) except -1


# Changes whenever a context may no longer be what a batch read earlier took it for: one is gone, so
# that another object may have its address, or has moved to another claim.
cdef uint64_t contexts_epoch


cdef inline void change_contexts_epoch() noexcept:
    global contexts_epoch
    contexts_epoch += 1


cdef inline bint is_own(PyObject* item) noexcept:
    return PyObject_TypeCheck(item, <PyTypeObject*>TextGenerationContext)


# Whose ``update`` is the one here.
cdef inline bint is_exact(PyObject* item) noexcept:
    return Py_TYPE(item) == <PyTypeObject*>TextGenerationContext


# Of a batch, contexts this far ahead are asked for early.
cdef enum:
    AHEAD = 16


cdef inline void prefetch_context(PyObject* item) noexcept:
    KVCORE_PREFETCH(item)
    KVCORE_PREFETCH(<const char*>item + 64)


# Where its next token goes.
cdef inline void prefetch_tail(PyObject* item) noexcept:
    cdef RequestView* request = &(<TextGenerationContext>item)._request
    KVCORE_PREFETCH(request.tokens + request.end)


cdef inline bint all_exact(list contexts) noexcept:
    cdef Py_ssize_t i
    for i in range(len(contexts)):
        if not is_exact(PyList_GET_ITEM(contexts, i)):
            return False
    return True


cdef inline bint take_token(PyObject* item, int32_t token) noexcept:
    """What ``_update`` does, where the buffer has room; else False, and nothing is done."""
    cdef RequestView* request = &(<TextGenerationContext>item)._request
    if request.active == request.end:
        if request.end >= (<TextGenerationContext>item)._capacity:
            return False
        (<int32_t*>request.tokens)[request.end] = token
        request.end += 1
    request.start = request.active
    request.active = request.end
    return True


cdef int look_at_ids(TextGenerationContext own, const int32_t* tokens, int64_t n) except -1
