# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, autotestdict=False
"""What an engine is made of."""

cimport cython
cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int32_t, int64_t

from kvcore._hot cimport prefixes
from kvcore._hot.batches cimport BatchReader
from kvcore._hot.claims cimport ClaimTable, RowClaims
from kvcore._hot.settler cimport Settler
from kvcore._hot.steps cimport InputMaker
from kvcore.cpp cimport (
    CacheManager,
    CallTimes,
    LatencyHistogram,
    TimedCall,
    kFetch,
    kReserve,
    kReserveBatch,
    kStep,
)

from kvcore._hot.store_side import StoreSide
from kvcore.errors import KVCacheError
from kvcore.support.step_order import StepOrder


cdef int refuse(EngineParts engine) except -1:
    cdef str name = type(engine).__name__
    if engine._is_closed:
        raise KVCacheError(f"this {name} is closed; make another one")
    raise RuntimeError(
        f"this {name} was not initialised; call __init__ of the base class before anything else"
    )


cdef tuple listed_times(EngineParts engine, TimedCall call):
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
cdef class EngineParts:
    """Hold the parts of an engine: claims, the walk of batches, what settles copies, makes inputs.

    The caller's: `copier`, `mover`, `gpus`, `listener`, `clock`, each None where there is none.
    """

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
            shards, gpus, prefixes.end_page(self._native), layers, pages_per_column,
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

    def _row_claims(self, list request_ids not None, int32_t bundle=0):
        """Remember the claims of a batch's rows, for the pages of a bundle."""
        require_made(self)
        return RowClaims(self._claims, request_ids, bundle)

    def _counters(self):
        require_made(self)
        return prefixes.counters(self._native)

    def _set_below(self, below, onload=None):
        """Have stores below the host tier asked; return what they ask of the manager.

        Parameters
        ----------
        below : kvcore.stores.tiers.stack.TierStack
            ``may_have(key) -> bool``, ``bring(search, context, now)``, ``arrived()``,
            ``begin_reset()``, ``end_reset()``.
        onload : kvcore.stores.tiers.onload.Onload, optional
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
        cdef cnp.ndarray ids = prefixes.as_pages(pages)
        listen(self)
        cdef int32_t replica = self._claims.replica(replica_idx)
        cdef int64_t left = prefixes.forget(self._native, replica, ids)
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
        cdef cnp.ndarray ids = prefixes.as_pages(pages)
        listen(self)
        cdef int32_t replica = self._claims.replica(replica_idx)
        return prefixes.hold(self, self._native, replica, ids, self._checks)

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
        return prefixes.next_pages(self._native, self._claims.replica(replica_idx))

    def _reset_times(self):
        """Count calls from 0 again."""
        self._times.reset()

    def _require_open(self):
        """Raise KVCacheError once it is closed."""
        require_made(self)

    def _let_go(self):
        """Refuse every call from now on, and refer to no array any more.

        Calls under way have the parts that they began with.
        """
        cdef int32_t end = prefixes.end_page(self._native)
        self._is_closed, self._is_made, self._is_alone = True, False, False
        self._settler = Settler(self._core, None, None)
        self._maker = InputMaker([], None, end, None, (1,), 0, None)
        self._shards = []
        self._copier = self._mover = self._gpus = self._listener = self._onload = None

    def _set_copier(self, copier):
        """Have pages copied by another ``kvcore.backends.protocol.Copier``; None without a pool."""
        require_made(self)
        self._settler.set_copier(copier)
        self._copier = copier
