# SPDX-License-Identifier: Apache-2.0
"""Forgotten pages of a prefix tree: pages whose contents are wrong."""


cdef extern from *:
    """
    #include <vector>

    #include "kvcore/prefix_tree.hpp"

    // Forgotten pages that no pin holds any more. `ids` has room for all pages still pinned.
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
@cython.no_gc_clear  # its destructor needs the tree
cdef class FreedList:
    """The list of pages that a tree returns to its user."""

    cdef FreedPages pages
    cdef KeyedTrees trees

    def __dealloc__(self):
        if self.trees is not None:
            self.trees.tree.set_forgotten_listener(NULL)


cdef vector[TreePosition] ends_of(CppPrefixTree* tree, cnp.ndarray asked) except *:
    """Return the positions of these pages in the tree; on each path only the first page."""
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
        if taken.count(CppPrefixTree.parent_of(nodes[i])):
            taken.insert(nodes[i])
            continue
        at.node = <TreeNode*>nodes[i]
        at.depth = CppPrefixTree.depth_of(nodes[i])
        pages.resize(at.depth - CppPrefixTree.start_of(nodes[i]))
        tree.copy_pages(at, CppPrefixTree.start_of(nodes[i]), pages.data())
        for page in range(pages.size()):
            if ids.count(pages[page]):
                at.depth = CppPrefixTree.start_of(nodes[i]) + <int32_t>page + 1
                found.push_back(at)
                taken.insert(nodes[i])
                break
    return found
