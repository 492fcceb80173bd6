# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libcpp.vector cimport vector

from kvcore.cpp cimport CacheManager, PrefixTree, StandIns, TokenId

# Of the process. Ids up to the second one may be stand-ins.
cdef StandIns* stand_ins
cdef int32_t HIGHEST_STAND_IN
# True since extra keys were first used in this process: before, nothing has to be looked at.
cdef bint keys_in_use


# A token of a request that is shown to the prefix tree as another id.
cdef struct ShownToken:
    int64_t position
    int32_t stand_in


@cython.final
cdef class ExtraKeys:
    cdef list keys  # (start, length, bytes), normalised; cut at the end
    cdef cnp.ndarray shown  # int32 [at least the tokens]: what the prefix tree sees of them
    cdef vector[ShownToken] held  # by position

    cdef int give_up(self, size_t first) noexcept
    cdef const int32_t* tokens(self) noexcept
    cdef int append(self, const int32_t* tokens, int64_t n, int64_t end) except -1
    cdef int cut(self, int64_t end) except -1


# The trees of one manager, or one tree by itself, and whether extra keys were used with them.
@cython.final
cdef class KeyedTrees:
    cdef object core  # whose manager it is; None for a tree, which is its own
    cdef CacheManager* manager
    cdef PrefixTree* tree
    cdef bint is_keyed
    cdef object __weakref__

    cdef int find_stand_ins(self, vector[TokenId]& found) except -1
    cdef int expect_keys(self) except -1


cdef KeyedTrees trees_of_manager(object core)
cdef KeyedTrees trees_of(PrefixTree* tree)

# None without keys. `whole`: none may reach behind the n tokens.
cdef inline tuple as_extra_keys(object given, int64_t n, bint whole):
    return None if given is None else checked_keys(given, n, whole)


cdef tuple checked_keys(object given, int64_t n, bint whole)
cdef tuple keys_in_front(list keys, int64_t end)
# The tokens of a request with such keys; `capacity` for what comes behind them.
cdef ExtraKeys show_tokens(tuple keys, const int32_t* tokens, int64_t n, int64_t capacity)
# Of a question: up to the first key that these trees have nothing behind.
cdef inline cnp.ndarray shown_of(KeyedTrees trees, object extra_keys, cnp.ndarray tokens):
    if extra_keys is None and not trees.is_keyed:
        return tokens
    return look_up_keys(trees, extra_keys, tokens)


cdef cnp.ndarray look_up_keys(KeyedTrees trees, object extra_keys, cnp.ndarray tokens)
# No token from `first` on may be mistaken for a stand-in.
cdef bint is_plain(const int32_t* tokens, int64_t first, int64_t end) noexcept
# ValueError where one may.
cdef int require_plain(const int32_t* tokens, int64_t first, int64_t end) except -1
