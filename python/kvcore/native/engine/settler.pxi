# SPDX-License-Identifier: Apache-2.0
"""What lies between two native calls: pages that are copied, and that are waited for.

Pages are copied within the pools and between them and the host tier, under tickets of C++.
"""


# What an attempt says.
cdef enum:
    DONE
    AGAIN  # with what is left, or with more room
    WAIT  # for what is copied into the pages of `waits_for`


cdef class Settler


cdef struct Call


# Calls C++ once; `own` is the verb's, or its one context.
ctypedef int (*Attempt)(Settler settler, Call* call, object own) except -1

# Makes an error of C++ name the request it is about.
ctypedef object (*Explain)(object error, list contexts, Call* call, object own)


# A native call, as often as it is attempted.
cdef struct Call:
    Explain explain  # NULL where the attempt answers for errors itself
    RequestView** rows
    int64_t n
    int64_t steps
    const ReserveOptions* options  # of `reserve` alone
    int64_t first  # row that the last attempt began with
    int64_t done  # rows, in order
    SequenceHandle waits_for
    RequestView* foreign  # views that rows point to; NULL where no context moves by itself
    RequestView* given  # these, as their contexts know them
    Transfers transfers  # that the last attempt gave out


# Of no foreign contexts; nothing is attempted yet.
cdef inline void begin_call(
    Call* call, Explain explain, RequestView** rows, int64_t n, int64_t steps
) noexcept:
    call.explain = explain
    call.rows = rows
    call.n = n
    call.steps = steps
    call.first = call.done = 0
    call.foreign = call.given = NULL


# Where a call puts what is to be copied; without a pool, on the list of take_copies.
cdef inline Transfers* room_for(Settler settler, Call* call) noexcept nogil:
    return &call.transfers if settler.copies_itself else NULL


# The same of calls that copy nothing but states.
cdef inline Transfers* room_for_states(Settler settler, Transfers* transfers) noexcept:
    return transfers if settler.states is not None else NULL


# From so many bytes on, other Python threads run while pages are copied.
cdef int64_t RELEASE_GIL_BYTES = 65536


cdef object name_row(object error, list contexts, Call* call, object own):
    """The same error with the request of its row in front."""
    return named(error, contexts, call.first)


cdef int expect_moves(list contexts, Batch* requests, Call* call) except -1:
    """Note where foreign contexts stand, before anything is reserved for them."""
    for context in contexts:
        check_settable(context)
    requests.given = requests.foreign
    call.foreign = requests.foreign.data()
    call.given = requests.given.data()
    return 0


cdef int wait_for_row(Call* call, object error) except -1:
    """Wait for the request of the row that an error names, or for what the call waits for."""
    cdef object row = getattr(error, "row", None)
    if row is not None and call.n > 0:
        call.waits_for = call.rows[call.first + <int64_t>row].sequence
    return WAIT


