# SPDX-License-Identifier: Apache-2.0
"""The methods of a manager that run per request and per step.

The C++ library makes all decisions. A method checks that the engine is initialised, resets the
cache if a reset was requested, and calls the parts of the engine.
"""


cdef object FIRST = 0  # the usual argument; compared by identity, which saves the conversion


cdef tuple listed_times(StepEngine engine, TimedCall call):
    """Return the number of calls up to each bound in seconds, and the total seconds."""
    cdef const LatencyHistogram* found = &engine._times.of(call)
    cdef int64_t calls = 0
    cdef list upto = []
    cdef size_t i
    for i in range(found.counts().size()):
        calls += found.counts()[i]
        upto.append((LatencyHistogram.bound(i), calls))
    return upto, engine._times.seconds(call)


@cython.no_gc_clear  # objects destroyed together with a manager may still call it
cdef class StepEngine(EngineBase):
    """Base class of PagedKVCacheManager: the methods that run per request and per step.

    The caller passes `copier`, `mover`, `gpus`, `listener` and `clock`; each may be None.
    """

    cdef CallTimes _times
    cdef ClaimTable _claims
    cdef BatchReader _reader
    cdef Settler _settler
    cdef InputMaker _maker
    cdef readonly object _onload  # stores.tiers.onload.Onload if requests wait for loads; or None

    # ---- parts -----------------------------------------------------------------------------------

    def __init__(self, CacheCore core not None, *, list shards not None, object copier,
                 object mover, object gpus, object listener, object layers=None,
                 tuple pages_per_column=(1,), bint runtime_checks, object clock=None,
                 tuple tenants=(), int32_t state_groups=0, object states=None):
        require_new(self)
        self._native = core.manager
        self._core = core
        self._claims = ClaimTable(core, tenants)
        self._reader = BatchReader(self._claims)
        if runtime_checks:
            self._reader.order = StepOrder(is_caching=self._native.config().prefix_caching)
        self._settler = Settler(core, copier, mover)
        self._maker = InputMaker(
            shards, gpus, end_page(self._native), layers, pages_per_column,
            state_groups, states,
        )
        self._settler.states = states
        self._settler.num_bundles = <int32_t>len(pages_per_column)
        self._shards = shards
        self._mover, self._gpus = mover, gpus
        self._listener, self._clock = listener, clock
        self._checks = runtime_checks
        self._is_alone = listener is None and clock is None
        self._is_made = True
        if self._native.config().explain_pages > 0:
            explaining.add(self)

    def _set_below(self, below, StoreReader reader not None, onload=None):
        """Attach the stores below the host tier.

        Parameters
        ----------
        below : kvcore.stores.tiers.stack.TierStack
            ``arrived()``, ``begin_reset()``, ``end_reset()``.
        reader : StoreReader
        onload : kvcore.stores.tiers.onload.Onload, optional
            Lets requests wait for pages from stores: ``begin(search, context)``, ``waiting``,
            ``drop(request_id)``.
        """
        require_made(self)
        self._settler.below = below
        self._settler.store_reader = reader
        self._settler.onload = self._onload = onload

    def _require_open(self):
        """Raise KVCacheError if the engine is closed."""
        require_made(self)

    def _let_go(self):
        """Refuse every later call, and drop all references to arrays.

        A call in progress keeps the parts with which it began. The loads that requests wait for
        stay, since a wait may be in progress.
        """
        cdef int32_t end = end_page(self._native)
        self._is_closed, self._is_made, self._is_alone = True, False, False
        self._settler = Settler(self._core, None, None)
        self._maker = InputMaker([], None, end, None, (1,), 0, None)
        self._shards = []
        self._mover = self._gpus = self._listener = None

    # ---- claims ----------------------------------------------------------------------------------

    def external_claim(self, request_id, replica_idx=None):
        """Register a request on a replica. Takes no pages.

        Parameters
        ----------
        request_id
            Any hashable object.
        replica_idx : int or "auto", optional
            Required with several replicas. "auto" takes the replica with the most free pages.

        Raises
        ------
        AlreadyClaimedError, CapacityError, IndexError, ValueError
        """
        require_made(self)
        self._claims.claim(request_id, replica_idx)
        check(self)

    claim = external_claim

    def contains(self, request_id):
        """Return True if a request is claimed now."""
        require_made(self)
        return self._claims.lookup(request_id) is not None

    def release(self, request_id, *, after=None, returns_in=None):
        """Release a request; its committed pages stay cached and evictable.

        Parameters
        ----------
        request_id : hashable
        after : stream or event, optional
            A stream or event of cupy or torch, or the handle of a stream. With GPU pools, no copy
            or kernel overwrites the request's pages before the work in `after` is done. Not needed
            for work on the streams that were current when the batch was fetched.
        returns_in : float or {"soon", "later", "never"}, optional
            When the session of the request returns, for the policy "hinted"; by default the
            `returns_in` of the context with which the claim was used last. "never" closes the
            session: its pages are evicted first.

        Raises
        ------
        RequestNotFoundError
        ValueError
            `after` is given, but no pool is on a GPU; `returns_in` is out of range or an unknown
            word.
        TypeError
            `returns_in` is no number and no word.
        """
        require_made(self)
        tell_time(self)
        cdef int64_t returns = UNKNOWN
        if returns_in is not None:
            returns = return_time(returns_in, "returns_in")
        cdef Claim claim = self._claims.claim_of(request_id)
        if returns_in is None and self._clock is not None:
            returns = return_of(claim.context)
        if after is not None:
            reuse_after(self, after)
        if not claim.is_live:  # code of the context or of `after` has released it
            raise not_found(request_id)
        self._claims.release(claim, returns)
        if self._onload is not None:
            self._onload.drop(request_id)
        check(self)

    def get_replica(self, ctx=None, *, context=None):
        """Return the index of the replica on which the request of a context is claimed.

        The keyword `context` is the same as `ctx`.
        """
        require_made(self)
        if context is not None:
            ctx = only_context(ctx, context, "context")
        return self._claims.claim_of(id_of(ctx)).replica

    def get_or_recommend_replica(self, ctx=None, *, context=None):
        """Return the replica of a claimed request, or the best replica for an unclaimed request.

        The best replica has the longest prefix hit; ties go to the most free pages, then to the
        fewest requests, then to the lowest index. Changes nothing. The keyword `context` is the
        same as `ctx`.
        """
        require_made(self)
        if context is not None:
            ctx = only_context(ctx, context, "context")
        cdef Claim claim = self._claims.lookup(id_of(ctx))
        if claim is not None:
            return claim.replica
        listen(self)
        return recommend_replica(self._claims, ctx)

    def get_req_blocks(self, request_id, bundle=0, *, first=0):
        """Return a request's page ids in logical order, a list of int.

        Parameters
        ----------
        request_id
        bundle : int
            Index into ``kvcore.groups.bundles``, for layers with groups. The id after the last
            page id of the pool marks a page that no layer of the bundle reads any more, or that is
            not reserved yet.
        first : int
            Index of the first page to return, for example the first page that a reservation added.
            The list is empty if the request has no such page.

        Raises
        ------
        RequestNotFoundError, IndexError
        ValueError
            `first` is negative.

        Notes
        -----
        O(pages returned).
        """
        cdef int64_t begin = as_int(first, "first")
        require_made(self)
        cdef int32_t index = self._maker.bundle_of(bundle)
        return self._maker.pages_of(self._native, self._claims.find(request_id), index, begin)

    def _row_claims(self, list request_ids not None, int32_t bundle=0):
        """Record the claims of a batch's rows, to check pages of a bundle later."""
        require_made(self)
        return RowClaims(self._claims, request_ids, bundle)

    # ---- requests with a common past -------------------------------------------------------------

    def fork(self, parent_id, *child_ctxs):
        """Claim requests that continue the written tokens of another request. Copies nothing yet.

        Parameters
        ----------
        parent_id
            A claimed request. The children share the tokens written as of its last ``step``.
        *child_ctxs : context
            Contexts of unclaimed requests. Each context has the parent's written tokens and at
            least one more token, in the same namespace. The call moves ``start_idx`` to the end of
            the written tokens, and an ``active_idx`` that is not greater than that to ``end_idx``.

        Raises
        ------
        RequestNotFoundError, AlreadyClaimedError, CapacityError
        ValueError
            The tokens or the namespace differ from the parent's; nothing has been claimed.

        Notes
        -----
        Parent and children share pages. The first of these requests that reserves the next page to
        write gets a copy of that page. Costs O(pages) and one comparison of the tokens per child.
        """
        require_made(self)
        fork_request(self._claims, self._settler, parent_id, child_ctxs)
        check(self)

    def truncate(self, request_id, n_tokens):
        """Forget written tokens of a request beyond the first `n_tokens`.

        For rejected draft tokens. The call frees every page after the page of the last remaining
        token, also pages reserved ahead. Committed pages are never rewritten: the next write into
        a committed page copies the page first. Rewind the context with ``ctx.rewind(n_tokens)``;
        ``accept`` does both. With states and `max_draft_tokens`, the next ``fetch`` moves
        ``start_idx`` further back, to the token whose state was kept.

        Raises
        ------
        RequestNotFoundError
        ValueError
            `n_tokens` is outside 0 .. the ``active_idx`` of the last fetch. Or layers have windows
            whose pages before `n_tokens` are released, or states, and no state of that token is
            kept.
        """
        cdef int64_t n = as_int(n_tokens, "n_tokens")
        require_made(self)
        truncate_request(self._claims, self._settler, request_id, n)
        check(self)

    def accept(self, ctx, n):
        """Keep the first `n` tokens of a request: reject its other drafts and rewind its context.

        Does ``truncate(ctx.request_id, n)`` and ``ctx.rewind(n)`` in one call. If either of them
        would raise, the call raises and changes nothing. After it, call ``update`` of the context
        with the token that the model sampled, and ``step``.

        Raises
        ------
        RequestNotFoundError
        ValueError
            `n` is outside 1 .. ``end_idx``, or ``truncate`` refuses `n`.
        """
        cdef int64_t num_tokens = as_int(n, "n")
        require_made(self)
        accept_tokens(self._claims, self._settler, ctx, num_tokens)
        check(self)

    def leave_windows(self, request_id, n_tokens, *, after=None):
        """Release the window pages that no token after the first `n_tokens` reads.

        For ``keep_windows=True``, with which ``step`` releases no window pages: `n_tokens` is the
        number of stepped tokens whose computation is done. `after` as for ``release``.
        Costs O(pages released).

        Returns
        -------
        int
            The smallest number of tokens at which more window pages can be released; ``2**63 - 1``
            without windows.

        Raises
        ------
        RequestNotFoundError
        ValueError
            `n_tokens` is negative or more than the request's pages hold, or the manager has no
            ``keep_windows``.
        """
        cdef int64_t n = as_int(n_tokens, "n_tokens")
        require_made(self)
        if after is not None:
            reuse_after(self, after)
        cdef int64_t leaves_at = leave_windows_of(self._claims, self._settler, request_id, n)
        check(self)
        return leaves_at

    def shared_prefixes(self, batch):
        """Find the rows of a batch that have the same leading pages.

        Returns
        -------
        list of SharedPrefix
            Longest first. A group inside another group has an entry of its own.

        Notes
        -----
        Uses the prefix tree and the pages that forks share. Costs O(batch x runs) and compares no
        tokens.
        """
        require_made(self)
        return find_shared_prefixes(self._reader, batch)

    # ---- pages ahead of steps --------------------------------------------------------------------

    def maybe_reserve(self, ctx=None, num_steps=1, *, max_hit=None, keep_free=0, must_fit=None,
                      data=None):
        """Reuse the cached prefix of a request and allocate the pages that its next steps need.

        Parameters
        ----------
        ctx : context
            The call moves ``start_idx`` to the end of the prefix hit, and ``active_idx`` past it.
        num_steps : int
            Steps to run before the next reservation.
        max_hit : int, optional
            The largest prefix hit that the request may have after the call, in tokens, copied
            tokens included. A longer hit is cut to the last place where a hit may end. With 0 the
            request takes nothing from the cache. A request that already has a longer hit keeps it.
        keep_free : int
            The least number of pages of the replica that must stay free or evictable.
        must_fit : int, optional
            A number of tokens, for example the whole prompt or the longest possible request. The
            call returns False unless the replica has room for the request with this many tokens,
            in addition to `keep_free`; it reserves no page for them. For managers with
            ``reserve_chunks``, and for windows: the check assumes that no later chunk is longer.
        data : context
            The same as `ctx`.

        Returns
        -------
        bool
            False if the pages do not fit; nothing has changed, and nothing is evicted.

        Raises
        ------
        CapacityError
            The request, or a request of `must_fit` tokens, can never fit: it is larger than the
            pool, than a quota or than ``max_seq_len``.
        RequestNotFoundError, ValueError

        Notes
        -----
        Costs the comparison of the prompt with the cache plus O(pages added). Idempotent. If the
        request had `n` pages, ``get_req_blocks(request_id, first=n)`` returns the ids of the pages
        added. The options hold for this call only: a later call, or a ``fetch`` that has to reserve
        pages, may take a longer hit.
        """
        cdef int64_t ahead = 1 if num_steps is ONE_STEP else as_int(num_steps, "num_steps")
        cdef ReserveOptions options
        if max_hit is not None or keep_free is not NO_PAGES or must_fit is not None:
            read_options(&options, max_hit, keep_free, must_fit)
        cdef int64_t begun = self._times.begin()
        listen(self)
        if data is not None:
            ctx = only_context(ctx, data, "data")
        cdef bint fits = reserve(self._reader, self._settler, ctx, ahead, &options)
        self._times.end(kReserve, begun)
        check(self)
        return fits

    reserve = maybe_reserve

    def _stand_back(self, ctx, int64_t start, int64_t active):
        """Undo a longer prefix hit of a request: restore `start` and `active` and their pages."""
        listen(self)
        stand_back(self._reader, self._settler, ctx, start, active)
        check(self)

    def maybe_reserve_batch(self, batch, num_steps=1):
        """Reserve contexts in order up to the first that does not fit; return the number reserved.

        Raises every error before it reserves anything.
        """
        cdef int64_t ahead = as_int(num_steps, "num_steps")
        cdef int64_t begun = self._times.begin()
        listen(self)
        cdef int64_t fit = reserve_batch(self._reader, self._settler, batch, ahead)
        self._times.end(kReserveBatch, begun)
        check(self)
        return fit

    def plan(self, ctx, num_steps=1, *, replica_idx=None, max_hit=None, keep_free=0,
             must_fit=None):
        """Return what ``maybe_reserve`` would do now. Changes nothing, not even recency.

        Parameters
        ----------
        ctx : context
            The request need not be claimed: an unclaimed request is planned as a new claim.
        num_steps : int
        replica_idx : int, optional
            The replica for an unclaimed request; by default ``get_or_recommend_replica(ctx)``.
        max_hit, keep_free, must_fit
            As for ``maybe_reserve``.

        Returns
        -------
        ReservePlan
            ``fits=False`` also for a request that can never fit.

        Raises
        ------
        IndexError, ValueError
            The request is claimed on another replica than `replica_idx`.

        Notes
        -----
        Costs the search for the hit. Does not check whether the replica has room for another claim.
        """
        cdef int64_t ahead = as_int(num_steps, "num_steps")
        cdef ReserveOptions options
        cdef int32_t replica = -1
        read_options(&options, max_hit, keep_free, must_fit)
        require_made(self)
        if replica_idx is not None:
            replica = self._claims.replica(replica_idx)
        listen(self)
        return plan(self._reader, self._settler, ctx, ahead, options, replica)

    # ---- steps -----------------------------------------------------------------------------------

    def fetch(self, batch, num_steps=1):
        """Return the inputs of the kernels for a batch; reserve the pages that are missing.

        Parameters
        ----------
        batch : sequence of contexts
        num_steps : int
            Steps that run before the next fetch.

        Returns
        -------
        list of RaggedKVCacheInputs
            One per device, replica-major; batch order is kept inside a replica.

        Raises
        ------
        InsufficientBlocksError
            The missing pages do not fit. No context of the batch has changed; a context that waited
            for pages from stores still waits.
        CapacityError, RequestNotFoundError, ValueError

        Notes
        -----
        One native call. Costs O(batch) plus O(pages changed since the buffer was last used). After
        ``maybe_reserve`` has returned True for the same or more steps, no page is missing.

        With a GPU, the call copies the arrays to it on the current stream. From this call on, work
        on this stream runs after the work on the streams of earlier fetches. The host waits for
        nothing.
        """
        cdef int64_t ahead = as_int(num_steps, "num_steps")
        cdef int64_t begun = self._times.begin()
        cdef list inputs
        listen(self)
        if self._onload is not None and self._onload.waiting and not self._reader.is_known(batch):
            batch = list(batch)
            with self._await_pages(batch):
                require_made(self)  # another thread may have closed the engine
                inputs = fetch_batch(self._reader, self._settler, self._maker, batch, ahead)
        else:
            inputs = fetch_batch(self._reader, self._settler, self._maker, batch, ahead)
        self._times.end(kFetch, begun)
        return checked(self, inputs)

    def step(self, batch, *, after=None):
        """Commit each completely written page to the prefix cache.

        Parameters
        ----------
        batch : sequence of contexts
            After ``update``: the first ``start_idx`` tokens are written.
        after : stream or event, optional
            As for ``release``. No copy or kernel overwrites the pages that windows have released
            before the work in `after` is done.

        Returns
        -------
        int32 [n, 3], or [n, 4] if layers have several page tables
            The pages that were replaced by equal cached pages: batch row, column, page, and the
            bundle. Usually empty.

        Raises
        ------
        ValueError
            A context claims more written tokens than its pages hold; nothing has been committed.
            `after` is given, but no pool is on a GPU.

        Notes
        -----
        Costs O(new tokens), whatever the context length. With a host tier, also costs the copy of
        new pages to the host; other threads may run during the copy. If the copy fails, the host
        tier does not get these pages and the logger "kvcore" gets a warning; the commit remains.
        """
        cdef int64_t begun = self._times.begin()
        listen(self)  # a page written now must not be replaced by a page that a reset forgets
        if after is not None:
            reuse_after(self, after)
        cdef cnp.ndarray swaps = commit_batch(self._reader, self._settler, batch)
        self._times.end(kStep, begun)
        return checked(self, swaps)

    def take_copies(self):
        """Return the pending page copies of a manager without a pool, which the caller has to run.

        Returns
        -------
        int32 [n, 4]
            Replica, source page, destination page, tokens. Run the copies in this order, before the
            kernels of the next fetch run.
        """
        require_made(self)
        return copies_array(self._native.take_copies())

    def take_state_copies(self):
        """Return the pending copies of state slots of a manager without arrays, for the caller.

        Returns
        -------
        int32 [n, 4]
            Replica, State group, source slot, destination slot. Run the copies in this order,
            before the kernels of the next fetch run.
        """
        require_made(self)
        return grouped_copies_array(self._native.take_state_copies(), self._maker.state_groups)

    # ---- prefixes --------------------------------------------------------------------------------

    def match_prefix(self, tokens, extra_key=None, cache_salt=None, replica_idx=0, *,
                     extra_keys=None, bint return_pages=False, bint touch=False, lookahead=0,
                     cnp.ndarray out=None, bundle=0):
        """Return the number of leading tokens cached in whole pages. Changes nothing by default.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_keys : list of (int, int, bytes), optional
            The extra keys of a context that start before token `n`.
        return_pages : bool
            Also return the page ids, int32.
        touch : bool
            Count this call as a use of the pages, so they are evicted later.
        lookahead : int
            Compare up to this many tokens after the last whole page with a cached page, and also
            return the number of equal tokens, less than a page. With groups of layers, count only
            tokens that a hit could copy; with states return 0. Costs O(log children) more.
        out : int32 [m], optional
            A contiguous array for the ids. The call returns the beginning of this array, as with
            `return_pages`.
        bundle : int
            The bundle whose ids to return, as ``get_req_blocks`` of a request with this hit lists
            them.

        Returns
        -------
        int, or a tuple of it and the other requested values, in this order
            The number of tokens; the ids, int32 [pages]; the number of tokens that `lookahead`
            found, int.

        Raises
        ------
        IndexError, ValueError, TypeError
            `lookahead` is negative, or `out` has a wrong form or is too short. The call does not
            count as a use of the pages.
        """
        cdef int64_t ahead = 0 if lookahead is FIRST else tokens_ahead(lookahead)
        cdef cnp.ndarray source = as_tokens(tokens)
        cdef bytes name = namespace_of(extra_key, cache_salt)
        listen(self)
        cdef int32_t replica = 0 if replica_idx is FIRST else self._claims.replica(replica_idx)
        source = shown_of(self._claims.trees, extra_keys, source)
        cdef int32_t* to = <int32_t*>NULL if out is None else room_in(out)
        cdef int32_t part = 0 if bundle is FIRST else self._maker.bundle_of(bundle)
        if ahead == 0 and out is None and not return_pages and not touch:
            return find_pages(self._native, replica, source, name, NULL, False, part)
        if ahead == 0 and out is None:
            found = match_pages(self._native, replica, source, name, return_pages, touch, part)
        else:
            found = match_ahead(
                self._native, replica, source, name, return_pages, touch, ahead, out, to, part
            )
        return checked(self, found) if touch else found

    def pin(self, tokens, extra_key=None, cache_salt=None, replica_idx=0, *, extra_keys=None):
        """Keep the cached whole pages of a prefix from eviction.

        Returns
        -------
        PinnedPrefix
            A context manager; ``num_tokens`` is the number of tokens that are kept.

        Notes
        -----
        Costs the match plus O(1). Pinned pages do not count as free.
        """
        cdef cnp.ndarray source = as_tokens(tokens)
        cdef bytes name = namespace_of(extra_key, cache_salt)
        listen(self)
        cdef int32_t replica = self._claims.replica(replica_idx)
        source = shown_of(self._claims.trees, extra_keys, source)
        return pin_pages(self, self._native, replica, source, name, self._checks)

    def reset_prefix_cache(self):
        """Forget every cached page, on every replica and in every tier except shared servers.

        Returns
        -------
        bool
            True if no request, pin or hold keeps a page that was cached; otherwise False.

        Notes
        -----
        Requests, pins and holds keep their pages, but no later request hits these pages. Pages that
        a running request computes after the reset are not cached either, until the request is
        released or truncated to 0. The call also empties the stores, except stores on servers
        (Redis, Mooncake), which other users share: use another ``fingerprint`` for other weights,
        or clear these stores. Costs O(cached pages + requests).
        """
        require_made(self)
        below = self._settler.below
        if below is not None:
            below.begin_reset()
        cdef bint is_empty = self._native.reset_prefix_cache()
        if below is not None:
            below.end_reset()
        check(self)
        return is_empty

    # ---- pages -----------------------------------------------------------------------------------

    def forget(self, pages, replica_idx=0):
        """Remove pages with wrong contents from the cache, for example after a load that failed.

        Parameters
        ----------
        pages : sequence of int, or integer array [n]
            Page ids; with groups, of any bundle. Ids of free pages are ignored.
        replica_idx : int
            The replica of the pages.

        Returns
        -------
        int
            The number of pages that left the cache of the device: these pages, and the pages cached
            after them on the same paths.

        Raises
        ------
        InvalidHandleError
            An id does not belong to a page; nothing has changed.
        IndexError, TypeError, ValueError

        Notes
        -----
        No search finds these pages any more, on the device or in the host tier. Requests, pins and
        holds keep their pages; a page without any of them becomes free. A request that has a
        forgotten page continues to run, but its pages from the first forgotten page on are not
        cached until ``truncate`` cuts the request at or before this page, so that it computes the
        tokens again. The call does not remove pages from stores below the host tier, nor a cached
        page that a request began as a copy of a forgotten page (``partial_page_reuse``).
        Costs O(cached pages + requests).
        """
        cdef cnp.ndarray ids = as_pages(pages)
        listen(self)
        cdef int32_t replica = self._claims.replica(replica_idx)
        cdef int64_t left = forget_pages(self._native, replica, ids)
        check(self)
        return left

    def hold(self, pages, replica_idx=0):
        """Keep pages from eviction and reuse, also after their requests release them.

        Parameters
        ----------
        pages : sequence of int, or integer array [n]
            Ids of pages that requests have or that are cached. With groups, of any bundle: the call
            holds all pages of the same tokens.
        replica_idx : int
            The replica of the pages.

        Returns
        -------
        HeldPages
            A context manager, with ``let_go()``. Holds nest.

        Raises
        ------
        InvalidHandleError
            An id belongs to no page or to a free page; nothing has changed.
        CapacityError
            The quotas of tenants leave no room to hold cached pages.
        IndexError, TypeError, ValueError

        Notes
        -----
        For code that copies to or from these pages. The call also keeps the pages before a cached
        page on its path. A request may continue to write into its own pages.
        ``reset_prefix_cache`` forgets held pages that no request has; they become free when the
        hold ends. Costs O(pages), and O(cached pages) to find them.
        """
        cdef cnp.ndarray ids = as_pages(pages)
        listen(self)
        cdef int32_t replica = self._claims.replica(replica_idx)
        return hold_pages(self, self._native, replica, ids, self._checks)

    def next_pages(self, replica_idx=0):
        """List the available pages, in the order in which requests would get them.

        Parameters
        ----------
        replica_idx : int
            The replica of the pages.

        Returns
        -------
        int32 [n]
            The free pages, followed by the evictable cached pages in their present eviction order.

        Raises
        ------
        ValueError
            The layers have groups or the manager has quotas: the order depends on the request and
            its number of pages.
        IndexError, TypeError

        Notes
        -----
        For tests and for inspection of a cache; changes nothing. Exact with ``"lru"``. Other
        policies may evict a parent run later: the list has it directly after its child.
        Costs O(pages).
        """
        listen(self)
        return listed_next_pages(self._native, self._claims.replica(replica_idx))

    # ---- misses ----------------------------------------------------------------------------------

    def explain(self, request_id):
        """Return why tokens of a request were not cached when it was admitted.

        Parameters
        ----------
        request_id

        Returns
        -------
        kvcore.metrics.Misses or None
            The tokens by reason; ``str`` of it is a text. None before the first ``maybe_reserve``
            or ``fetch`` of the request, and for a fork, which takes the pages of its parent.

        Raises
        ------
        RequestNotFoundError
        ValueError
            The manager was made without ``CacheOptions(explain=...)``.

        Notes
        -----
        O(1). ``ctx.misses`` is the same, and stays after the request is released.
        """
        require_made(self)
        return listed_misses(self._native.misses_of(self._claims.find(request_id)))

    def _misses_with(self, ctx):
        """Return the misses of a claim that was used last with a context, or None."""
        if not self._is_made:
            return None
        cdef Claim claim = self._claims.lookup(ctx.request_id)
        if claim is None or claim.context is not ctx:
            return None
        return listed_misses(self._native.misses_of(claim.sequence))

    # ---- counts and times ------------------------------------------------------------------------

    def _counters(self):
        require_made(self)
        return counters(self._native)

    def _time_calls(self, bint on):
        """Add a user of call times, or remove one. A closed engine accepts this call also.

        Calls are timed while there is at least one user. Counts stay until ``_reset_times``.
        """
        cdef double tick
        if not on:
            self._times.stop()
            return
        with nogil:
            tick = CallTimes.measure_tick()
        self._times.start(tick)

    def _call_times(self):
        """Return the durations of calls: by name, a cumulative histogram and the total seconds.

        Returns
        -------
        dict of str to (list of (float, int), float)
            For "reserve", "reserve_batch", "fetch" and "step": pairs of a bound in seconds, up to
            infinity, and the number of calls that took at most this time; and the total seconds.
        """
        require_made(self)
        return {
            "reserve": listed_times(self, kReserve),
            "reserve_batch": listed_times(self, kReserveBatch),
            "fetch": listed_times(self, kFetch),
            "step": listed_times(self, kStep),
        }

    def _reset_times(self):
        """Set the counts and times of calls to 0."""
        self._times.reset()
