# SPDX-License-Identifier: Apache-2.0
"""What a manager's prefix cache holds of some tokens, and pins of it."""


# The id behind the last page: what stands for no page.
cdef inline int32_t end_page(CacheManager* native) noexcept nogil:
    return <int32_t>(native.config().num_pages + native.config().first_page)


cdef object counters(CacheManager* native):
    """What a manager has computed, reused and given up."""
    found = native.metrics()
    return KVCacheMetrics(
        input_tokens=found.input_tokens, cache_tokens=found.cache_tokens,
        copied_tokens=found.copied_tokens, evicted_pages=found.evicted_pages,
        peak_used_pages=found.peak_used_pages, h2d_blocks_copied=found.loaded_pages,
        d2h_blocks_copied=found.stored_pages, generated_tokens=found.generated_tokens,
        resumed_tokens=found.resumed_tokens, recomputed_tokens=found.recomputed_tokens,
    )


cdef int32_t recommend_replica(ClaimTable claims, object context) except -1:
    """The best replica for a request that is not claimed."""
    cdef RequestView* request
    if isinstance(context, TextGenerationContext) and claims.trees.is_keyed:
        request = &(<TextGenerationContext>context)._request
        return claims.native.recommend_replica(request.name_space, request.tokens, request.end)
    try:
        given = context.tokens
    except AttributeError:
        raise no_context(context) from None
    cdef cnp.ndarray tokens = as_tokens(given)
    cdef bytes name = namespace_of(
        getattr(context, "extra_key", None), getattr(context, "cache_salt", None)
    )
    tokens = shown_of(claims.trees, getattr(context, "extra_keys", None), tokens)
    return claims.native.recommend_replica(
        name_view(name), <const int32_t*>cnp.PyArray_DATA(tokens), cnp.PyArray_DIM(tokens, 0)
    )


# Tokens as the prefix tree is shown them.
cdef object match_pages(
    CacheManager* native, int32_t replica, cnp.ndarray tokens, bytes name, bint return_pages,
    bint touches, int32_t bundle
):
    """The tokens of a prefix that are cached in whole pages, with the pages if asked for.

    `touches`: they are used.
    """
    cdef vector[BlockId] pages
    if not return_pages:
        return find_pages(native, replica, tokens, name, NULL, touches, bundle)
    num_tokens = find_pages(native, replica, tokens, name, &pages, touches, bundle)
    ids = ids_for(pages)
    write_ids(native, pages, <int32_t*>cnp.PyArray_DATA(ids))
    return num_tokens, ids


cdef inline cnp.ndarray ids_for(const vector[BlockId]& pages):
    cdef cnp.npy_intp size = <cnp.npy_intp>pages.size()
    return cnp.PyArray_SimpleNew(1, &size, cnp.NPY_INT32)


cdef inline void write_ids(
    CacheManager* native, const vector[BlockId]& pages, int32_t* to
) noexcept nogil:
    cdef int32_t end = end_page(native)
    cdef size_t i
    for i in range(pages.size()):
        to[i] = pages[i] if pages[i] >= 0 else end  # with groups: no layer of the bundle has a page


cdef inline int64_t find_pages(
    CacheManager* native, int32_t replica, cnp.ndarray tokens, bytes name,
    vector[BlockId]* pages, bint touches, int32_t bundle
) except -1:
    cdef const int32_t* data = <const int32_t*>cnp.PyArray_DATA(tokens)
    cdef int64_t n = cnp.PyArray_DIM(tokens, 0)
    if touches:
        n = native.touch(replica, name_view(name), data, n, pages, NULL, INT64_MAX, bundle)
    else:
        n = native.match(replica, name_view(name), data, n, pages, NULL, bundle)
    return n * native.config().page_size


cdef object match_ahead(
    CacheManager* native, int32_t replica, cnp.ndarray tokens, bytes name, bint return_pages,
    bint touches, int64_t ahead, cnp.ndarray out, int32_t* to,
    int32_t bundle
):
    """The same, with what is asked for of the tokens behind, and the ids in `out` [m], at `to`."""
    cdef vector[BlockId] pages
    cdef int32_t partial = 0
    cdef int64_t room = INT64_MAX if out is None else cnp.PyArray_DIM(out, 0)
    cdef const int32_t* data = <const int32_t*>cnp.PyArray_DATA(tokens)
    cdef int64_t n = cnp.PyArray_DIM(tokens, 0)
    cdef bint lists = return_pages or out is not None
    cdef vector[BlockId]* ids = &pages if lists else NULL
    cdef int32_t* tail = &partial if ahead > 0 else NULL
    if touches:
        n = native.touch(replica, name_view(name), data, n, ids, tail, room, bundle)
    else:
        n = native.match(replica, name_view(name), data, n, ids, tail, bundle)
    cdef cnp.npy_intp size = <cnp.npy_intp>pages.size()
    if size > room:
        raise ValueError(f"out has room for {room} ids, must have it for {size}")
    if lists and out is None:
        out = ids_for(pages)
        to = <int32_t*>cnp.PyArray_DATA(out)
    write_ids(native, pages, to)
    cdef list found = [n * native.config().page_size]
    if lists:
        found.append(out[:size])
    if ahead > 0:
        found.append(min(ahead, <int64_t>partial))
    return tuple(found)


