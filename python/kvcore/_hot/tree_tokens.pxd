# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from kvcore._hot.extra_keys cimport ExtraKeys, KeyedTrees


# What a tree calls a token: so many int32 words, and whether each goes with the one behind it.
cdef struct TokenShape:
    int32_t words
    bint paired


# Words to compare or copy, for as long as the array they are of lives.
cdef struct Words:
    const int32_t* data
    int64_t n


cdef TokenShape shape_of(object token_dtype, bint paired) except *
cdef cnp.ndarray tokens_of(TokenShape shape, object tokens)
cdef bytes name_in(TokenShape shape, bytes name, cnp.ndarray tokens)
cdef cnp.ndarray looked_up(TokenShape shape, KeyedTrees trees, object extra_keys,
                           cnp.ndarray tokens)
cdef ExtraKeys put_in(TokenShape shape, KeyedTrees trees, object extra_keys, cnp.ndarray tokens)


# A pair is told from others by its second token: the first is that of the pair in front, or named.
cdef inline int64_t num_skipped(TokenShape shape, cnp.ndarray tokens) noexcept:
    return 1 if shape.paired and cnp.PyArray_DIM(tokens, 0) > 0 else 0


cdef inline int64_t num_words(TokenShape shape, cnp.ndarray tokens) noexcept:
    return (cnp.PyArray_DIM(tokens, 0) - num_skipped(shape, tokens)) * shape.words


cdef inline Words words_of(TokenShape shape, cnp.ndarray tokens) noexcept:
    cdef Words words
    words.data = <const int32_t*>cnp.PyArray_DATA(tokens)
    words.data += num_skipped(shape, tokens) * shape.words
    words.n = num_words(shape, tokens)
    return words
