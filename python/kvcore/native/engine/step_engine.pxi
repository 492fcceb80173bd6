# SPDX-License-Identifier: Apache-2.0
"""The verbs of a manager that run per request and per step.

No decision is made here: the rules live in the C++ library. A verb sees to it that the engine was
made and that nobody has asked for the cache to be forgotten, and leaves the rest to its parts.
"""


cdef object FIRST = 0  # what is passed mostly, and so not converted each time


cdef tuple listed_times(StepEngine engine, TimedCall call):
    """Calls up to each bound in seconds, and the seconds of all."""
    cdef const LatencyHistogram* found = &engine._times.of(call)
    cdef int64_t calls = 0
    cdef list upto = []
    cdef size_t i
    for i in range(found.counts().size()):
        calls += found.counts()[i]
        upto.append((LatencyHistogram.bound(i), calls))
    return upto, engine._times.seconds(call)


@cython.no_gc_clear  # what dies with a manager may still ask
cdef class StepEngine(EngineBase):
    """Run what an engine asks per request and per step; the base of PagedKVCacheManager.

    The caller's: `copier`, `mover`, `gpus`, `listener`, `clock`, each None where there is none.
    """

    cdef CallTimes _times
    cdef ClaimTable _claims
    cdef BatchReader _reader
    cdef Settler _settler
    cdef InputMaker _maker
    cdef object _onload  # kvcore.tiers.onload.Onload, where requests wait for it; else None

    # ---- parts -----------------------------------------------------------------------------------

    def __init__(self, object core, *, list shards not None, object copier, object mover,
                 object gpus, object listener, object layers=None,
                 tuple pages_per_column=(1,), bint runtime_checks, object clock=None,
                 tuple tenants=(), int32_t state_groups=0, object states=None):
        require_new(self)
        self._native = <CacheManager*>PyCapsule_GetPointer(core._capsule(), "kvcore.CacheManager")
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
        self._copier, self._mover, self._gpus = copier, mover, gpus
        self._listener, self._clock = listener, clock
        self._checks = runtime_checks
        self._is_alone = listener is None and clock is None
        self._is_made = True

    def _set_copier(self, copier):
        """Have pages copied by another ``kvcore.backends.protocol.Copier``; None without a pool."""
        require_made(self)
        self._settler.set_copier(copier)
        self._copier = copier

    def _set_below(self, below, onload=None):
        """Have stores below the host tier asked; return what they ask of the manager.

        Parameters
        ----------
        below : kvcore.tiers.stack.TierStack
            ``may_have(key) -> bool``, ``bring(search, context, now)``, ``arrived()``,
            ``begin_reset()``, ``end_reset()``.
        onload : kvcore.tiers.onload.Onload, optional
            Where requests wait for what is brought: ``waiting``, ``drop(request_id)``.

        Returns
        -------
        StoreSide
        """
        require_made(self)
        self._settler.store_side = StoreSide(self._core)
        self._settler.below = below
        self._onload = onload
        return self._settler.store_side

    def _require_open(self):
        """Raise KVCacheError once it is closed."""
        require_made(self)

    def _let_go(self):
        """Refuse every call from now on, and refer to no array any more.

        Calls under way have the parts that they began with.
        """
        cdef int32_t end = end_page(self._native)
        self._is_closed, self._is_made, self._is_alone = True, False, False
        self._settler = Settler(self._core, None, None)
        self._maker = InputMaker([], None, end, None, (1,), 0, None)
        self._shards = []
        self._copier = self._mover = self._gpus = self._listener = self._onload = None

    # ---- claims ----------------------------------------------------------------------------------

    def external_claim(self, request_id, replica_idx=None):
        """Register a request on a replica; takes no pages.

        Parameters
        ----------
        request_id
            Any hashable object.
        replica_idx : int or "auto", optional
            Needed with several replicas; "auto" takes the one with the most free pages.

        Raises
        ------
        AlreadyClaimedError, CapacityError, IndexError, ValueError
        """
        require_made(self)
        self._claims.claim(request_id, replica_idx)
        check(self)

    claim = external_claim

    def contains(self, request_id):
        """Tell whether a request is claimed now."""
        require_made(self)
        return self._claims.lookup(request_id) is not None

    def release(self, request_id, *, after=None):
        """Drop a request; its committed pages stay cached and evictable.

        Parameters
        ----------
        request_id : hashable
        after : stream or event, optional
            Of cupy or torch, or a stream's handle: on GPU pools nothing writes the request's pages
            before the work that it stands for is done. Not needed for work on the streams that
            were current when the batch was fetched.

        Raises
        ------
        RequestNotFoundError
        ValueError
            `after` is given, but no pool is on a GPU.
        """
        require_made(self)
        tell_time(self)
        cdef Claim claim = self._claims.claim_of(request_id)
        if after is not None:
            reuse_after(self, after)
            if not claim.is_live:
                raise not_found(request_id)
        self._claims.release(claim)
        if self._onload is not None:
            self._onload.drop(request_id)
        check(self)

    def get_replica(self, context):
        """Return the index of the replica that a context's request is claimed on."""
        require_made(self)
        return self._claims.claim_of(id_of(context)).replica

    def get_or_recommend_replica(self, context):
        """Return the replica of a claimed request, or the best one for one not claimed yet.

        Longest prefix hit first, then most free pages, then fewest requests, then lowest index.
        Changes nothing.
        """
        require_made(self)
        cdef Claim claim = self._claims.lookup(id_of(context))
        if claim is not None:
            return claim.replica
        listen(self)
        return recommend_replica(self._claims, context)

    def get_req_blocks(self, request_id, bundle=0, *, first=0):
        """Return a request's page ids in logical order, a list of int.

        Parameters
        ----------
        request_id
        bundle : int
            Of ``kvcore.groups.bundles``, where layers have groups. The id behind the last page
            stands for a page that no layer of it reads any more, or that is not reserved yet.
        first : int
            Those from this one on, such as what a reservation has added. Empty behind the last.

        Raises
        ------
        RequestNotFoundError, IndexError
        ValueError
            A negative `first`.

        Notes
        -----
        O(pages returned).
        """
        cdef int64_t begin = as_int(first, "first")
        require_made(self)
        cdef int32_t index = self._maker.bundle_of(bundle)
        return self._maker.pages_of(self._native, self._claims.find(request_id), index, begin)

    def _row_claims(self, list request_ids not None, int32_t bundle=0):
        """Remember the claims of a batch's rows, for the pages of a bundle."""
        require_made(self)
        return RowClaims(self._claims, request_ids, bundle)

    # ---- requests with a common past -------------------------------------------------------------

    def fork(self, parent_id, *child_ctxs):
        """Claim requests that go on from what another one has written; copies nothing yet.

        Parameters
        ----------
        parent_id
            A claimed request. Its tokens written as of its last ``step`` are shared.
        *child_ctxs : context
            Not claimed yet; each holds the parent's written tokens and at least one more, in the
            same namespace. Its ``start_idx`` moves behind them, an ``active_idx`` not behind that
            to ``end_idx``.

        Raises
        ------
        RequestNotFoundError, AlreadyClaimedError, CapacityError
        ValueError
            Other tokens or another namespace than the parent's; nothing has been claimed.

        Notes
        -----
        Pages are shared; the one that is written next is copied when parent or child reserves it,
        whichever comes first. Costs O(pages) and one comparison of the tokens per child.
        """
        require_made(self)
        fork_request(self._claims, self._settler, parent_id, child_ctxs)
        check(self)

    def truncate(self, request_id, n_tokens):
        """Forget written tokens of a request beyond the first `n_tokens`.

        For draft tokens that were rejected: pages that hold none of the rest are free, those
        reserved ahead as well. Committed pages are never rewritten; the next write into one copies
        it first. Set the context back with ``ctx.rewind(n_tokens)``; ``accept`` does both. With
        states and `max_draft_tokens` the next ``fetch`` sets ``start_idx`` further back, to the
        token whose state was kept.

        Raises
        ------
        RequestNotFoundError
        ValueError
            `n_tokens` outside 0 .. the ``active_idx`` that was fetched last.
        """
        cdef int64_t n = as_int(n_tokens, "n_tokens")
        require_made(self)
        truncate_request(self._claims, self._settler, request_id, n)
        check(self)

    def accept(self, ctx, n):
        """Take back the draft tokens of a request behind its first `n`, and rewind its context.

        In one call what ``truncate(ctx.request_id, n)`` and ``ctx.rewind(n)`` do:
        where either would be refused, nothing has changed. Then ``update`` the context with the
        token that the model sampled, and ``step``.

        Raises
        ------
        RequestNotFoundError
        ValueError
            `n` outside 1 .. ``end_idx``, or as of ``truncate``.
        """
        cdef int64_t num_tokens = as_int(n, "n")
        require_made(self)
        accept_tokens(self._claims, self._settler, ctx, num_tokens)
        check(self)

    def leave_windows(self, request_id, n_tokens, *, after=None):
        """Give back the pages of windows that no token behind the first `n_tokens` reads.

        For ``keep_windows=True``, where ``step`` gives back none: tells how many of the tokens that
        were stepped are computed by now. `after` as for ``release``. Costs O(pages given back).

        Returns
        -------
        int
            With how many tokens there is more to give back; ``2**63 - 1`` without windows.

        Raises
        ------
        RequestNotFoundError
        ValueError
            More tokens than its pages hold, or fewer than 0; a manager without ``keep_windows``.
        """
        cdef int64_t n = as_int(n_tokens, "n_tokens")
        require_made(self)
        if after is not None:
            reuse_after(self, after)
        cdef int64_t leaves_at = leave_windows_of(self._claims, self._settler, request_id, n)
        check(self)
        return leaves_at

    def shared_prefixes(self, batch):
        """Find the rows of a batch that hold the same leading pages.

        Returns
        -------
        list of SharedPrefix
            Longest first; nested groups are listed each.

        Notes
        -----
        Read off the prefix tree and the pages that forks share: O(batch x runs), no token is
        compared.
        """
        require_made(self)
        return find_shared_prefixes(self._reader, batch)

    # ---- pages ahead of steps --------------------------------------------------------------------

    def maybe_reserve(self, data, num_steps=1, *, max_hit=None, keep_free=0, must_fit=None):
        """Reuse the cached prefix of a request and allocate the pages that its next steps need.

        Parameters
        ----------
        data : context
            Its ``start_idx`` moves to the end of the prefix found, ``active_idx`` behind it.
        num_steps : int
            Steps to run before the next reservation.
        max_hit : int, optional
            Tokens of the cache that the request has afterwards, copied ones included, at most: a
            hit is cut to what may end there. 0 leaves the cache alone. A longer hit that it has
            already stays.
        keep_free : int
            Pages of its replica that are free or evictable afterwards, at least.
        must_fit : int, optional
            Tokens, such as the whole prompt or all that it may become: there has to be room for the
            request with so many, beside `keep_free`, though it gets no page by that. For managers
            with ``reserve_chunks``, and for windows: no later chunk is taken to be longer.

        Returns
        -------
        bool
            False when the pages do not fit; then nothing has changed, and nothing is evicted.

        Raises
        ------
        CapacityError
            The request, or what must fit, can never fit: larger than the pool, than a quota or than
            ``max_seq_len``.
        RequestNotFoundError, ValueError

        Notes
        -----
        Costs the comparison of the prompt with the cache plus O(pages added). Idempotent. The ids
        of the pages added are ``get_req_blocks(request_id, first=n)`` where it had `n`. The options
        are those of this call: another one, or a ``fetch`` that finds pages missing, may take a
        longer hit.
        """
        cdef int64_t ahead = 1 if num_steps is ONE_STEP else as_int(num_steps, "num_steps")
        cdef ReserveOptions options
        if max_hit is not None or keep_free is not NO_PAGES or must_fit is not None:
            read_options(&options, max_hit, keep_free, must_fit)
        cdef int64_t begun = self._times.begin()
        listen(self)
        cdef bint fits = reserve(self._reader, self._settler, data, ahead, &options)
        self._times.end(kReserve, begun)
        check(self)
        return fits

    reserve = maybe_reserve

    def _stand_back(self, ctx, int64_t start, int64_t active):
        """Have a request give a longer hit back, as if it had not been reserved since."""
        listen(self)
        stand_back(self._reader, self._settler, ctx, start, active)
        check(self)

    def maybe_reserve_batch(self, batch, num_steps=1):
        """Reserve contexts in order up to the first that does not fit; return how many.

        Every error is raised before anything is reserved.
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
        """Tell what ``maybe_reserve`` would do now; changes nothing, not even recency.

        Parameters
        ----------
        ctx : context
            It need not be claimed: then of a claim that is new.
        num_steps : int
        replica_idx : int, optional
            Of a request that is not claimed; left out, ``get_or_recommend_replica(ctx)``.
        max_hit, keep_free, must_fit
            As of ``maybe_reserve``.

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
        Costs finding the hit. Whether a replica takes one more claim is not asked.
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
        """Hand out what the kernels need for a batch, reserving pages that are missing.

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
            Pages are missing; no context of the batch has changed, one that waited for pages from
            stores still waits.
        CapacityError, RequestNotFoundError, ValueError

        Notes
        -----
        One native call. Costs O(batch) plus O(pages changed since the buffer was last used); after
        a True ``maybe_reserve`` with the same or more steps it cannot fail for memory.

        On a GPU the arrays are copied to it on the current stream, which from then on is
        ordered behind the streams of earlier fetches; the host waits for nothing.
        """
        cdef int64_t ahead = as_int(num_steps, "num_steps")
        cdef int64_t begun = self._times.begin()
        cdef list inputs
        listen(self)
        if self._onload is not None and self._onload.waiting and not self._reader.is_known(batch):
            batch = list(batch)
            with self._await_pages(batch):
                require_made(self)  # it may have been closed meanwhile
                inputs = fetch_batch(self._reader, self._settler, self._maker, batch, ahead)
        else:
            inputs = fetch_batch(self._reader, self._settler, self._maker, batch, ahead)
        self._times.end(kFetch, begun)
        return checked(self, inputs)

    def step(self, batch, *, after=None):
        """Commit every page whose tokens are all written to the prefix cache.

        Parameters
        ----------
        batch : sequence of contexts
            After ``update``: ``start_idx`` tokens are written.
        after : stream or event, optional
            As for ``release``: nothing writes the pages that windows have left before the work that
            it stands for is done.

        Returns
        -------
        int32 [n, 3], or [n, 4] where layers have several page tables
            Pages that were swapped for equal cached ones: batch row, column, page, and the bundle.
            Usually empty.

        Raises
        ------
        ValueError
            A context claims more written tokens than its pages hold; nothing has been committed.
            `after` is given, but no pool is on a GPU.

        Notes
        -----
        Costs O(new tokens), whatever the context length; with a host tier also the bytes of the
        pages that are stored there, while other threads may run. Pages that the host tier could not
        take are not there, which the log says ("kvcore"): what is committed stays so.
        """
        cdef int64_t begun = self._times.begin()
        listen(self)  # a page written now must not be swapped for one to be forgotten
        if after is not None:
            reuse_after(self, after)
        cdef cnp.ndarray swaps = commit_batch(self._reader, self._settler, batch)
        self._times.end(kStep, begun)
        return checked(self, swaps)

    def take_copies(self):
        """Hand out the page copies that a manager without a pool of its own owes.

        Returns
        -------
        int32 [n, 4]
            Replica, source page, destination page, tokens; to be done in this order, before the
            next fetch's kernels run.
        """
        require_made(self)
        return copies_array(self._native.take_copies())

    def take_state_copies(self):
        """Hand out the copies of state slots that a manager without arrays of its own owes.

        Returns
        -------
        int32 [n, 4]
            Replica, State group, source slot, destination slot; to be done in this order, before
            the next fetch's kernels run.
        """
        require_made(self)
        return grouped_copies_array(self._native.take_state_copies(), self._maker.state_groups)

    # ---- prefixes --------------------------------------------------------------------------------

    def match_prefix(self, tokens, extra_key=None, cache_salt=None, replica_idx=0, *,
                     extra_keys=None, bint return_pages=False, bint touch=False, lookahead=0,
                     cnp.ndarray out=None, bundle=0):
        """Count the tokens of a prefix that are cached in whole pages; pure unless it is to touch.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        extra_keys : list of (int, int, bytes), optional
            Those of a context that start in front of `n`.
        return_pages : bool
            Also return the page ids, int32.
        touch : bool
            It is a use of these pages, by which they are evicted later.
        lookahead : int
            Also return how many of so many tokens behind the last whole page a cached page has too,
            less than a page: where layers have groups, those that a hit could copy; with states 0.
            O(log children) more.
        out : int32 [m], optional
            Where the ids go; contiguous. What is returned is its beginning, as of `return_pages`.
        bundle : int
            Whose ids, as ``get_req_blocks`` lists them of a request with this hit.

        Returns
        -------
        int, or a tuple of it and what else is asked for, in this order
            The tokens; the ids, int32 [pages]; the tokens that `lookahead` found, int.

        Raises
        ------
        IndexError, ValueError, TypeError
            A negative `lookahead`; an `out` that is none, or too short. Then it is no use either.
        """
        cdef int64_t ahead = tokens_ahead(lookahead)
        cdef cnp.ndarray source = as_tokens(tokens)
        cdef bytes name = namespace_of(extra_key, cache_salt)
        listen(self)
        cdef int32_t replica = self._claims.replica(replica_idx)
        source = shown_of(self._claims.trees, extra_keys, source)
        cdef int32_t* to = <int32_t*>NULL if out is None else room_in(out)
        cdef int32_t part = 0 if bundle is FIRST else self._maker.bundle_of(bundle)
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
            A context manager; ``num_tokens`` tells how many tokens are kept.

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
        """Forget every cached page, on every replica and in every tier but shared servers.

        Returns
        -------
        bool
            True where no page is left that was cached. False while requests, pins or holds keep
            some.

        Notes
        -----
        Who holds a page keeps it, and no later request hits it. Nor does one hit what a request
        that ran before computes from then on, until the request was released or truncated to 0.
        Stores are emptied as well, but for those on servers (Redis, Mooncake), whose pages are
        others' too: give another ``fingerprint`` for other weights, or clear them. O(cached pages +
        requests).
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
        """Take cached pages out of the cache whose contents are wrong, say of a load that failed.

        Parameters
        ----------
        pages : sequence of int, or integer array [n]
            Ids, with groups of any bundle. Those of free pages are passed over.
        replica_idx : int
            Whose they are.

        Returns
        -------
        int
            Pages that left the device's cache: these, and what was cached behind them.

        Raises
        ------
        InvalidHandleError
            An id that is no page's; nothing has changed.
        IndexError, TypeError, ValueError

        Notes
        -----
        Nothing finds them any more, on the device or in the host tier. Requests, pins and holds
        that have such pages keep them. A request runs on, but what it writes from the first of them
        on is not cached, until ``truncate`` has cut it there or in front: then it computes them
        anew. Pages that nobody has are free. What was written to stores below the host tier stays
        there, and a page that a request has begun as a copy of a forgotten one, and cached, as well
        (``partial_page_reuse``). Costs O(cached pages + requests).
        """
        cdef cnp.ndarray ids = as_pages(pages)
        listen(self)
        cdef int32_t replica = self._claims.replica(replica_idx)
        cdef int64_t left = forget_pages(self._native, replica, ids)
        check(self)
        return left

    def hold(self, pages, replica_idx=0):
        """Keep pages from being evicted, or handed out to anybody else, whoever releases them.

        Parameters
        ----------
        pages : sequence of int, or integer array [n]
            Ids of pages that requests hold or that are cached, with groups of any bundle: all pages
            of the same tokens are held then.
        replica_idx : int
            Whose they are.

        Returns
        -------
        HeldPages
            A context manager, with ``let_go()``. Holds nest.

        Raises
        ------
        InvalidHandleError
            An id that is no page's, or a free page's; nothing has changed.
        CapacityError
            The quotas of tenants leave no room for cached pages to be held.
        IndexError, TypeError, ValueError

        Notes
        -----
        For who copies to or from them meanwhile. What is in front of a cached page is kept too. A
        request may go on writing into its own pages. ``reset_prefix_cache`` forgets held pages that
        no request has: they are free once they are let go. Costs O(pages), and O(cached pages) to
        find them.
        """
        cdef cnp.ndarray ids = as_pages(pages)
        listen(self)
        cdef int32_t replica = self._claims.replica(replica_idx)
        return hold_pages(self, self._native, replica, ids, self._checks)

    def next_pages(self, replica_idx=0):
        """List the pages that can be had, in the order in which requests would be given them.

        Parameters
        ----------
        replica_idx : int
            Whose they are.

        Returns
        -------
        int32 [n]
            Free pages, then cached ones as they would be evicted now.

        Raises
        ------
        ValueError
            With groups of layers, and with quotas, where it depends on who asks for how many.
        IndexError, TypeError

        Notes
        -----
        For tests, and for looking at a cache; changes nothing. Exact with ``"lru"``; other policies
        may have a run wait that another one follows now, which is listed right behind that one.
        Costs O(pages).
        """
        listen(self)
        return listed_next_pages(self._native, self._claims.replica(replica_idx))

    # ---- counts and times ------------------------------------------------------------------------

    def _counters(self):
        require_made(self)
        return counters(self._native)

    def _time_calls(self, bint on):
        """Begin to time calls for somebody, or end it for one who began; those of a closed one too.

        Calls are timed while there is anybody. What is counted stays until ``_reset_times``.
        """
        cdef double tick
        if not on:
            self._times.stop()
            return
        with nogil:
            tick = CallTimes.measure_tick()
        self._times.start(tick)

    def _call_times(self):
        """Return how long calls took: seconds in all, and by name how many took how long.

        Returns
        -------
        dict of str to (list of (float, int), float)
            Of "reserve", "reserve_batch", "fetch" and "step" the calls that took up to so many
            seconds, to infinity, and the seconds of all.
        """
        require_made(self)
        return {
            "reserve": listed_times(self, kReserve),
            "reserve_batch": listed_times(self, kReserveBatch),
            "fetch": listed_times(self, kFetch),
            "step": listed_times(self, kStep),
        }

    def _reset_times(self):
        """Count calls from 0 again."""
        self._times.reset()
