# SPDX-License-Identifier: Apache-2.0
"""The work between two native calls: copies of pages, and waits for copies.

Pages are copied within the pools, and between the pools and the host tier. Each group of copies has
a ticket of C++.
"""


# The result of an attempt.
cdef enum:
    DONE
    AGAIN  # attempt the rest, or attempt with larger buffers
    WAIT  # wait for copies into the pages of `waits_for`


cdef class Settler


cdef struct Call


# Calls C++ once. `own` is an object of the calling method, or its only context.
ctypedef int (*Attempt)(Settler settler, Call* call, object own) except -1

# Adds the request id to an error of C++.
ctypedef object (*Explain)(object error, list contexts, Call* call, object own)


# A native call and the state of its attempts.
cdef struct Call:
    Explain explain  # NULL if the attempt names the request in errors itself
    RequestView** rows
    int64_t n
    int64_t steps
    const ReserveOptions* options  # used only by `reserve`
    int64_t first  # first row of the last attempt
    int64_t done  # number of leading rows that are done
    SequenceHandle waits_for
    RequestView* foreign  # views of foreign contexts, to which rows point; NULL without them
    RequestView* given  # the same views with the indices that the contexts have
    Transfers transfers  # copies that the last attempt requested


# Initialise a call without foreign contexts.
cdef inline void begin_call(
    Call* call, Explain explain, RequestView** rows, int64_t n, int64_t steps
) noexcept:
    call.explain = explain
    call.rows = rows
    call.n = n
    call.steps = steps
    call.first = call.done = 0
    call.foreign = call.given = NULL


# Where a call puts the copies to run; NULL without a pool, so that take_copies lists them.
cdef inline Transfers* room_for(Settler settler, Call* call) noexcept nogil:
    return &call.transfers if settler.copies_itself else NULL


# The same for calls that copy only states.
cdef inline Transfers* room_for_states(Settler settler, Transfers* transfers) noexcept:
    return transfers if settler.states is not None else NULL


# Copies of at least this many bytes release the GIL.
cdef int64_t RELEASE_GIL_BYTES = 65536


cdef object name_row(object error, list contexts, Call* call, object own):
    """Return the same error with the request id of its row before its text."""
    return named(error, contexts, call.first)


cdef int expect_moves(list contexts, Batch* requests, Call* call) except -1:
    """Record the indices of foreign contexts, before anything is reserved for them."""
    for context in contexts:
        check_settable(context)
    requests.given = requests.foreign
    call.foreign = requests.foreign.data()
    call.given = requests.given.data()
    return 0


cdef int wait_for_row(Call* call, object error) except -1:
    """Set `waits_for` to the request of the error's row, if it has a row; return WAIT."""
    cdef object row = getattr(error, "row", None)
    if row is not None and call.n > 0:
        call.waits_for = call.rows[call.first + <int64_t>row].sequence
    return WAIT


