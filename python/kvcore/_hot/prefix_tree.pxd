# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from libc.stdint cimport int32_t, int64_t

from kvcore._hot.extra_keys cimport KeyedTrees
from kvcore.cpp cimport PrefixHandle as CppPrefixHandle
from kvcore.cpp cimport PrefixTree as CppPrefixTree
from kvcore.cpp cimport TreeNode, TreePosition


cdef class PrefixHandle:
    cdef PrefixTree _tree
    cdef CppPrefixHandle _handle
    cdef TreeNode* _node
    cdef int64_t _pins
    cdef readonly int32_t partial_tokens

    cdef int _pin(self) except -1
    cdef int _unpin(self) except -1


cdef class PrefixTree:
    cdef CppPrefixTree* _native  # which `_trees` owns
    cdef KeyedTrees _trees

    cdef int _check_own(self, PrefixHandle handle) except -1
    cdef PrefixHandle _handle_of(self, TreePosition at)
