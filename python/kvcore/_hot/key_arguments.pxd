# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t
from libcpp.string cimport string
from libcpp.vector cimport vector

from kvcore.cpp cimport KeyChain, KeyOptions, PageKey, PlacedKey

# Appends None, an int, a str, bytes, a list or a tuple as one item of canonical CBOR.
cdef int put_item(string& out, object item, str name, int depth) except -1
cdef int64_t as_page_size(object page_size) except -1
cdef PageKey as_page_key(object key) except *
cdef KeyOptions as_options(
    object extra_key, object cache_salt, object seed, object scheme, object prompt_embeds,
    int64_t page_size
) except *


# Tokens with the extra keys that start in them, as the library takes them.
@cython.final
cdef class Prompt:
    cdef cnp.ndarray tokens
    cdef tuple keys  # whose bytes `placed` points to
    cdef vector[PlacedKey] placed

    cdef int extend(self, KeyChain* chain) except -1 nogil


# Of what comes behind the first tokens.
cdef Prompt prompt_of(cnp.ndarray tokens, object extra_keys, int64_t first, bint is_vllm)
