# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from kvcore.cpp cimport string_view

cdef extern from "Python.h":
    char* PyBytes_AS_STRING(object o)
    Py_ssize_t PyBytes_GET_SIZE(object o)

cdef int64_t INT32_HIGH

cdef int64_t as_int(object value, str name) except? -1
cdef int32_t narrow_token(object token, Py_ssize_t position) except? -1
cdef cnp.ndarray as_tokens(object tokens)
cdef int64_t tokens_ahead(object lookahead) except -1
cdef int32_t* room_in(cnp.ndarray out) except NULL
cdef bytes make_namespace(object extra_key, object cache_salt)
# Of contexts and objects like them, whose code may run.
cdef object no_context(object item)
cdef object id_of(object context)


# The C++ name of a prefix-cache namespace; None for the default one.
cdef inline bytes namespace_of(object extra_key, object cache_salt):
    if extra_key is None and cache_salt is None:
        return None
    return make_namespace(extra_key, cache_salt)


# What C++ reads of a name, for as long as `name` lives.
cdef inline string_view name_view(bytes name) noexcept:
    if name is None:
        return string_view()
    return string_view(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
