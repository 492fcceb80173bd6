# SPDX-License-Identifier: Apache-2.0
"""The prefix tree without a manager, for engines with their own manager."""


cdef int require_no_name(object extra_key, object cache_salt) except -1:
    if extra_key is not None or cache_salt is not None:
        raise ValueError("`after` sets the namespace; leave extra_key and cache_salt out")
    return 0


@cython.no_gc_clear  # objects destroyed together with a tree may still call it
cdef class PrefixTree:
    """A map from token prefixes to pages: a radix tree over runs of whole pages.

    ``insert`` adds page ids and ``evict`` returns them; the tree owns no page.

    Parameters
    ----------
    page_size : int
        Tokens per page, at least 1.
    eviction : str or kvcore.policies.EvictionPolicy
        The policy that decides which pages ``evict`` forgets first.
    token_dtype : numpy dtype
        int32, or int64 for ids outside int32. int64 stores and compares 4 more bytes per token.
    paired : bool
        A page holds `page_size` pairs of consecutive tokens, (t0, t1), (t1, t2), ...; n pairs are
        n + 1 tokens. Needs no extra bytes. For draft models that read each token together with the
        next token (EAGLE).

    Raises
    ------
    ValueError, TypeError
        The page size is below 1, or the policy or the dtype is unknown.

    Notes
    -----
    One thread at a time. ``match`` compares the tokens, ``insert`` copies them. ``pin`` and
    ``unpin`` cost O(1). ``evict`` costs O(1) amortised per page, and per run O(1) with LRU and ARC,
    O(log n) with the other policies.

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

    def __cinit__(self, page_size, eviction="lru", *, token_dtype="int32", bint paired=False):
        self._shape = shape_of(token_dtype, paired)
        cdef int64_t size = as_int(page_size, "page_size")
        cdef int64_t most = INT32_HIGH // self._shape.words
        if not 1 <= size <= most:
            raise ValueError(f"page_size is {size}, must be 1 .. {most} tokens")
        name, attention_tokens = resolved(eviction)
        cdef bytes word = name.encode()
        cdef EvictionConfig config
        config.order = eviction_order(name_view(word))
        config.attention_tokens = attention_tokens
        cdef unique_ptr[EvictionPolicy] policy = make_policy(config, <int32_t>size)
        self._native = new CppPrefixTree(<int32_t>size * self._shape.words, move(policy))
        self._trees = trees_of(self._native)

    @property
    def page_size(self):
        """Tokens per page."""
        return self._native.page_size() // self._shape.words

    @property
    def num_cached(self):
        """Number of pages in the tree."""
        return self._native.num_cached()

    @property
    def num_evictable(self):
        """Number of pages that no pin protects."""
        return self._native.num_evictable()

    @property
    def num_nodes(self):
        """Number of runs of pages in the tree."""
        return self._native.num_nodes()

    def match(self, tokens, extra_key=None, cache_salt=None, *, extra_keys=None, bint touch=False,
              lookahead=0, cnp.ndarray out=None):
        """Find the longest cached prefix in whole pages. Changes nothing by default.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
            In a tree of pairs, the n tokens are n - 1 pairs.
        extra_key, cache_salt : str, optional
            Namespace.
        touch : bool
            Count this call as a use of the pages, so they are evicted later.
        lookahead : int
            Compare up to this many tokens after the last whole page with a cached page;
            ``handle.partial_tokens`` is the number of equal tokens, less than a page. Costs O(log
            children) more.
        out : int32 [m], optional
            A contiguous array for the ids. The call returns the beginning of this array.
        extra_keys : list of (int, int, bytes), optional
            As for a context; the keys that start before token `n`.

        Returns
        -------
        (int32 [pages], PrefixHandle)

        Raises
        ------
        ValueError, TypeError
            `lookahead` is negative, or `out` has a wrong form or is too short. The call does not
            count as a use of the pages.
        """
        cdef int64_t ahead = tokens_ahead(lookahead)
        cdef cnp.ndarray source = tokens_of(self._shape, tokens)
        cdef bytes name = name_in(self._shape, namespace_of(extra_key, cache_salt), source)
        cdef PrefixHandle handle = new_handle(self, self._native)
        source = looked_up(self._shape, self._trees, extra_keys, source)
        cdef Words words = words_of(self._shape, source)
        cdef int32_t* to = <int32_t*>NULL if out is None else room_in(out)
        cdef TreeNode* root = self._native.find_namespace(name_view(name))
        cdef PrefixMatch found
        if root is NULL:
            found.at.node = self._native.find_namespace(string_view())
        else:
            found = self._native.match(root, words.data, words.n, ahead > 0)
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
        handle._handle = self._native.handle(found.at)
        handle.partial_tokens = <int32_t>min(
            ahead, <int64_t>found.partial_tokens // self._shape.words
        )
        return pages if out is None else out[:size], handle

    def insert(self, tokens, pages, extra_key=None, cache_salt=None, *, extra_keys=None,
               priority=50, bint return_handle=False, PrefixHandle after=None, bint pin=False):
        """Insert whole pages.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n * page_size]
            A tree of pairs needs one more token: the first token begins the first pair.
        pages : list of int, or array int32 or int64 [n]
        priority : int
            0 .. 100, for the priority policy; other policies ignore it. A page keeps the highest
            priority of all its inserts.
        extra_key, cache_salt, extra_keys
            As for ``match``.
        return_handle : bool
            Also return the number of leading pages that the tree had before, and a handle of all
            the pages. `pages` may contain the tree's ids of these leading pages.
        after : PrefixHandle, optional
            A prefix of at least one page: insert the pages after it, in its namespace. Costs
            nothing for the pages of the prefix, and does not count as a use of them.
        pin : bool
            Pin the returned handle; requires `return_handle`. The insert counts as a use of the
            pages when they are unpinned.

        Returns
        -------
        int32 [n], or (int32 [n], int, PrefixHandle)
            The ids that the tree has for these tokens now. If an id differs from the id in `pages`,
            the tree had the page before, and the page in `pages` still belongs to the caller.

        Raises
        ------
        ValueError
            The tokens do not fill the pages, `priority` is out of range, a namespace is given
            together with `after`, or `pin` without `return_handle`.
        InvalidHandleError
            `after` is stale or belongs to another tree.
        """
        cdef int64_t wanted = as_int(priority, "priority")
        if not 0 <= wanted <= 100:
            raise ValueError(f"priority is {wanted}, must be 0 .. 100")
        if pin and not return_handle:
            raise ValueError("pin=True pins the returned handle; pass return_handle=True also")
        cdef Retention retention = Retention(<int32_t>wanted)
        cdef cnp.ndarray run = tokens_of(self._shape, tokens)
        cdef cnp.ndarray ids = np.array(as_tokens(pages))
        cdef bytes name = name_in(self._shape, namespace_of(extra_key, cache_salt), run)
        cdef vector[DuplicatePage] duplicates
        cdef int64_t n = cnp.PyArray_DIM(ids, 0)
        cdef int32_t* out = <int32_t*>cnp.PyArray_DATA(ids)
        cdef size_t i
        if num_words(self._shape, run) != n * self._native.page_size():
            raise ValueError(
                f"{n} pages hold {n * self.page_size} tokens, "
                f"{num_words(self._shape, run) // self._shape.words} were given; pass whole pages"
            )
        cdef PrefixHandle handle = new_handle(self, self._native)
        # Keeps its stand-ins alive until the tree has them.
        cdef ExtraKeys shown = put_in(self._shape, self._trees, extra_keys, run)
        cdef const int32_t* data = words_of(self._shape, run).data
        if shown is not None:
            data = shown.tokens()
        cdef TreePosition end
        cdef TreeNode* base
        if after is None:
            base = self._native.open_namespace(name_view(name))
            end.depth = <int32_t>n
        else:
            require_no_name(extra_key, cache_salt)
            base = after.end_in(self)
            end.depth = after._handle.depth + <int32_t>n
        self._native.pin(base)  # keeps an empty namespace, which is removed without a pin
        try:
            end.node = self._native.insert(base, data, out, <int32_t>n, duplicates, retention)
            if end.depth == 0:  # an empty namespace is removed
                end.node = self._native.find_namespace(string_view())
            handle._handle = self._native.handle(end)
            handle._take(end.node)
            if not pin:
                handle._unpin()
        finally:
            self._native.unpin(base, False)
        for i in range(duplicates.size()):
            out[duplicates[i].index] = duplicates[i].cached
        return (ids, duplicates.size(), handle) if return_handle else ids

    def pin(self, PrefixHandle handle not None):
        """Keep a prefix from eviction until each pin is unpinned.

        Raises
        ------
        InvalidHandleError
            The handle is stale or belongs to another tree.
        """
        handle.check_own(self)
        handle._pin()

    def unpin(self, PrefixHandle handle not None):
        """Undo one pin of a prefix.

        Raises
        ------
        InvalidHandleError
            The prefix is not pinned, or the handle belongs to another tree.
        """
        handle.check_own(self)
        handle._unpin()

    def pages_of(self, PrefixHandle handle not None, first=0):
        """Return the page ids of a prefix, from page `first` on. Costs O(pages returned).

        Returns
        -------
        int32 [handle.num_pages - first]

        Raises
        ------
        ValueError
            `first` is outside ``0 .. handle.num_pages``.
        InvalidHandleError
            The handle is stale or belongs to another tree.
        """
        cdef int64_t start = as_int(first, "first")
        handle.check_own(self)
        cdef TreePosition at = handle.position()
        if not 0 <= start <= at.depth:
            raise ValueError(f"first is {start}, must be 0 .. {at.depth} pages")
        cdef cnp.npy_intp size = at.depth - start
        cdef cnp.ndarray pages = cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT32)
        self._native.copy_pages(at, <int32_t>start, <int32_t*>cnp.PyArray_DATA(pages))
        return pages

    def evict(self, n):
        """Forget the `n` least valuable unpinned pages, or all of them if there are fewer.

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
            Some pages are pinned; nothing has changed.
        """
        cdef int64_t pinned = self._native.num_cached() - self._native.num_evictable()
        if pinned:
            raise KVCacheError(f"{pinned} pages are pinned; unpin them first")
        return self.evict(self._native.num_cached())

    def runs(self):
        """Return every run of pages, each after the run that it continues. O(tokens).

        Returns
        -------
        list of PrefixRun
        """
        return runs_of(self._native, self._shape)

    def check_integrity(self):
        """Raise AssertionError with the violated law if the tree is inconsistent. O(pages)."""
        self._native.check_integrity()

    def __repr__(self):
        return (
            f"PrefixTree(page_size={self.page_size}, {self.num_cached} pages cached, "
            f"{self.num_evictable} evictable)"
        )

    def forget(self, pages):
        """Remove pages with wrong contents and all pages after them, e.g. after a failed load.

        Parameters
        ----------
        pages : list of int, or array int32 or int64 [n]
            Page ids. Ids that are not in the tree are ignored.

        Returns
        -------
        int
            The number of pages that left the tree. ``take_forgotten`` returns their ids to the
            caller: unpinned pages at once, pinned pages after the last unpin.

        Raises
        ------
        ValueError, TypeError
            An id is outside int32 or no integer.

        Notes
        -----
        No search finds these pages any more. A pinned handle keeps its pages and may still be used
        with ``pages_of`` and ``unpin``; an insert after it raises InvalidHandleError. Costs O(pages
        in the tree).
        """
        cdef cnp.ndarray asked = as_tokens(pages)
        cdef FreedList freed = self._forgotten
        if freed is None:
            freed = self._forgotten = FreedList()
        # No other code may run from here on, because it could change the tree.
        freed.trees = self._trees
        cdef int64_t before = self._native.num_cached()
        cdef TreeBranches branches = self._native.find_branches(ends_of(self._native, asked))
        cdef int64_t room = freed.pages.ids.size() + self._native.num_forgotten()
        cdef size_t i
        cdef TreeNode* run
        for i in range(branches.runs.size()):
            run = branches.runs[i]
            room += CppPrefixTree.depth_of(run) - CppPrefixTree.start_of(run)
        freed.pages.ids.reserve(room)
        self._native.set_forgotten_listener(<ForgottenListener*>&freed.pages)
        self._native.forget(branches)
        return before - self._native.num_cached()

    def take_forgotten(self):
        """Return the forgotten pages that no pin protects any more; each page is returned once.

        Returns
        -------
        int32 [pages]
            Their ids; the pages belong to the caller again.
        """
        cdef FreedList freed = self._forgotten
        cdef cnp.npy_intp size = 0 if freed is None else freed.pages.ids.size()
        cdef cnp.ndarray pages = cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT32)
        if size > 0:
            memcpy(cnp.PyArray_DATA(pages), freed.pages.ids.data(), size * sizeof(int32_t))
            freed.pages.ids.erase(freed.pages.ids.begin(), freed.pages.ids.begin() + size)
        return pages
