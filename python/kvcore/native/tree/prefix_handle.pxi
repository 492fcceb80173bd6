# SPDX-License-Identifier: Apache-2.0
"""A handle of a cached prefix in a tree."""


cdef class PrefixHandle:
    """A matched prefix; it becomes stale (InvalidHandleError) if pages of its run are evicted.

    Attributes
    ----------
    num_pages : int
    partial_tokens : int
        Number of tokens after these pages that equal the tokens of a cached page, at most the
        `lookahead` of ``match``.

    Notes
    -----
    The pins of a handle end when it is destroyed.
    """

    @property
    def num_pages(self):
        return self._handle.depth

    cdef int _pin(self) except -1:
        if self._pins == 0:
            self._take(self._native.split(self._native.resolve(self._handle)))
            return 0
        self._native.pin(self._node)
        self._pins += 1
        return 0

    cdef void _take(self, TreeNode* end) noexcept:
        """Take the first pin, of the node at the end of the prefix; store it, as runs may split."""
        cdef TreePosition at
        at.node = self._node = end
        at.depth = self._handle.depth
        self._handle = self._native.handle(at)
        self._native.pin(end)
        self._pins = 1

    cdef int _unpin(self) except -1:
        if self._pins == 0:
            raise InvalidHandleError(
                f"a prefix of {self._handle.depth} pages is not pinned; unpin each pin once"
            )
        self._pins -= 1
        self._native.unpin(self._node, True)
        return 0

    def __del__(self):
        while self._pins > 0:
            self._unpin()

    def __repr__(self):
        return f"PrefixHandle({self._handle.depth} pages)"

    cdef int check_own(self, object tree) except -1:
        if self._tree is not tree:
            raise InvalidHandleError(
                "the handle belongs to another tree; match the tokens in this tree"
            )
        return 0

    cdef TreePosition position(self) except *:
        """Return the end of the prefix; also works for a pinned prefix that was forgotten."""
        if self._pins > 0:
            return CppPrefixTree.position(self._node, self._handle.depth)
        return self._native.resolve(self._handle)

    cdef TreeNode* end_in(self, object tree) except NULL:
        """Return the node at the end of the prefix, to insert pages after it."""
        if self._handle.depth == 0:
            raise ValueError("after is a prefix of 0 pages, which has no namespace; leave it out")
        self.check_own(tree)
        return self._native.split(self._native.resolve(self._handle))


cdef PrefixHandle new_handle(object tree, CppPrefixTree* native):
    """Return an empty handle; made before the work on the tree, because the allocation may fail."""
    cdef PrefixHandle handle = PrefixHandle.__new__(PrefixHandle)
    handle._tree = tree
    handle._native = native
    return handle
