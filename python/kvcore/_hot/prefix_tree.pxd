# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from kvcore._hot.tree_forget cimport ForgettingTree
from kvcore._hot.tree_tokens cimport TokenShape


cdef class PrefixTree(ForgettingTree):
    cdef TokenShape _shape
