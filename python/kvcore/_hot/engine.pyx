# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, autotestdict=False
"""The verbs of a manager that run per request and per step.

No decision is made here: the rules live in the C++ library. A verb sees to it that the engine was
made and that nobody has asked for the cache to be forgotten, and leaves the rest to its parts.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t

from kvcore._hot cimport forks, prefixes, steps
from kvcore._hot.arguments cimport as_int, as_tokens, id_of, namespace_of, room_in, tokens_ahead
from kvcore._hot.claims cimport Claim, not_found
from kvcore._hot.extra_keys cimport shown_of
from kvcore._hot.parts cimport check, checked, listen, require_made, reuse_after, tell_time
from kvcore._hot.settler cimport copies_array, grouped_copies_array
from kvcore.cpp cimport kFetch, kStep

cnp.import_array()

cdef object FIRST = 0  # what is passed mostly, and so not converted each time


@cython.no_gc_clear  # what dies with a manager may still ask
cdef class StepEngine(ReservingEngine):
    """Run what an engine asks per request and per step; the base of PagedKVCacheManager."""

    # ---- claims ------------------------------------------------------------------------------
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
        return prefixes.recommend_replica(self._claims, context)

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

    # ---- requests with a common past ---------------------------------------------------------
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
        forks.fork(self._claims, self._settler, parent_id, child_ctxs)
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
        forks.truncate(self._claims, self._settler, request_id, n)
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
        forks.accept(self._claims, self._settler, ctx, num_tokens)
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
        cdef int64_t leaves_at = forks.leave_windows(self._claims, self._settler, request_id, n)
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
        return forks.shared_prefixes(self._reader, batch)

    # ---- steps -------------------------------------------------------------------------------
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
                inputs = steps.fetch(self._reader, self._settler, self._maker, batch, ahead)
        else:
            inputs = steps.fetch(self._reader, self._settler, self._maker, batch, ahead)
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
        cdef cnp.ndarray swaps = steps.commit(self._reader, self._settler, batch)
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

    # ---- prefixes ----------------------------------------------------------------------------
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
            found = prefixes.match(self._native, replica, source, name, return_pages, touch, part)
        else:
            found = prefixes.match_ahead(
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
        return prefixes.pin(self, self._native, replica, source, name, self._checks)

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
