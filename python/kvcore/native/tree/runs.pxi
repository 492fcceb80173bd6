# SPDX-License-Identifier: Apache-2.0
"""Copies of the runs of a prefix tree."""


cdef extern from *:
    """
    // A copy of a run.
    struct CopiedRun {
        std::int64_t parent;
        std::int32_t start;
        std::vector<std::int32_t> tokens;
        std::vector<std::int32_t> pages;
        std::string name;
        bool is_pinned;
    };
    """
    cdef cppclass CopiedRun:
        int64_t parent
        int32_t start
        vector[TokenId] tokens
        vector[TokenId] pages
        string name
        bint is_pinned


cdef list runs_of(const CppPrefixTree* tree, TokenShape shape):
    """Return the runs of a tree.

    Copies all runs before it makes the first Python object, because that may run other code.
    """
    cdef vector[const_node_ptr] nodes = tree.runs()
    cdef vector[CopiedRun] copies
    cdef unordered_map[const_node_ptr, size_t] places
    cdef const TreeNode* parent
    cdef TreePosition at
    cdef string_view name
    cdef size_t i
    copies.resize(nodes.size())
    for i in range(nodes.size()):
        places[nodes[i]] = i
        parent = CppPrefixTree.parent_of(nodes[i])
        name = CppPrefixTree.name_of(nodes[i])
        at.node = <TreeNode*>nodes[i]
        at.depth = CppPrefixTree.depth_of(nodes[i])
        copies[i].parent = -1 if parent is NULL else <int64_t>places[parent]
        copies[i].start = CppPrefixTree.start_of(nodes[i])
        copies[i].tokens = tree.tokens_of(at, copies[i].start)
        copies[i].pages.resize(at.depth - copies[i].start)
        tree.copy_pages(at, copies[i].start, copies[i].pages.data())
        copies[i].name.assign(name.data(), name.size())
        copies[i].is_pinned = tree.is_protected(at)
        if shape.paired:
            begin_pairs(tree, parent, shape.words, copies[i])
    return [run_of(copies[i], shape) for i in range(copies.size())]


cdef int begin_pairs(const CppPrefixTree* tree, const TreeNode* parent, int32_t words,
                     CopiedRun& run) except -1:
    """Insert the first token of the first pair: from the end of the parent, or from the name."""
    cdef size_t size = run.name.size() - sizeof(int64_t)
    cdef vector[TokenId] front
    cdef TreePosition at
    if parent is NULL:
        front.resize(2)
        memcpy(front.data(), run.name.data() + size, sizeof(int64_t))
        front.resize(words)  # the low word is the first
    else:
        at.node = <TreeNode*>parent
        at.depth = CppPrefixTree.depth_of(parent)
        front = tree.tokens_of(at, at.depth - 1)
        front.erase(front.begin(), front.end() - words)
    run.name.resize(size)
    front.insert(front.end(), run.tokens.begin(), run.tokens.end())
    run.tokens.swap(front)
    return 0


cdef object run_of(const CopiedRun& run, TokenShape shape):
    cdef NamespaceParts parts = read_namespace_name(string_view(run.name.data(), run.name.size()))
    tokens = array_of(run.tokens)
    return PrefixRun(
        None if run.parent < 0 else run.parent,
        run.start,
        tokens if shape.words == 1 else tokens.view(np.int64),
        array_of(run.pages),
        text_of(parts.extra_key),
        text_of(parts.cache_salt),
        run.is_pinned,
    )


cdef object text_of(const optional[string_view]& part):
    """Return a part of a namespace's name."""
    if not part.has_value():
        return None
    return part.value().data()[:part.value().size()].decode()


cdef cnp.ndarray array_of(const vector[TokenId]& values):
    cdef cnp.npy_intp size = values.size()
    cdef cnp.ndarray found = cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT32)
    memcpy(cnp.PyArray_DATA(found), values.data(), size * sizeof(int32_t))
    return found
