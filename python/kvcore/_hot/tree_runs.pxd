# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
from kvcore._hot.tree_tokens cimport TokenShape
from kvcore.cpp cimport PrefixTree


cdef list runs_of(const PrefixTree* tree, TokenShape shape)
