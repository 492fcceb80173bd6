# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from kvcore._hot.extra_keys cimport KeyedTrees
from kvcore.cpp cimport PrefixTree as CppPrefixTree


cdef class ForgettingTree:
    cdef CppPrefixTree* _native  # which `_trees` owns
    cdef KeyedTrees _trees
    cdef object _forgotten