cdef class PinnedPrefix:
    """Keep the cached pages of a prefix from eviction until ``release()`` or the end of ``with``.

    Attributes
    ----------
    num_tokens : int
        Tokens of the prefix that are cached in whole pages and so are kept.

    Notes
    -----
    An object that is dropped lets the pages go as well.
    """

    def __init__(self, *args, **rest):
        raise TypeError("a PinnedPrefix is not made by itself; use what pin() returns")

    def release(self):
        """Let the pages go; InvalidHandleError when that was done before."""
        if self._manager is None:
            raise InvalidHandleError("this PinnedPrefix pins nothing; use what pin() returns")
        self._native.unpin(self._pin)
        self._released = True
        if self._checks:
            self._native.check_integrity()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if not self._released:
            self.release()

    def __del__(self):
        if self._manager is not None and not self._released:
            self.release()

    def __repr__(self):
        return f"PinnedPrefix({self.num_tokens} tokens)"


# Of both, and of a tree by itself.
cdef PinnedPrefix pin_pages(
    object manager, CacheManager* native, int32_t replica, cnp.ndarray tokens, bytes name,
    bint checks
):
    """Pin what a manager has of some tokens."""
    cdef PinnedPrefix pinned = PinnedPrefix.__new__(PinnedPrefix)
    pinned._pin = native.pin(
        replica, name_view(name), <const int32_t*>cnp.PyArray_DATA(tokens),
        cnp.PyArray_DIM(tokens, 0),
    )
    pinned._manager = manager
    pinned._native = native
    pinned._checks = checks
    pinned.num_tokens = pinned._pin.num_tokens
    if checks:
        native.check_integrity()
    return pinned


# Ids of pages, of a list or an array of any integers.
cdef cnp.ndarray as_pages(object pages):
    """Ids of pages as int32 [n]; those beyond its range are no page's."""
    given = np.asarray(pages)
    if given.ndim != 1:
        raise ValueError(f"pages have shape {given.shape}, must have one dimension")
    if given.size == 0:
        return np.empty(0, np.int32)
    if given.dtype.kind not in "iu":
        raise TypeError(f"pages have dtype {given.dtype}, must be integers")
    beyond = (given < 0) | (given > np.iinfo(np.int32).max)
    if beyond.any():
        raise InvalidHandleError(f"page {given[beyond][0]} does not exist: no pool has such an id")
    return np.ascontiguousarray(given, dtype=np.int32)


cdef int64_t forget_pages(CacheManager* native, int32_t replica, cnp.ndarray pages) except -1:
    """Have pages leave the cache; how many left."""
    return native.forget(
        replica, <const BlockId*>cnp.PyArray_DATA(pages), cnp.PyArray_DIM(pages, 0)
    )


cdef cnp.ndarray listed_next_pages(CacheManager* native, int32_t replica):
    """Ids of the pages that can be had, in the order in which they go."""
    cdef vector[BlockId] pages = native.next_pages(replica)
    cdef cnp.ndarray ids = ids_for(pages)
    write_ids(native, pages, <int32_t*>cnp.PyArray_DATA(ids))
    return ids


@cython.final
@cython.no_gc_clear  # what is held ends in front of the manager
cdef class HeldPages:
    """Keep pages as they are until ``let_go()`` or the end of ``with``.

    Attributes
    ----------
    pages : int32 [n]
        As they were asked for.

    Notes
    -----
    An object that is dropped lets the pages go as well.
    """

    def __init__(self, *args, **rest):
        raise TypeError("HeldPages are not made by themselves; use what hold() returns")

    def let_go(self):
        """Let the pages go; InvalidHandleError when that was done before."""
        if self._manager is None:
            raise InvalidHandleError("these HeldPages hold nothing; use what hold() returns")
        self._is_over = True
        self._held.let_go()
        if self._checks:
            self._native.check_integrity()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if not self._is_over:
            self.let_go()

    def __len__(self):
        return 0 if self.pages is None else len(self.pages)

    def __repr__(self):
        return f"HeldPages({len(self)} pages)"


cdef HeldPages hold_pages(
    object manager, CacheManager* native, int32_t replica, cnp.ndarray pages, bint checks
):
    """Hold pages of a manager."""
    cdef HeldPages held = HeldPages.__new__(HeldPages)
    held.pages = pages.copy()
    held.pages.flags.writeable = False
    held._manager = manager
    held._native = native
    held._checks = checks
    held._held = move(native.hold(
        replica, <const BlockId*>cnp.PyArray_DATA(pages), cnp.PyArray_DIM(pages, 0)
    ))
    if checks:
        native.check_integrity()
    return held
