# SPDX-License-Identifier: Apache-2.0
"""Searches of a manager's prefix cache, pins of cached prefixes and holds of pages."""


# The id after the last page id; it stands for no page.
cdef inline int32_t end_page(CacheManager* native) noexcept nogil:
    return <int32_t>(native.config().num_pages + native.config().first_page)


cdef object counters(CacheManager* native):
    """Return the counters of a manager as KVCacheMetrics."""
    found = native.metrics()
    return KVCacheMetrics(
        input_tokens=found.input_tokens, cache_tokens=found.cache_tokens,
        copied_tokens=found.copied_tokens, evicted_pages=found.evicted_pages,
        peak_used_pages=found.peak_used_pages, h2d_blocks_copied=found.loaded_pages,
        d2h_blocks_copied=found.stored_pages, generated_tokens=found.generated_tokens,
        resumed_tokens=found.resumed_tokens, recomputed_tokens=found.recomputed_tokens,
    )


cdef int32_t recommend_replica(ClaimTable claims, object context) except -1:
    """Return the best replica for an unclaimed request."""
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


# `tokens` are the ids that the prefix tree stores, with stand-ins for tokens with extra keys.
cdef object match_pages(
    CacheManager* native, int32_t replica, cnp.ndarray tokens, bytes name, bint return_pages,
    bint touches, int32_t bundle
):
    """Return the number of tokens cached in whole pages; with `return_pages` also the pages.

    `touches`: count the call as a use of the pages.
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
        to[i] = pages[i] if pages[i] >= 0 else end  # below 0: the bundle has no page (groups only)


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
    """As match_pages; also compare `ahead` tokens after the hit, and write ids to `out` [m]."""
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
        Number of tokens of the prefix that are cached in whole pages; these pages are kept.

    Notes
    -----
    The pages are also unpinned when the object is destroyed.
    """

    def __init__(self, *args, **rest):
        raise TypeError("PinnedPrefix has no public constructor; call pin()")

    def release(self):
        """Unpin the pages; InvalidHandleError if they were unpinned before."""
        if self._manager is None:
            raise InvalidHandleError("this PinnedPrefix pins nothing; call pin()")
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


cdef PinnedPrefix pin_pages(
    object manager, CacheManager* native, int32_t replica, cnp.ndarray tokens, bytes name,
    bint checks
):
    """Pin the cached prefix of some tokens."""
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


cdef cnp.ndarray as_pages(object pages):
    """Return page ids as int32 [n]; `pages` is a list or an array of any integers.

    InvalidHandleError for an id outside the range of int32.
    """
    given = np.asarray(pages)
    if given.ndim != 1:
        raise ValueError(f"pages have shape {given.shape}, must have one dimension")
    if given.size == 0:
        return np.empty(0, np.int32)
    if given.dtype.kind not in "iu":
        raise TypeError(f"pages have dtype {given.dtype}, must be integers")
    beyond = (given < 0) | (given > np.iinfo(np.int32).max)
    if beyond.any():
        raise InvalidHandleError(
            f"page {given[beyond][0]} does not exist: a page id is at least 0 and fits in int32"
        )
    return np.ascontiguousarray(given, dtype=np.int32)


cdef int64_t forget_pages(CacheManager* native, int32_t replica, cnp.ndarray pages) except -1:
    """Remove pages from the cache; return the number of pages that left it."""
    return native.forget(
        replica, <const BlockId*>cnp.PyArray_DATA(pages), cnp.PyArray_DIM(pages, 0)
    )


cdef cnp.ndarray listed_next_pages(CacheManager* native, int32_t replica):
    """Return the ids of the available pages, in the order in which requests get them."""
    cdef vector[BlockId] pages = native.next_pages(replica)
    cdef cnp.ndarray ids = ids_for(pages)
    write_ids(native, pages, <int32_t*>cnp.PyArray_DATA(ids))
    return ids


@cython.final
@cython.no_gc_clear  # the pages are released before the manager is destroyed
cdef class HeldPages:
    """Keep pages as they are until ``let_go()`` or the end of ``with``.

    Attributes
    ----------
    pages : int32 [n]
        The ids that were passed to ``hold``.

    Notes
    -----
    The hold also ends when the object is destroyed.
    """

    def __init__(self, *args, **rest):
        raise TypeError("HeldPages has no public constructor; call hold()")

    def let_go(self):
        """End the hold; InvalidHandleError if it ended before."""
        if self._manager is None:
            raise InvalidHandleError("these HeldPages hold nothing; call hold()")
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
