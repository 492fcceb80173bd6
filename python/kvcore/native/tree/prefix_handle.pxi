# SPDX-License-Identifier: Apache-2.0
"""A prefix that was found in a tree."""


cdef class PrefixHandle:
    """A matched prefix; goes stale (InvalidHandleError) when pages of its run are evicted.

    Attributes
    ----------
    num_pages : int
    partial_tokens : int
        Tokens behind these pages that a cached page has too, as many as `match` looked ahead.

    Notes
    -----
    A handle that is dropped lets go of what it pinned.
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
        """The first pin, of the node that the prefix ends with: remembered, as runs are split."""
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
                "the handle is another tree's; match the tokens in this one"
            )
        return 0

    cdef TreePosition position(self) except *:
        """Where it ends: of what is pinned and was forgotten too."""
        if self._pins > 0:
            return CppPrefixTree.position(self._node, self._handle.depth)
        return self._native.resolve(self._handle)

    cdef TreeNode* end_in(self, object tree) except NULL:
        """The node that the prefix ends with, to go on behind it."""
        if self._handle.depth == 0:
            raise ValueError("after is a prefix of 0 pages, which has no namespace; leave it out")
        self.check_own(tree)
        return self._native.split(self._native.resolve(self._handle))


cdef PrefixHandle new_handle(object tree, CppPrefixTree* native):
    """Of nothing yet: made first, as making one may fail."""
    cdef PrefixHandle handle = PrefixHandle.__new__(PrefixHandle)
    handle._tree = tree
    handle._native = native
    return handle
