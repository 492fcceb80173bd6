# SPDX-License-Identifier: Apache-2.0
# Reserving pages for one request, or for as many of a batch as fit; and asking what that would do.

# Above this many tokens to compare or copy, other Python threads run meanwhile.
cdef int64_t RELEASE_GIL_TOKENS = 8192


cdef class Reservations(Forks):
    """What a manager does to give requests their pages."""

    def maybe_reserve(self, data, num_steps=1):
        """Reuse the cached prefix of a request and allocate the pages that its next steps need.

        Parameters
        ----------
        data : context
            Its ``start_idx`` moves to the end of the prefix found, ``active_idx`` behind it.
        num_steps : int
            Steps to run before the next reservation.

        Returns
        -------
        bool
            False when the pages do not fit; then nothing has changed.

        Raises
        ------
        CapacityError
            The request can never fit: larger than the pool or than ``max_seq_len``.
        RequestNotFoundError, ValueError

        Notes
        -----
        Costs the comparison of the prompt with the cache plus O(pages added). Idempotent.
        """
        cdef int64_t steps = as_int(num_steps, "num_steps")
        cdef RequestView foreign
        cdef RequestView given
        cdef RequestView* request = &foreign
        cdef Transfers transfers
        cdef ReserveStatus status
        cdef list keep = []
        cdef object buffer
        listen(self)
        if type(data) is TextGenerationContext:
            request = self._own(<TextGenerationContext>data)
        else:
            self._foreign_view(data, request, keep)
            self._check_settable(data)
            given = foreign
        cdef SequenceHandle sequence = request.sequence
        try:
            while True:
                if request is not &foreign:
                    buffer = (<TextGenerationContext>data)._buffer  # kept while others run
                if request.end - request.start > RELEASE_GIL_TOKENS:
                    with nogil:
                        status = self._native.reserve(
                            request[0], steps, self._room_for(&transfers)
                        )
                else:
                    status = self._native.reserve(request[0], steps, self._room_for(&transfers))
                if status != ReserveStatus.kPending:
                    break
                self._settle_owed(request.sequence)
        except ValueError as error:
            raise named(error, [data]) from None
        if status != ReserveStatus.kOk:
            return False
        if transfers.ticket != 0:
            self._settle(&transfers, &request, None)
        if not is_recorded(self, <PyObject*>data, sequence):
            self._record(data, sequence)
        if request is &foreign:
            self._write_back(data, foreign, given)
        self._check()
        return True

    reserve = maybe_reserve

    def maybe_reserve_batch(self, batch, num_steps=1):
        """Reserve contexts in order up to the first that does not fit; answer how many.

        Every error is raised before anything is reserved.
        """
        cdef int64_t steps = as_int(num_steps, "num_steps")
        cdef list contexts
        cdef Batch requests
        cdef Transfers transfers
        cdef BatchReserve answer
        cdef list keep = []
        cdef int64_t done = 0
        listen(self)
        contexts = self._read(batch, &requests, keep)
        cdef int64_t n = requests.rows.size()
        if keep:
            self._expect_moves(contexts, &requests)
        while True:
            transfers.clear()
            try:
                answer = self._native.reserve_batch(
                    RequestBatch(requests.rows.data() + done, n - done), steps,
                    self._room_for(&transfers),
                )
            except ValueError as error:
                raise named(error, contexts[done:]) from None
            if transfers.ticket != 0:
                contexts = self._settle(&transfers, requests.rows.data() + done, contexts)
            if keep:
                self._write_back_foreign(contexts, &requests)
            done += answer.reserved
            if answer.status != ReserveStatus.kPending:
                break
            contexts = contexts[:]  # the caller's list may change while this one waits
            if answer.reserved == 0:
                self._settle_owed(requests.rows[done].sequence)
        self._keep(&requests, contexts, done)
        self._check()
        return done

    def plan(self, ctx, num_steps=1):
        """Tell what ``maybe_reserve`` would do now; changes nothing, not even recency.

        Returns
        -------
        ReservePlan
            ``fits=False`` also for a request that can never fit.
        """
        cdef int64_t steps = as_int(num_steps, "num_steps")
        cdef RequestView foreign
        cdef RequestView* request = &foreign
        cdef list keep = []
        listen(self)
        if type(ctx) is TextGenerationContext:
            request = self._own(<TextGenerationContext>ctx)
        else:
            self._foreign_view(ctx, request, keep)
        try:
            plan = self._native.plan(request[0], steps)
        except ValueError as error:
            raise named(error, [ctx]) from None
        return ReservePlan(
            hit_tokens=plan.hit_tokens, new_pages=plan.new_pages,
            evicted_pages=plan.evicted_pages, copied_tokens=plan.copied_tokens, fits=plan.fits,
        )

    cdef int _expect_moves(self, list contexts, Batch* requests) except -1:
        """Note where foreign contexts stand, before anything is reserved for them."""
        for context in contexts:
            self._check_settable(context)
        requests.given = requests.foreign
        return 0

    cdef int _write_back_foreign(self, list contexts, Batch* requests) except -1:
        """Move the indices of foreign contexts to where their requests now stand.

        Where a setter raises, that request and those behind it are as if just claimed.
        """
        cdef size_t i
        cdef size_t k
        for i in range(requests.rows.size()):
            if requests.rows[i] != &requests.foreign[i]:
                continue
            try:
                self._write_back(contexts[i], requests.foreign[i], requests.given[i])
            except BaseException:
                for k in range(i + 1, requests.rows.size()):
                    if has_moved(requests.foreign[k], requests.given[k]):
                        self._take_back(&requests.foreign[k])
                raise
            requests.given[i] = requests.foreign[i]
        return 0
