# SPDX-License-Identifier: Apache-2.0
"""The calls of a manager that export a running request and import one."""


class Mark(NamedTuple):
    """The progress of a request and the version of its pages.

    Attributes
    ----------
    written : int
        Number of tokens written as of the last ``step``.
    slot : int
        Slot of the request's state; -1 without a state.
    stands_at : int
        Number of tokens that the state covers; -1 if the request has run further.
    replica : int
    stamp : tuple
        Changes if pages were replaced, dropped or released, or if the request was claimed again.
    context : object
        The context with which the request was used last; None if it was only claimed.
    """

    written: int
    slot: int
    stands_at: int
    replica: int
    stamp: tuple[int, ...]
    context: Any


def mark_of(StepEngine engine not None, request_id):
    """Return the Mark of a claimed request.

    Raises
    ------
    RequestNotFoundError
    """
    require_made(engine)
    cdef Claim claim = engine._claims.claim_of(request_id)
    cdef SequenceHandle sequence = claim.sequence
    cdef object context = claim.context
    with nogil:
        engine._native.wait(sequence)
    cdef SequenceMark mark = engine._native.mark_of(sequence)
    return Mark(
        mark.written, engine._native.state_of(sequence),
        -1 if mark.run > mark.state else mark.state, claim.replica,
        (sequence.index, sequence.generation, mark.written, mark.run, mark.pages, mark.windows),
        context,
    )


cdef struct BeginCall:
    Call call
    int64_t begin


cdef int begin_once(Settler settler, Call* call, object context) except -1:
    cdef RequestView* request = call.rows[0]
    cdef ReserveStatus status = settler.native.begin_at(
        request[0], (<BeginCall*>call).begin, room_for(settler, call)
    )
    if status == ReserveStatus.kPending:
        call.waits_for = request.sequence
        return WAIT
    call.done = status == ReserveStatus.kOk
    return DONE


def begin_at(StepEngine engine not None, context, n, bytes name_space=None):
    """Begin a claimed request without pages after `n` tokens that the caller writes.

    Parameters
    ----------
    engine : StepEngine
    context : context
        The call moves ``start_idx`` to `n`, and ``active_idx`` past it.
    n : int
        Number of tokens whose K, V and state the caller writes before the next ``step``.
    name_space : bytes, optional
        Namespace in which pages are cached, instead of the context's own namespace.

    Returns
    -------
    bool
        False if the pages do not fit; nothing has changed.
    """
    cdef BeginCall begun
    begun.begin = as_int(n, "n")
    cdef RequestView given
    cdef RequestView view
    cdef RequestView* row = &view
    cdef list keep = []
    cdef bint is_own = isinstance(context, TextGenerationContext)
    listen(engine)
    if is_own:
        given = engine._reader.request_of(<TextGenerationContext>context)[0]
    else:
        engine._reader.view_of(context, &given, keep)
        check_settable(context)
    view = given
    if name_space is not None:
        view.name_space = name_view(name_space)
    begin_call(&begun.call, name_alone, &row, 1, 1)
    engine._settler.carry_out(begin_once, &begun.call, None, context)
    if not begun.call.done:
        return False
    if is_own:
        (<TextGenerationContext>context)._request.start = view.start
        (<TextGenerationContext>context)._request.active = view.active
    else:
        move_indices(context, view, given)
    engine._claims.record(context, view.sequence)
    check(engine)
    return True
