# SPDX-License-Identifier: Apache-2.0
"""Reservations of pages for one request or a batch, and plans of reservations."""


# Calls that compare or copy more tokens than this release the GIL.
cdef int64_t RELEASE_GIL_TOKENS = 8192

# The usual arguments; compared by identity, which saves the conversion.
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
    """Read the options of a reservation. Python code of an int-like argument may run."""
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
    if unlikely(request.end - request.start > RELEASE_GIL_TOKENS):
        with nogil:
            status = settler.native.reserve(
                request[0], call.steps, room_for(settler, call), call.options[0]
            )
    else:
        status = settler.native.reserve(
            request[0], call.steps, room_for(settler, call), call.options[0]
        )
    if unlikely(status == ReserveStatus.kPending):
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
    if unlikely(settler.below is not None):
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
    """Undo a longer prefix hit of a request: restore its indices, and reserve pages for them."""
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


# ---- plans ---------------------------------------------------------------------------------------


cdef int32_t read_unclaimed(
    ClaimTable claims, object context, RequestView* view, list keep
) except -2:
    """Fill the view of an unclaimed request; return the number of its tenant, or -1."""
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
    """Plan an unclaimed request on `replica`, or with -1 on the recommended replica."""
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
