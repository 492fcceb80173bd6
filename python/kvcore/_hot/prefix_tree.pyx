# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, autotestdict=False
"""The prefix tree by itself, for engines that bring their own manager."""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t
from libcpp.memory cimport unique_ptr
from libcpp.utility cimport move
from libcpp.vector cimport vector

from kvcore._hot.arguments cimport INT32_HIGH, as_int, as_tokens, name_view, namespace_of
from kvcore._hot.extra_keys cimport (
    ExtraKeys,
    as_extra_keys,
    require_plain,
    show_tokens,
    shown_of,
    trees_of,
)
from kvcore._hot.prefixes cimport room_in, tokens_ahead
from kvcore._hot.tree_runs cimport runs_of
from kvcore.cpp cimport (
    DuplicatePage,
    EvictionConfig,
    EvictionPolicy,
    PrefixMatch,
    Retention,
    TreeNode,
    TreePosition,
    eviction_order,
    make_policy,
    string_view,
)
from kvcore.cpp cimport PrefixHandle as CppPrefixHandle
from kvcore.cpp cimport PrefixTree as CppPrefixTree

import numpy as np

from kvcore.errors import InvalidHandleError, KVCacheError
from kvcore.policies import resolved

cnp.import_array()


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
            self._node = self._tree._native.split(self._tree._native.resolve(self._handle))
        self._tree._native.pin(self._node)
        self._pins += 1
        return 0

    cdef int _unpin(self) except -1:
        if self._pins == 0:
            raise InvalidHandleError(
                f"a prefix of {self._handle.depth} pages is not pinned; unpin each pin once"
            )
        cdef TreePosition end
        self._pins -= 1
        # The prefix may end in another node than when it was matched: remember which.
        end.node = self._node
        end.depth = self._handle.depth
        self._handle = self._tree._native.handle(end)
        self._tree._native.unpin(self._node, True)
        return 0

    def __del__(self):
        while self._pins > 0:
            self._unpin()

    def __repr__(self):
        return f"PrefixHandle({self._handle.depth} pages)"


