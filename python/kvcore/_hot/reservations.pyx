# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, autotestdict=False
"""Pages for one request, or for as many of a batch as fit; and what that would do."""

cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t

from kvcore._hot.arguments cimport as_int, id_of
from kvcore._hot.batches cimport Batch, BatchReader
from kvcore._hot.below cimport bring, bring_all
from kvcore._hot.claims cimport Claim, ClaimTable, is_recorded, named
from kvcore._hot.contexts cimport TextGenerationContext
from kvcore._hot.extra_keys cimport ExtraKeys, require_plain
from kvcore._hot.foreign cimport check_settable, move_indices, read_foreign
from kvcore._hot.parts cimport check, listen, require_made
from kvcore._hot.settler cimport (
    DONE,
    WAIT,
    Call,
    Settler,
    begin_call,
    expect_moves,
    name_row,
    room_for,
)
from kvcore.cpp cimport (
    BatchReserve,
    RequestBatch,
    RequestView,
    ReserveOptions,
    ReserveStatus,
    SequenceHandle,
    kReserve,
    kReserveBatch,
)
from kvcore.cpp cimport ReservePlan as CppReservePlan

from kvcore.results import ReservePlan

# Above this many tokens to compare or copy, other Python threads run meanwhile.
cdef int64_t RELEASE_GIL_TOKENS = 8192
# What is passed mostly, and so not converted each time.
cdef object ONE_STEP = 1
cdef object NO_PAGES = 0


# ---- arguments -----------------------------------------------------------------------------------

cdef int64_t as_count(object value, str name) except -1:
    cdef int64_t count = as_int(value, name)
    if count < 0:
        raise ValueError(f"{name} is {count}, must be at least 0")
    return count


cdef int read_options(
    ReserveOptions* options, object max_hit, object keep_free, object must_fit
) except -1:
    """Code of integers like int may run."""
    if max_hit is not None:
        options.max_hit = as_count(max_hit, "max_hit")
    if keep_free is not NO_PAGES:
        options.keep_free = as_count(keep_free, "keep_free")
    if must_fit is not None:
        options.must_fit = as_count(must_fit, "must_fit")
    return 0


# ---- pages for requests --------------------------------------------------------------------------


cdef int reserve_once(Settler settler, Call* call, object context) except -1:
    cdef RequestView* request = call.rows[0]
    cdef ReserveStatus status
    cdef TextGenerationContext own
    cdef object _held
    if isinstance(context, TextGenerationContext):
        own = <TextGenerationContext>context
        _held = own._buffer if own._keys is None else own._keys.shown  # while other threads run
    if request.end - request.start > RELEASE_GIL_TOKENS:
        with nogil:
            status = settler.native.reserve(
                request[0], call.steps, room_for(settler, call), call.options[0]
            )
    else:
        status = settler.native.reserve(
            request[0], call.steps, room_for(settler, call), call.options[0]
        )
    if status == ReserveStatus.kPending:
        call.waits_for = request.sequence
        return WAIT
    call.done = status == ReserveStatus.kOk
    return DONE


cdef object name_alone(object error, list contexts, Call* call, object context):
    return named(error, [context], 0)


cdef bint reserve(
    BatchReader reader, Settler settler, object context, int64_t steps,
    const ReserveOptions* options
) except -1:
    cdef RequestView foreign
    cdef RequestView given
    cdef RequestView* request = &foreign
    cdef Call call
    cdef list contexts = None
    cdef list keep
    if isinstance(context, TextGenerationContext):
        request = reader.request_of(<TextGenerationContext>context)
        begin_call(&call, name_alone, &request, 1, steps)
    else:
        keep = []
        reader.view_of(context, request, keep)
        check_settable(context)
        given = foreign
        begin_call(&call, name_alone, &request, 1, steps)
        call.foreign = &foreign
        call.given = &given
        contexts = [context]
    call.options = options
    cdef SequenceHandle sequence = request.sequence
    if settler.below is not None:
        bring(settler, request, context, False, options.max_hit)
    settler.carry_out(reserve_once, &call, contexts, context)
    if not call.done:
        return False
    if not is_recorded(reader.claims, <PyObject*>context, sequence):
        reader.claims.record(context, sequence)
    return True


