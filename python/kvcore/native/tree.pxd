# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from libc.stdint cimport int32_t, int64_t

from kvcore.cpp cimport PrefixHandle as CppPrefixHandle
from kvcore.cpp cimport PrefixTree as CppPrefixTree
from kvcore.cpp cimport TreeNode, TreePosition
from kvcore.native.contexts cimport KeyedTrees


# How a tree stores a token: so many int32 words, and whether each goes with the one behind it.
cdef struct TokenShape:
    int32_t words
    bint paired


cdef class PrefixHandle:
    cdef object _tree
    cdef CppPrefixTree* _native  # which `_tree` keeps
    cdef CppPrefixHandle _handle
    cdef TreeNode* _node
    cdef int64_t _pins
    cdef readonly int32_t partial_tokens

    cdef int _pin(self) except -1
    cdef int _unpin(self) except -1
    cdef void _take(self, TreeNode* end) noexcept
    cdef int check_own(self, object tree) except -1
    cdef TreePosition position(self) except *
    cdef TreeNode* end_in(self, object tree) except NULL


cdef class PrefixTree:
    cdef CppPrefixTree* _native  # which `_trees` owns
    cdef KeyedTrees _trees
    cdef object _forgotten
    cdef TokenShape _shape
