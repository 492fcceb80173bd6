# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from libc.stdint cimport int32_t, int64_t

from kvcore.cpp cimport PrefixHandle as CppPrefixHandle
from kvcore.cpp cimport PrefixTree as CppPrefixTree
from kvcore.cpp cimport TreeNode, TreePosition
from kvcore.native.contexts cimport KeyedTrees


# The form of a tree's tokens: int32 words per token, and whether the tree stores pairs of tokens.
cdef struct TokenShape:
    int32_t words
    bint paired


cdef class PrefixHandle:
    cdef object _tree
    cdef CppPrefixTree* _native  # kept alive by `_tree`
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
    cdef CppPrefixTree* _native  # owned by `_trees`
    cdef KeyedTrees _trees
    cdef object _forgotten
    cdef TokenShape _shape
