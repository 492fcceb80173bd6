# SPDX-License-Identifier: Apache-2.0
"""What moving a request out of a manager, and into one, asks of it."""


class Mark(NamedTuple):
    """What a request has written, and in which pages.

    Attributes
    ----------
    written : int
        Tokens, as of the last ``step``.
    slot : int
        Of its state; -1 without.
    stands_at : int
        The token that its state is that of; -1 while it runs further.
    replica : int
    stamp : tuple
        Another one where pages were replaced, dropped or left, or the claim is another.
    context : object
        That it was used with last; None where it was claimed alone.
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


cdef object name_begun(object error, list contexts, Call* call, object context):
    return named(error, [context], 0)


def begin_at(StepEngine engine not None, context, n, bytes name_space=None):
    """Have a claimed request, which has no pages yet, go on behind tokens that the caller brings.

    Parameters
    ----------
    engine : StepEngine
    context : context
        Its ``start_idx`` moves to `n`, ``active_idx`` behind it.
    n : int
        Tokens whose K, V and state the caller writes before the next ``step``.
    name_space : bytes, optional
        Where pages are cached in place of the context's own namespace.

    Returns
    -------
    bool
        False when the pages do not fit; then nothing has changed.
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
    begin_call(&begun.call, name_begun, &row, 1, 1)
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
