# SPDX-License-Identifier: Apache-2.0
"""The prefix tree by itself, for engines that bring their own manager."""


cdef int require_no_name(object extra_key, object cache_salt) except -1:
    if extra_key is not None or cache_salt is not None:
        raise ValueError("the namespace is that of `after`; leave extra_key and cache_salt out")
    return 0


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
    token_dtype : numpy dtype
        int32, or int64 for ids that need more: 4 more bytes per token, to keep and to compare.
    paired : bool
        A page holds `page_size` pairs of neighbours, (t0, t1), (t1, t2), ...: n of them are n + 1
        tokens. No more bytes; for drafts that read a token and the one behind it (EAGLE).

    Raises
    ------
    ValueError, TypeError
        A page size below 1, or no such policy or dtype.

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
            Of the pairs [n - 1] in a tree of those.
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
        """Put whole pages in.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n * page_size]
            One more in a tree of pairs: the first one begins the first pair.
        pages : list of int, or array int32 or int64 [n]
        priority : int
            0 .. 100, for the priority policy; others ignore it. Pages keep the highest one they
            were given.
        extra_key, cache_salt, extra_keys
            As of ``match``.
        return_handle : bool
            Also return how many of the pages, from the first on, the tree had before, and a handle
            of them all. Their ids may be the tree's own.
        after : PrefixHandle, optional
            Of at least one page: put these behind it, in its namespace. Costs nothing for what lies
            in front, and is no use of it.
        pin : bool
            With `return_handle`: the handle is pinned. It is no use of the pages until unpinned.

        Returns
        -------
        int32 [n], or (int32 [n], int, PrefixHandle)
            The ids that the tree has for these tokens now. Where one differs from yours, the tree
            had the page already, and yours stays yours.

        Raises
        ------
        ValueError
            The tokens do not fill the pages, a priority that is none, a namespace beside `after`,
            or a pin that nobody gets.
        InvalidHandleError
            `after` is stale, or another tree's.
        """
        cdef int64_t wanted = as_int(priority, "priority")
        if not 0 <= wanted <= 100:
            raise ValueError(f"priority is {wanted}, must be 0 .. 100")
        if pin and not return_handle:
            raise ValueError("pin=True pins the handle; pass return_handle=True too")
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
        cdef ExtraKeys shown = put_in(self._shape, self._trees, extra_keys, run)  # held till then
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
        self._native.pin(base)  # an empty namespace goes when nobody holds it
        try:
            end.node = self._native.insert(base, data, out, <int32_t>n, duplicates, retention)
            if end.depth == 0:  # an empty namespace goes
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
        """Keep a prefix from eviction until unpinned as often.

        Raises
        ------
        InvalidHandleError
            The handle is stale, or another tree's.
        """
        handle.check_own(self)
        handle._pin()

    def unpin(self, PrefixHandle handle not None):
        """Let a prefix go.

        Raises
        ------
        InvalidHandleError
            The prefix is not pinned, or the handle is another tree's.
        """
        handle.check_own(self)
        handle._unpin()

    def pages_of(self, PrefixHandle handle not None, first=0):
        """Return the page ids of a prefix, from page `first` on. Costs copying them.

        Returns
        -------
        int32 [handle.num_pages - first]

        Raises
        ------
        ValueError
            There is no such page.
        InvalidHandleError
            The handle is stale, or another tree's.
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
        return runs_of(self._native, self._shape)

    def check_integrity(self):
        """Raise AssertionError naming the law that does not hold. O(pages)."""
        self._native.check_integrity()

    def __repr__(self):
        return (
            f"PrefixTree(page_size={self.page_size}, {self.num_cached} pages cached, "
            f"{self.num_evictable} evictable)"
        )

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
        cdef TreeNode* run
        for i in range(branches.runs.size()):
            run = branches.runs[i]
            room += CppPrefixTree.depth_of(run) - CppPrefixTree.start_of(run)
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
