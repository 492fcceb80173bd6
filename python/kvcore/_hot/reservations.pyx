# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, autotestdict=False
"""Pages for one request, or for as many of a batch as fit; and what that would do."""

from cpython.ref cimport PyObject
from libc.stdint cimport int64_t

from kvcore._hot.batches cimport Batch, BatchReader
from kvcore._hot.below cimport bring, bring_all
from kvcore._hot.claims cimport is_recorded, named
from kvcore._hot.contexts cimport TextGenerationContext
from kvcore._hot.foreign cimport check_settable
from kvcore._hot.settler cimport (
    DONE,
    WAIT,
    Call,
    Settler,
    begin_call,
    name_row,
    room_for,
)
from kvcore.cpp cimport (
    BatchReserve,
    RequestBatch,
    RequestView,
    ReserveStatus,
    SequenceHandle,
)

from kvcore.plans import ReservePlan

# Above this many tokens to compare or copy, other Python threads run meanwhile.
cdef int64_t RELEASE_GIL_TOKENS = 8192


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
            status = settler.native.reserve(request[0], call.steps, room_for(settler, call))
    else:
        status = settler.native.reserve(request[0], call.steps, room_for(settler, call))
    if status == ReserveStatus.kPending:
        call.waits_for = request.sequence
        return WAIT
    call.done = status == ReserveStatus.kOk
    return DONE


cdef object name_alone(object error, list contexts, Call* call, object context):
    return named(error, [context], 0)


cdef bint reserve(
    BatchReader reader, Settler settler, object context, int64_t steps
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
    cdef SequenceHandle sequence = request.sequence
    if settler.below is not None:
        bring(settler, request, context, False)
    settler.carry_out(reserve_once, &call, contexts, context)
    if not call.done:
        return False
    if not is_recorded(reader.claims, <PyObject*>context, sequence):
        reader.claims.record(context, sequence)
    return True


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


cdef object plan(BatchReader reader, Settler settler, object context, int64_t steps):
    cdef RequestView foreign
    cdef RequestView* request = &foreign
    cdef list keep = []
    if isinstance(context, TextGenerationContext):
        request = reader.request_of(<TextGenerationContext>context)
    else:
        reader.view_of(context, request, keep)
    try:
        found = settler.native.plan(request[0], steps)
    except ValueError as error:
        raise named(error, [context], 0) from None
    return ReservePlan(
        hit_tokens=found.hit_tokens, new_pages=found.new_pages,
        evicted_pages=found.evicted_pages, copied_tokens=found.copied_tokens, fits=found.fits,
        active_idx=None if settler.native.config().states.empty() else found.active,
    )


cdef int expect_moves(list contexts, Batch* requests, Call* call) except -1:
    """Note where foreign contexts stand, before anything is reserved for them."""
    for context in contexts:
        check_settable(context)
    requests.given = requests.foreign
    call.foreign = requests.foreign.data()
    call.given = requests.given.data()
    return 0