@cython.final
@cython.no_gc_clear  # objects destroyed together with a manager may still call it
cdef class Settler:
    """Runs native calls and the copies that they request.

    Parameters
    ----------
    core : CacheCore
    copier : kvcore.backends.protocol.Copier, or None
        None without a pool: the manager's caller copies.
    mover : kvcore.backends.protocol.Mover, or None
        None without a host tier.
    """

    cdef CacheCore core  # owns `native`
    cdef CacheManager* native
    cdef bint copies_itself
    cdef CppPageCopier* native_copier  # of `copier` if its class is kvcore._core.PageCopier
    cdef object copier
    cdef object mover
    cdef object below  # the stores below the host tier, see _set_below; None without
    cdef object store_reader  # a StoreReader if there is `below`; else None
    cdef object onload  # an Onload if requests wait for loads; else None
    cdef object states  # kvcore.pools.StateArrays; None without arrays of states
    cdef int32_t num_bundles  # bundles of layers, each with its own pages

    def __cinit__(self, CacheCore core not None, object copier, object mover):
        self.core = core
        self.native = core.manager
        self.mover = mover
        self.copies_itself = copier is not None
        self.copier = copier
        self.native_copier = NULL
        if type(copier) is PageCopier:
            self.native_copier = <CppPageCopier*>PyCapsule_GetPointer(
                copier._capsule(), "kvcore.PageCopier"
            )

    cdef list carry_out(self, Attempt attempt, Call* call, list contexts, object own):
        """Attempt a call until it is done. `own` is as for Attempt.

        Between attempts, run the copies that the call has requested, or wait for other copies into
        its pages: C++ reports this by a status or by PendingTransfersError. `call.rows` point into
        `contexts`. If other threads may have run, they may have changed the caller's list, so the
        method returns a copy of it that keeps the contexts alive.
        """
        cdef int answer
        while True:
            try:
                answer = attempt(self, call, own)
            except PendingTransfersError as error:
                if call.explain == NULL:
                    raise
                answer = wait_for_row(call, error)
            except ValueError as error:
                if call.explain == NULL:
                    raise
                raise call.explain(error, contexts, call, own) from None
            if unlikely(call.transfers.ticket != 0):
                contexts = self.settle(&call.transfers, call.rows + call.first, contexts)
            if unlikely(call.foreign != NULL):
                self.write_back_all(call, contexts)
            if answer == DONE:
                return contexts
            if contexts is not None:
                contexts = contexts[:]
            if answer == WAIT and call.transfers.ticket == 0:
                self.settle_owed(call.waits_for)
            call.transfers.clear()

    cdef list settle(self, Transfers* transfers, RequestView** rows, list contexts):
        """Run the copies that a call has requested, and report the result to C++.

        `rows` point into `contexts`. The method returns a copy of the list that keeps the contexts
        alive, since other threads may change the caller's list during the copies. If a copy fails,
        the method undoes the reservations of the requests that the call has moved, and restores
        their indices, except for requests that another call has changed since.
        """
        cdef vector[RequestView] left  # the moved requests, as the call left them
        cdef RequestView* row
        cdef list kept = None
        cdef size_t i
        try:
            if contexts is not None:
                kept = contexts[:]
            for i in range(transfers.moved.size()):
                left.push_back(rows[transfers.moved[i].row][0])
            self.perform(transfers)
        except BaseException:  # includes KeyboardInterrupt
            self.native.finish(transfers.ticket, False)
            for i in range(transfers.moved.size()):
                row = rows[transfers.moved[i].row]
                self.set_back(row, &left[i] if i < left.size() else row, &transfers.moved[i])
            raise
        self.native.finish(transfers.ticket, True)
        if self.below is not None and (
            transfers.tier_moves.size() != 0 or transfers.state_moves.size() != 0
        ):
            self.below.arrived()
        return kept

    cdef int perform(self, Transfers* transfers) except -1:
        """Run copies; other threads may run during them."""
        cdef const PageMove* copies = transfers.copies.data()
        cdef int64_t n = <int64_t>transfers.copies.size()
        if n == 0:
            pass
        elif self.native_copier == NULL:
            self.copier.run(copies_array(transfers.copies))
        elif self.native_copier.bytes_of(copies, n) < RELEASE_GIL_BYTES:
            self.native_copier.run(copies, n)
        else:
            with nogil:
                self.native_copier.run(copies, n)
        if transfers.state_copies.size() != 0:
            self.states.run(state_copies_array(transfers.state_copies))
        if transfers.tier_moves.size() != 0:
            mark = self.mover.run(host_copies_array(transfers.tier_moves))
            if mark:  # a stream reads the pages after this call
                self.native.note_late_reads(
                    transfers.tier_moves.data(), <int64_t>transfers.tier_moves.size(), mark
                )
        if transfers.state_moves.size() != 0:
            self.states.move(host_states_array(transfers.state_moves))
        return 0

    cdef int settle_owed(self, SequenceHandle sequence) except -1:
        """Repeat the failed copies into a request's pages, or wait for those of another thread."""
        cdef Transfers transfers
        cdef OwedStatus status = self.native.take_owed(sequence, transfers)
        if status == OwedStatus.kTaken:
            self.settle(&transfers, NULL, None)
        elif status == OwedStatus.kUnderWay:
            try:
                with nogil:
                    self.native.wait(sequence)
            except RuntimeError as error:  # std::logic_error
                raise PendingTransfersError(
                    f"{error}: the code that copies pages must not use the requests it copies for"
                ) from None
        return 0

    cdef int set_back(
        self, RequestView* request, const RequestView* left, const MovedRequest* before
    ) except -1:
        """Undo a call for one request, unless it was released, run or truncated since."""
        if (
            request.sequence.index != left.sequence.index
            or request.sequence.generation != left.sequence.generation
            or request.start != left.start
        ):
            return 0
        self.take_back(request)
        request.start = before.start
        request.active = min(before.active, request.end)
        return 0

    cdef int take_back(self, const RequestView* request) except -1:
        """Undo a reservation, unless the request is released or another call copies its pages."""
        try:
            self.native.begin_again(request.sequence)
        except (RequestNotFoundError, PendingTransfersError):
            return 0
        return 0

    cdef int write_back_all(self, Call* call, list contexts) except -1:
        """Copy the indices of the requests to their foreign contexts.

        If a setter raises, the reservations of its request and of all later requests are undone.
        """
        cdef int64_t i
        cdef int64_t k
        for i in range(call.n):
            if call.rows[i] != &call.foreign[i]:
                continue
            try:
                self.write_back(contexts[i], call.foreign[i], call.given[i])
            except BaseException:
                for k in range(i + 1, call.n):
                    if has_moved(call.foreign[k], call.given[k]):
                        self.take_back(&call.foreign[k])
                raise
            call.given[i] = call.foreign[i]
        return 0

    cdef int write_back(
        self, object context, const RequestView& now, const RequestView& given
    ) except -1:
        """Copy the indices of a request to its foreign context.

        If a setter raises, the reservation of the request is undone.
        """
        try:
            move_indices(context, now, given)
        except BaseException:
            self.take_back(&now)
            try:
                move_indices(context, given, now)
            except Exception:
                pass  # the first error is raised
            raise
        return 0