cdef int stand_back(
    BatchReader reader, Settler settler, object context, int64_t start, int64_t active
) except -1:
    """Have a request that took a longer hit stand where it stood, with the pages for that."""
    cdef RequestView foreign
    cdef RequestView given
    cdef RequestView* request = &foreign
    cdef ReserveOptions options
    cdef list keep = []
    cdef bint is_own = isinstance(context, TextGenerationContext)
    options.max_hit = start
    if is_own:
        request = reader.request_of(<TextGenerationContext>context)
    else:
        reader.view_of(context, request, keep)
    settler.native.begin_again(request.sequence)
    given = request[0]
    request.start = 0
    if not is_own:
        move_indices(context, foreign, given)
    reserve(reader, settler, context, 1, &options)
    if not is_own:
        reader.view_of(context, request, keep)
        given = foreign
    if request.start < active <= request.end:
        request.active = active
    if not is_own:
        move_indices(context, foreign, given)
    return 0


cdef int reserve_rest(Settler settler, Call* call, object own) except -1:
    cdef BatchReserve answer
    call.first = call.done
    answer = settler.native.reserve_batch(
        RequestBatch(call.rows + call.first, call.n - call.first), call.steps,
        room_for(settler, call),
    )
    call.done += answer.reserved
    if answer.status != ReserveStatus.kPending:
        return DONE
    call.waits_for = call.rows[call.done].sequence
    return WAIT


cdef int64_t reserve_batch(
    BatchReader reader, Settler settler, object batch, int64_t steps
) except -1:
    cdef Batch requests
    cdef Call call
    cdef list keep = []
    cdef list contexts = reader.read(batch, &requests, keep)
    begin_call(
        &call, name_row, requests.rows.data(), <int64_t>requests.rows.size(), steps
    )
    if keep:
        expect_moves(contexts, &requests, &call)
    if settler.below is not None:
        contexts = contexts[:]
        bring_all(settler, requests.rows, contexts, False)
    contexts = settler.carry_out(reserve_rest, &call, contexts, None)
    reader.record(&requests, contexts, call.done)
    return call.done


# ---- what that would do --------------------------------------------------------------------------

cdef int32_t read_unclaimed(
    ClaimTable claims, object context, RequestView* view, list keep
) except -2:
    """Describe a request that is not claimed; return the number of its tenant, -1 for none."""
    cdef TextGenerationContext own
    cdef bint has_keys
    cdef int32_t tenant = -1
    if isinstance(context, TextGenerationContext):
        own = <TextGenerationContext>context
        view[0] = own._request
        has_keys = own._keys is not None
        if own._terms is not None and own._terms.tenant is not None:
            tenant = <int32_t>claims.tenants.get(own._terms.tenant, -1)
    else:
        read_foreign(context, view, keep)
        has_keys = type(keep[len(keep) - 1]) is ExtraKeys
    if has_keys:
        claims.expect_keys()
    elif claims.trees.is_keyed:
        require_plain(view.tokens, 0, view.end)
    return tenant


cdef object shown_plan(Settler settler, const CppReservePlan& found):
    return ReservePlan(
        hit_tokens=found.hit_tokens, new_pages=found.new_pages,
        evicted_pages=found.evicted_pages, copied_tokens=found.copied_tokens, fits=found.fits,
        active_idx=None if settler.native.config().states.empty() else found.active,
        evictable_hit_pages=found.evictable_hit_pages,
    )


cdef object plan_unclaimed(
    ClaimTable claims, Settler settler, object context, int64_t steps,
    const ReserveOptions& options, int32_t replica
):
    """On that replica; -1: on the one that suits it best."""
    cdef RequestView view
    cdef list keep = []
    cdef int32_t tenant = read_unclaimed(claims, context, &view, keep)
    if replica < 0:
        replica = settler.native.recommend_replica(view.name_space, view.tokens, view.end)
    try:
        return shown_plan(settler, settler.native.plan(replica, view, steps, options, tenant))
    except ValueError as error:
        raise named(error, [context], 0) from None


cdef object plan(
    BatchReader reader, Settler settler, object context, int64_t steps,
    const ReserveOptions& options, int32_t replica
):
    cdef RequestView foreign
    cdef RequestView* request = &foreign
    cdef list keep = []
    cdef Claim claim = reader.claims.lookup(id_of(context))
    if claim is None:
        return plan_unclaimed(reader.claims, settler, context, steps, options, replica)
    if replica >= 0 and replica != claim.replica:
        raise ValueError(
            f"replica_idx is {replica}, but request {claim.request_id!r} is claimed on replica "
            f"{claim.replica}; leave it out"
        )
    if isinstance(context, TextGenerationContext):
        request = reader.request_of(<TextGenerationContext>context)
    else:
        reader.view_of(context, request, keep)
    try:
        return shown_plan(settler, settler.native.plan(request[0], steps, options))
    except ValueError as error:
        raise named(error, [context], 0) from None


# ---- the verbs -----------------------------------------------------------------------------------

@cython.no_gc_clear  # what dies with a manager may still ask
cdef class ReservingEngine(EngineParts):
    """Reserve pages for requests, and tell what that would do."""

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
