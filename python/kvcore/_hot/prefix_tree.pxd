# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from kvcore._hot.extra_keys cimport KeyedTrees
from kvcore._hot.tree_tokens cimport TokenShape
from kvcore.cpp cimport PrefixTree as CppPrefixTree


cdef class PrefixTree:
    cdef CppPrefixTree* _native  # which `_trees` owns
    cdef KeyedTrees _trees
    cdef TokenShape _shape