# ---- lists of copies, as arrays ------------------------------------------------------------------


cdef cnp.ndarray int32_rows(int64_t n, int64_t columns):
    cdef cnp.npy_intp shape[2]
    shape[0] = n
    shape[1] = columns
    return cnp.PyArray_SimpleNew(2, shape, cnp.NPY_INT32)


cdef cnp.ndarray copies_array(const vector[PageMove]& copies):
    """Return int32 [n, 4]: replica, source page, destination page, tokens."""
    cdef cnp.ndarray out = int32_rows(<int64_t>copies.size(), 4)
    cdef int32_t* data = <int32_t*>cnp.PyArray_DATA(out)
    cdef size_t i
    for i in range(copies.size()):
        data[4 * i] = copies[i].replica
        data[4 * i + 1] = copies[i].source
        data[4 * i + 2] = copies[i].destination
        data[4 * i + 3] = copies[i].num_tokens
    return out


cdef cnp.ndarray state_copies_array(const vector[StateMove]& copies):
    """Return int32 [n, 3]: replica, source slot, destination slot."""
    cdef cnp.ndarray out = int32_rows(<int64_t>copies.size(), 3)
    cdef int32_t* data = <int32_t*>cnp.PyArray_DATA(out)
    cdef size_t i
    for i in range(copies.size()):
        data[3 * i] = copies[i].replica
        data[3 * i + 1] = copies[i].source
        data[3 * i + 2] = copies[i].destination
    return out


cdef cnp.ndarray grouped_copies_array(const vector[StateMove]& copies, int32_t num_groups):
    """Return int32 [n * groups, 4]: replica, group, source slot, destination slot."""
    cdef cnp.ndarray out = int32_rows(<int64_t>copies.size() * num_groups, 4)
    cdef int32_t* data = <int32_t*>cnp.PyArray_DATA(out)
    cdef int32_t group
    cdef size_t i
    for i in range(copies.size()):
        for group in range(num_groups):
            data[0] = copies[i].replica
            data[1] = group
            data[2] = copies[i].source
            data[3] = copies[i].destination
            data += 4
    return out


cdef cnp.ndarray host_copies_array(const vector[PageMove]& moves):
    """Return int32 [n, 4]: replica, direction, page of the device, page of the host.

    Direction 0 copies to the host, 1 copies to the device.
    """
    cdef cnp.ndarray out = int32_rows(<int64_t>moves.size(), 4)
    cdef int32_t* data = <int32_t*>cnp.PyArray_DATA(out)
    cdef size_t i
    for i in range(moves.size()):
        data[4 * i] = moves[i].replica
        data[4 * i + 1] = moves[i].is_load()
        data[4 * i + 2] = moves[i].page_in(Tier.kDevice)
        data[4 * i + 3] = moves[i].page_in(Tier.kHost)
    return out


cdef cnp.ndarray host_states_array(const vector[StateMove]& moves):
    """Return int32 [n, 4] as ``host_copies_array``, with slots of states instead of pages."""
    cdef cnp.ndarray out = int32_rows(<int64_t>moves.size(), 4)
    cdef int32_t* data = <int32_t*>cnp.PyArray_DATA(out)
    cdef size_t i
    for i in range(moves.size()):
        data[4 * i] = moves[i].replica
        data[4 * i + 1] = moves[i].is_load()
        data[4 * i + 2] = moves[i].slot_in(Tier.kDevice)
        data[4 * i + 3] = moves[i].slot_in(Tier.kHost)
    return out
