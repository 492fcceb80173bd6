# SPDX-License-Identifier: Apache-2.0
# What a call leaves to be copied: within the pool, and between it and the host tier.

# From so many bytes on, other Python threads run while pages are copied.
cdef int64_t RELEASE_GIL_BYTES = 65536


cdef class Copies(Batches):
    """What a manager with a pool of its own does before a call returns."""

    def __init__(self, object core, *, object copier, object mover, bint runtime_checks,
                 object gpus):
        super().__init__(core, runtime_checks=runtime_checks, gpus=gpus)
        self._set_copier(copier)
        self._mover = mover

    def _set_copier(self, copier):
        """Have pages copied by a ``kvcore.page_copies.Copier``; None without a pool."""
        self._copies_itself = copier is not None
        self._copier = copier
        self._native_copier = NULL
        if type(copier) is PageCopier:
            self._native_copier = <CppPageCopier*>PyCapsule_GetPointer(
                copier._capsule(), "kvcore.PageCopier"
            )

    cdef Transfers* _room_for(self, Transfers* transfers) noexcept nogil:
        """Where a call puts what is to be copied; without a pool, on the list of take_copies."""
        return transfers if self._copies_itself else NULL

    cdef int _perform(self, Transfers* transfers) except -1:
        """Copy, while other threads may run."""
        cdef const PageMove* copies = transfers.copies.data()
        cdef int64_t n = <int64_t>transfers.copies.size()
        if n == 0:
            pass
        elif self._native_copier == NULL:
            self._copier.run(copies_array(transfers.copies))
        elif self._native_copier.bytes_of(copies, n) < RELEASE_GIL_BYTES:
            self._native_copier.run(copies, n)
        else:
            with nogil:
                self._native_copier.run(copies, n)
        if transfers.tier_moves.size() != 0:
            self._mover.run(host_copies_array(transfers.tier_moves))
        return 0

    cdef list _settle(self, Transfers* transfers, RequestView** rows, list contexts):
        """Do what a call has given out, and say how it went.

        `rows` point into `contexts`, of which it answers a copy that keeps them: other threads may
        change the caller's list meanwhile. Where it fails, the requests that the call has moved are
        as if they had just been claimed, and stand where they stood before.
        """
        cdef MovedRequest moved
        cdef list kept = None
        cdef size_t i
        try:
            if contexts is not None:
                kept = contexts[:]
            self._perform(transfers)
        except BaseException:  # an interrupt too
            self._native.finish(transfers.ticket, False)
            for i in range(transfers.moved.size()):
                moved = transfers.moved[i]
                self._take_back(rows[moved.row])
                rows[moved.row].start = moved.start
                rows[moved.row].active = moved.active
            raise
        self._native.finish(transfers.ticket, True)
        return kept

    cdef int _take_back(self, const RequestView* request) except -1:
        """Undo a reservation, unless the request is gone or in other hands by now."""
        try:
            self._native.begin_again(request.sequence)
        except (RequestNotFoundError, PendingTransfersError):
            return 0
        return 0

    cdef int _write_back(
        self, object context, const RequestView& now, const RequestView& given
    ) except -1:
        """Move the indices of a foreign context to where its request now stands.

        Where a setter raises, the request is as if it had just been claimed.
        """
        try:
            move_indices(context, now, given)
        except BaseException:
            self._take_back(&now)
            try:
                move_indices(context, given, now)
            except Exception:
                pass  # what is raised is the first error
            raise
        return 0

    cdef int _settle_owed(self, SequenceHandle sequence) except -1:
        """Do the copies that a request is owed since they failed, or wait for another thread's."""
        cdef Transfers transfers
        cdef OwedStatus status = self._native.take_owed(sequence, transfers)
        if status == OwedStatus.kTaken:
            self._settle(&transfers, NULL, None)
        elif status == OwedStatus.kUnderWay:
            try:
                with nogil:
                    self._native.wait(sequence)
            except RuntimeError as error:  # std::logic_error
                raise PendingTransfersError(
                    f"{error}: the code that copies pages must not use the requests it copies for"
                ) from None
        return 0

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