@cython.no_gc_clear  # what dies with a tree may still ask
cdef class PrefixTree:
    """Remember which pages hold which tokens: a radix tree over runs of whole pages.

    Page ids go in by ``insert`` and come out by ``evict``; the tree owns no page.

    Parameters
    ----------
    page_size : int
        Tokens per page, at least 1.
    eviction : str or kvcore.policies.EvictionPolicy
        Which pages ``evict`` forgets first.

    Raises
    ------
    ValueError, TypeError
        A page size below 1, or no such policy.

    Notes
    -----
    One thread at a time. ``match`` costs comparing the tokens, ``insert`` copying them, ``pin`` and
    ``unpin`` O(1), ``evict`` O(1) amortised per page, O(log n) per run with most other policies.

    Examples
    --------
    >>> from kvcore import PrefixTree
    >>> tree = PrefixTree(page_size=2)
    >>> tree.insert([1, 2, 3, 4], [7, 8]).tolist()
    [7, 8]
    >>> pages, handle = tree.match([1, 2, 9, 9])
    >>> pages.tolist(), handle.num_pages
    ([7], 1)
    """

    def __cinit__(self, page_size, eviction="lru"):
        cdef int64_t size = as_int(page_size, "page_size")
        if not 1 <= size <= INT32_HIGH:
            raise ValueError(f"page_size is {size}, must be 1 .. {INT32_HIGH} tokens")
        name, attention_tokens = resolved(eviction)
        cdef bytes word = name.encode()
        cdef EvictionConfig config
        config.order = eviction_order(name_view(word))
        config.attention_tokens = attention_tokens
        cdef unique_ptr[EvictionPolicy] policy = make_policy(config, <int32_t>size)
        self._native = new CppPrefixTree(<int32_t>size, move(policy))
        self._trees = trees_of(self._native)

    @property
    def page_size(self):
        """Tokens per page."""
        return self._native.page_size()

    @property
    def num_cached(self):
        """Pages in the tree."""
        return self._native.num_cached()

    @property
    def num_evictable(self):
        """Pages that no pin protects."""
        return self._native.num_evictable()

    @property
    def num_nodes(self):
        """Runs of pages that the tree is made of."""
        return self._native.num_nodes()

    def match(self, tokens, extra_key=None, cache_salt=None, *, extra_keys=None, bint touch=False,
              lookahead=0, cnp.ndarray out=None):
        """Find the longest cached prefix in whole pages; changes nothing unless it is to touch.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_key, cache_salt : str, optional
            Namespace.
        touch : bool
            It is a use of these pages, by which they are evicted later.
        lookahead : int
            Also count how many of so many tokens behind the last whole page a cached page has too:
            ``handle.partial_tokens``, less than a page. O(log children) more.
        out : int32 [m], optional
            Where the ids go; contiguous. What is returned is its beginning.
        extra_keys : list of (int, int, bytes), optional
            As of a context; those that start in front of `n`.

        Returns
        -------
        (int32 [pages], PrefixHandle)

        Raises
        ------
        ValueError, TypeError
            A negative `lookahead`; an `out` that is none, or too short. Then it is no use either.
        """
        cdef int64_t ahead = tokens_ahead(lookahead)
        cdef int32_t* to = <int32_t*>NULL if out is None else room_in(out)
        cdef cnp.ndarray source = as_tokens(tokens)
        cdef bytes name = namespace_of(extra_key, cache_salt)
        source = shown_of(self._trees, extra_keys, source)
        cdef TreeNode* root = self._native.find_namespace(name_view(name))
        cdef PrefixMatch found
        if root is NULL:
            found.at.node = self._native.find_namespace(string_view())
        else:
            found = self._native.match(
                root,
                <const int32_t*>cnp.PyArray_DATA(source),
                cnp.PyArray_DIM(source, 0),
                ahead > 0,
            )
        cdef cnp.npy_intp size = found.at.depth
        cdef cnp.ndarray pages = out
        if out is None:
            pages = cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT32)
            to = <int32_t*>cnp.PyArray_DATA(pages)
        elif cnp.PyArray_DIM(out, 0) < size:
            raise ValueError(
                f"out has room for {cnp.PyArray_DIM(out, 0)} ids, must have it for {size}"
            )
        if touch:
            self._native.touch(found.at)
        self._native.copy_pages(found.at, 0, to)
        cdef PrefixHandle handle = self._handle_of(found.at)
        handle.partial_tokens = <int32_t>min(ahead, <int64_t>found.partial_tokens)
        return pages if out is None else out[:size], handle

    def insert(self, tokens, pages, extra_key=None, cache_salt=None, *, extra_keys=None,
               priority=50, bint return_handle=False):
        """Put whole pages in.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n * page_size]
        pages : list of int, or array int32 or int64 [n]
        priority : int
            0 .. 100, for the priority policy; others ignore it. Pages keep the highest one they
            were given.
        extra_key, cache_salt, extra_keys
            As of ``match``.
        return_handle : bool
            Also return how many of the pages, from the first on, the tree had before, and a handle
            of them all. Their ids may be the tree's own.

        Returns
        -------
        int32 [n], or (int32 [n], int, PrefixHandle)
            The ids that the tree has for these tokens now. Where one differs from yours, the tree
            had the page already, and yours stays yours.

        Raises
        ------
        ValueError
            The tokens do not fill the pages, or a priority that is none.
        """
        cdef int64_t wanted = as_int(priority, "priority")
        if not 0 <= wanted <= 100:
            raise ValueError(f"priority is {wanted}, must be 0 .. 100")
        cdef Retention retention = Retention(<int32_t>wanted)
        cdef cnp.ndarray run = as_tokens(tokens)
        cdef cnp.ndarray ids = np.array(as_tokens(pages))
        cdef bytes name = namespace_of(extra_key, cache_salt)
        cdef vector[DuplicatePage] duplicates
        cdef int64_t n = cnp.PyArray_DIM(ids, 0)
        cdef int32_t* out = <int32_t*>cnp.PyArray_DATA(ids)
        cdef size_t i
        if cnp.PyArray_DIM(run, 0) != n * self._native.page_size():
            raise ValueError(
                f"{n} pages hold {n * self._native.page_size()} tokens, "
                f"{cnp.PyArray_DIM(run, 0)} were given; pass whole pages"
            )
        cdef tuple keys = as_extra_keys(extra_keys, cnp.PyArray_DIM(run, 0), False)
        cdef const int32_t* data = <const int32_t*>cnp.PyArray_DATA(run)
        cdef ExtraKeys shown  # held till the tree has them
        if keys is not None:
            self._trees.expect_keys()
            shown = show_tokens(keys, data, cnp.PyArray_DIM(run, 0), cnp.PyArray_DIM(run, 0))
            data = shown.tokens()
        elif self._trees.is_keyed:
            require_plain(data, 0, cnp.PyArray_DIM(run, 0))
        cdef TreeNode* root = self._native.open_namespace(name_view(name))
        cdef TreePosition end
        cdef PrefixHandle handle = None
        self._native.pin(root)  # an empty namespace goes when nobody holds it
        try:
            end.node = self._native.insert(root, data, out, <int32_t>n, duplicates, retention)
            end.depth = <int32_t>n
            self._native.pin(end.node)
            self._native.unpin(end.node, True)
            if n == 0:  # an empty namespace goes
                end.node = self._native.find_namespace(string_view())
            if return_handle:
                handle = self._handle_of(end)
        finally:
            self._native.unpin(root, False)
        for i in range(duplicates.size()):
            out[duplicates[i].index] = duplicates[i].cached
        return (ids, duplicates.size(), handle) if return_handle else ids

    def pin(self, PrefixHandle handle not None):
        """Keep a prefix from eviction until unpinned as often.

        Raises
        ------
        InvalidHandleError
            The handle is stale, or another tree's.
        """
        self._check_own(handle)
        handle._pin()

    def unpin(self, PrefixHandle handle not None):
        """Let a prefix go.

        Raises
        ------
        InvalidHandleError
            The prefix is not pinned, or the handle is another tree's.
        """
        self._check_own(handle)
        handle._unpin()

    cdef PrefixHandle _handle_of(self, TreePosition at):
        cdef CppPrefixHandle native = self._native.handle(at)  # before code of others can run
        cdef PrefixHandle handle = PrefixHandle.__new__(PrefixHandle)
        handle._tree = self
        handle._handle = native
        return handle

    cdef int _check_own(self, PrefixHandle handle) except -1:
        if handle._tree is not self:
            raise InvalidHandleError(
                "the handle is another tree's; match the tokens in this one"
            )
        return 0

    def evict(self, n):
        """Forget the `n` least valuable unpinned pages, or as many as there are.

        Returns
        -------
        int32 [evicted]
            Their ids.
        """
        cdef int64_t wanted = as_int(n, "n")
        if wanted < 0:
            raise ValueError(f"n is {wanted}, must be at least 0")
        cdef cnp.npy_intp size = min(wanted, self._native.num_evictable())
        cdef cnp.ndarray pages = cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT32)
        self._native.evict(size, <int32_t*>cnp.PyArray_DATA(pages))
        return pages

    def reset(self):
        """Forget all pages.

        Returns
        -------
        int32 [pages]
            Their ids, the least valuable first.

        Raises
        ------
        KVCacheError
            Some are pinned; then nothing has changed.
        """
        cdef int64_t pinned = self._native.num_cached() - self._native.num_evictable()
        if pinned:
            raise KVCacheError(f"{pinned} pages are pinned; unpin them first")
        return self.evict(self._native.num_cached())

    def runs(self):
        """Return every run of pages, each behind the one that it continues. O(tokens).

        Returns
        -------
        list of PrefixRun
        """
        return runs_of(self._native)

    def check_integrity(self):
        """Raise AssertionError naming the law that does not hold. O(pages)."""
        self._native.check_integrity()

    def __repr__(self):
        return (
            f"PrefixTree(page_size={self.page_size}, {self.num_cached} pages cached, "
            f"{self.num_evictable} evictable)"
        )