@cython.final
@cython.no_gc_clear  # what dies with a manager may still ask
cdef class Settler:
    """Carry calls out, with what they leave to be copied.

    Parameters
    ----------
    core : CacheManager
    copier : kvcore.backends.protocol.Copier, or None
        None without a pool: then the manager's caller copies.
    mover : kvcore.backends.protocol.Mover, or None
        None without a host tier.
    """

    cdef object core  # whose manager `native` is
    cdef CacheManager* native
    cdef bint copies_itself
    cdef CppPageCopier* native_copier  # of `copier`, where that is the library's own
    cdef object copier
    cdef object mover
    cdef object below  # asks stores below the host tier, see set_below; None without
    cdef object store_side  # a StoreSide, where there is `below`
    cdef object states  # kvcore.states.StateArrays; None without arrays of states
    cdef int32_t num_bundles  # of layers, each with pages of its own

    def __cinit__(self, object core, object copier, object mover):
        self.core = core
        self.native = <CacheManager*>PyCapsule_GetPointer(core._capsule(), "kvcore.CacheManager")
        self.set_copier(copier)
        self.mover = mover

    cdef int set_copier(self, object copier) except -1:
        self.copies_itself = copier is not None
        self.copier = copier
        self.native_copier = NULL
        if type(copier) is PageCopier:
            self.native_copier = <CppPageCopier*>PyCapsule_GetPointer(
                copier._capsule(), "kvcore.PageCopier"
            )
        return 0

    cdef list carry_out(self, Attempt attempt, Call* call, list contexts, object own):
        """Attempt a call until nothing is left to do; `own` is the verb's, or its one context.

        In between it copies what the call has given out, or waits for what others copy into its
        pages: C++ asks for that by a status, or by PendingTransfersError. `call.rows` point into
        `contexts`, of which it returns a copy that keeps them once other threads may have run: they
        may change the caller's list.
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
            if call.transfers.ticket != 0:
                contexts = self.settle(&call.transfers, call.rows + call.first, contexts)
            if call.foreign != NULL:
                self.write_back_all(call, contexts)
            if answer == DONE:
                return contexts
            if contexts is not None:
                contexts = contexts[:]
            if answer == WAIT and call.transfers.ticket == 0:
                self.settle_owed(call.waits_for)
            call.transfers.clear()

    cdef list settle(self, Transfers* transfers, RequestView** rows, list contexts):
        """Do what a call has given out, and say how it went.

        `rows` point into `contexts`, of which it returns a copy that keeps them: other threads may
        change the caller's list meanwhile. Where it fails, the requests that the call has moved,
        and nobody since, are as if they had just been claimed and stand where they stood before.
        """
        cdef vector[RequestView] left  # where the call left the requests that it has moved
        cdef RequestView* row
        cdef list kept = None
        cdef size_t i
        try:
            if contexts is not None:
                kept = contexts[:]
            for i in range(transfers.moved.size()):
                left.push_back(rows[transfers.moved[i].row][0])
            self.perform(transfers)
        except BaseException:  # an interrupt too
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
        """Copy, while other threads may run."""
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
            if mark:  # a stream reads the pages later
                self.native.note_late_reads(
                    transfers.tier_moves.data(), <int64_t>transfers.tier_moves.size(), mark
                )
        if transfers.state_moves.size() != 0:
            self.states.move(host_states_array(transfers.state_moves))
        return 0

    cdef int settle_owed(self, SequenceHandle sequence) except -1:
        """Do the copies that a request is owed since they failed, or wait for another thread's."""
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
        """Undo what a call did to a request, unless somebody has released, run or cut it since."""
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
        """Undo a reservation, unless the request is gone or in other hands by now."""
        try:
            self.native.begin_again(request.sequence)
        except (RequestNotFoundError, PendingTransfersError):
            return 0
        return 0

    cdef int write_back_all(self, Call* call, list contexts) except -1:
        """Move the indices of foreign contexts to where their requests now stand.

        Where a setter raises, that request and those behind it are as if just claimed.
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
        """Move the indices of a foreign context to where its request now stands.

        Where a setter raises, the request is as if it had just been claimed.
        """
        try:
            move_indices(context, now, given)
        except BaseException:
            self.take_back(&now)
            try:
                move_indices(context, given, now)
            except Exception:
                pass  # what is raised is the first error
            raise
        return 0


# ---- orders of copies, as arrays -----------------------------------------------------------------


cdef cnp.ndarray int32_rows(int64_t n, int64_t columns):
    cdef cnp.npy_intp shape[2]
    shape[0] = n
    shape[1] = columns
    return cnp.PyArray_SimpleNew(2, shape, cnp.NPY_INT32)


cdef cnp.ndarray copies_array(const vector[PageMove]& copies):
    """int32 [n, 4]: replica, source page, destination page, tokens."""
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
    """int32 [n, 3]: replica, source slot, destination slot."""
    cdef cnp.ndarray out = int32_rows(<int64_t>copies.size(), 3)
    cdef int32_t* data = <int32_t*>cnp.PyArray_DATA(out)
    cdef size_t i
    for i in range(copies.size()):
        data[3 * i] = copies[i].replica
        data[3 * i + 1] = copies[i].source
        data[3 * i + 2] = copies[i].destination
    return out


cdef cnp.ndarray grouped_copies_array(const vector[StateMove]& copies, int32_t num_groups):
    """int32 [n * groups, 4]: replica, group, source slot, destination slot."""
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
    """int32 [n, 4]: replica, direction (0: to the host, 1: back), page there, page of the host."""
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
    """The same of slots of states."""
    cdef cnp.ndarray out = int32_rows(<int64_t>moves.size(), 4)
    cdef int32_t* data = <int32_t*>cnp.PyArray_DATA(out)
    cdef size_t i
    for i in range(moves.size()):
        data[4 * i] = moves[i].replica
        data[4 * i + 1] = moves[i].is_load()
        data[4 * i + 2] = moves[i].slot_in(Tier.kDevice)
        data[4 * i + 3] = moves[i].slot_in(Tier.kHost)
    return out
