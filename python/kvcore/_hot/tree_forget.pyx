# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, autotestdict=False
"""Pages of a prefix tree whose contents are wrong."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy
from libcpp.unordered_set cimport unordered_set
from libcpp.vector cimport vector

from kvcore._hot.arguments cimport as_tokens
from kvcore._hot.extra_keys cimport KeyedTrees
from kvcore.cpp cimport (
    BlockId,
    ForgottenListener,
    PrefixTree,
    TreeBranches,
    TreeNode,
    TreePosition,
    const_node_ptr,
)

cnp.import_array()

cdef extern from *:
    """
    #include <vector>

    #include "kvcore/prefix_tree.hpp"

    // Forgotten pages that nobody holds any more. There is room for all that are still held.
    struct FreedPages final : kvcore::ForgottenListener {
        void left(const kvcore::BlockId*, std::int32_t) noexcept override {}
        void let_go(const kvcore::BlockId* gone, std::int32_t n) noexcept override {
            ids.insert(ids.end(), gone, gone + n);
        }
        std::vector<kvcore::BlockId> ids;
    };
    """
    cdef cppclass FreedPages(ForgottenListener):
        vector[BlockId] ids


@cython.final
@cython.no_gc_clear  # the tree must still be there when it dies
cdef class FreedList:
    """Where a tree lists what its user gets back."""

    cdef FreedPages pages
    cdef KeyedTrees trees

    def __dealloc__(self):
        if self.trees is not None:
            self.trees.tree.set_forgotten_listener(NULL)


cdef vector[TreePosition] ends_of(PrefixTree* tree, cnp.ndarray asked) except *:
    """Where these pages are cached, but none behind another one."""
    cdef const int32_t* first = <const int32_t*>cnp.PyArray_DATA(asked)
    cdef vector[const_node_ptr] nodes = tree.runs()
    cdef unordered_set[int32_t] ids
    cdef unordered_set[const_node_ptr] taken
    cdef vector[TreePosition] found
    cdef vector[BlockId] pages
    cdef TreePosition at
    cdef size_t i, page
    for i in range(cnp.PyArray_DIM(asked, 0)):
        ids.insert(first[i])
    for i in range(nodes.size()):
        if taken.count(PrefixTree.parent_of(nodes[i])):
            taken.insert(nodes[i])
            continue
        at.node = <TreeNode*>nodes[i]
        at.depth = PrefixTree.depth_of(nodes[i])
        pages.resize(at.depth - PrefixTree.start_of(nodes[i]))
        tree.copy_pages(at, PrefixTree.start_of(nodes[i]), pages.data())
        for page in range(pages.size()):
            if ids.count(pages[page]):
                at.depth = PrefixTree.start_of(nodes[i]) + <int32_t>page + 1
                found.push_back(at)
                taken.insert(nodes[i])
                break
    return found


@cython.no_gc_clear  # as the tree that derives from it
cdef class ForgettingTree:
    """What a tree does with pages that went bad."""

    def forget(self, pages):
        """Take pages out whose contents are wrong, say of a load that failed, and all behind them.

        Parameters
        ----------
        pages : list of int, or array int32 or int64 [n]
            Ids. Those that are not in the tree are passed over.

        Returns
        -------
        int
            Pages that left the tree. ``take_forgotten`` tells which of them are yours again: at
            once those that no pin protects, the others once they are unpinned.

        Raises
        ------
        ValueError, TypeError
            Ids beyond int32, or that are none.

        Notes
        -----
        Nothing finds these pages any more. Whoever has pinned them keeps them, and may ask
        ``pages_of`` and ``unpin``; to go on behind them is an InvalidHandleError. Costs O(pages in
        the tree).
        """
        cdef cnp.ndarray asked = as_tokens(pages)
        cdef FreedList freed = self._forgotten
        if freed is None:
            freed = self._forgotten = FreedList()
        # From here on no other code runs: it might change the tree.
        freed.trees = self._trees
        cdef int64_t before = self._native.num_cached()
        cdef TreeBranches branches = self._native.find_branches(ends_of(self._native, asked))
        cdef int64_t room = freed.pages.ids.size() + self._native.num_forgotten()
        cdef size_t i
        for i in range(branches.runs.size()):
            room += PrefixTree.depth_of(branches.runs[i]) - PrefixTree.start_of(branches.runs[i])
        freed.pages.ids.reserve(room)
        self._native.set_forgotten_listener(<ForgottenListener*>&freed.pages)
        self._native.forget(branches)
        return before - self._native.num_cached()

    def take_forgotten(self):
        """Return forgotten pages that no pin protects any more, each of them once.

        Returns
        -------
        int32 [pages]
            Their ids, yours again.
        """
        cdef FreedList freed = self._forgotten
        cdef cnp.npy_intp size = 0 if freed is None else freed.pages.ids.size()
        cdef cnp.ndarray pages = cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT32)
        if size > 0:
            memcpy(cnp.PyArray_DATA(pages), freed.pages.ids.data(), size * sizeof(int32_t))
            freed.pages.ids.erase(freed.pages.ids.begin(), freed.pages.ids.begin() + size)
        return pages
