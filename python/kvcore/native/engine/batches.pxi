# SPDX-License-Identifier: Apache-2.0
"""The contexts of a call, and the walk from them to the requests that C++ reads."""


# The requests of a call: pointers into contexts, or to the views of foreign contexts.
cdef struct Batch:
    vector[RequestView*] rows
    vector[RequestView] foreign
    vector[RequestView] given  # the views of `foreign` with the indices that the contexts have
    uint64_t epoch  # contexts_epoch of the read; 0 if a context is foreign
    bint is_known  # True if it equals the last recorded batch
    Py_ssize_t first_new  # first row whose context may have to be recorded
    Py_ssize_t end_new


@cython.final
@cython.no_gc_clear  # objects destroyed together with a manager may still call it
cdef class BatchReader:
    """Points to the requests of contexts, and stores the batch of the last successful call."""

    cdef ClaimTable claims
    cdef object order  # a kvcore.support.step_order.StepOrder with runtime checks; else None
    cdef vector[RequestView*] last  # the batch of the last successful call
    cdef uint64_t last_epoch

    def __cinit__(self, ClaimTable claims not None):
        self.claims = claims

    cdef RequestView* request_of(self, TextGenerationContext own) except NULL:
        """Return the request of a context, with its present claim."""
        cdef Claim claim
        if not is_claimed(<PyObject*>own, self.claims.manager_uid, self.claims.slots.data()):
            claim = self.claims.claim_of(own.request_id)
            own._request.sequence = claim.sequence
            if own._terms is not None:
                self.claims.tell_terms(own._request.sequence, own._terms)
            if own._past is not None:
                self.claims.native.recall(own._request.sequence, (<Claim>own._past).history)
            self.claims.see(claim, &own._request, own._past is not None)
            if own._keys is not None:
                self.claims.expect_keys()
            elif self.claims.trees.is_keyed:
                require_plain(own._request.tokens, 0, own._request.end)
            own._manager_uid = self.claims.manager_uid
            own._recorded.generation = 0
            change_contexts_epoch()
        return &own._request

    cdef int view_of(self, object context, RequestView* view, list keep) except -1:
        """Fill the view of any context-like object; `keep` holds the objects it points to."""
        cdef Claim claim = self.claims.claim_of(read_foreign(context, view, keep))
        view.sequence = claim.sequence
        if view.end > 0:
            self.claims.see(claim, view, False)
        if type(keep[len(keep) - 1]) is ExtraKeys:
            self.claims.expect_keys()
        elif self.claims.trees.is_keyed:
            require_plain(
                view.tokens, self.claims.native.first_uncached(view.sequence), view.end
            )
        return 0

    cdef list read(self, object batch, Batch* rows, list keep):
        """Point to the requests of a batch; return its contexts as a list that does not change.

        Return the caller's own list if all its contexts store their present claims, because no
        Python code runs during the call. Otherwise return a copy.
        """
        cdef list contexts
        rows.rows.swap(self.last)  # reuse the rows, or at least their memory
        rows.is_known = False
        if type(batch) is list:
            rows.is_known = self.is_last(<list>batch, rows.rows)
            if rows.is_known or self.read_own(<list>batch, rows):
                rows.epoch = contexts_epoch
                return <list>batch
        contexts = list(batch)
        self.look_up(contexts, rows, keep)
        return contexts

    cdef int look_up(self, list contexts, Batch* rows, list keep) except -1:
        """Point to contexts of any class; their Python code may run and change earlier rows."""
        cdef size_t i
        cdef PyObject* item
        cdef uint64_t uid = self.claims.manager_uid
        rows.rows.resize(len(contexts))
        rows.foreign.resize(len(contexts))
        for i in range(rows.rows.size()):
            context = contexts[i]
            if isinstance(context, TextGenerationContext):
                rows.rows[i] = self.request_of(<TextGenerationContext>context)
            else:
                self.view_of(context, &rows.foreign[i], keep)
                rows.rows[i] = &rows.foreign[i]
        if uid != self.claims.manager_uid:  # the first extra keys: see expect_keys
            return self.look_up(contexts, rows, keep)
        rows.epoch = 0 if keep else contexts_epoch
        rows.first_new = 0
        rows.end_new = len(contexts)
        # The handle of another manager would point to an arbitrary request of this manager.
        for i in range(rows.rows.size()):
            item = PyList_GET_ITEM(contexts, i)
            if not is_own(item):
                continue
            if not is_claimed(item, self.claims.manager_uid, self.claims.slots.data()):
                raise not_found((<TextGenerationContext>item).request_id)
        return 0

    cdef void remember(self, Batch* rows) noexcept:
        """Store the rows of a batch whose contexts are all recorded."""
        self.last.swap(rows.rows)
        self.last_epoch = rows.epoch

    cdef int record(self, Batch* rows, list contexts, int64_t done) except -1:
        """Record the contexts of the first `done` rows, and store the batch if all are done."""
        cdef Py_ssize_t i
        cdef PyObject* item
        if not rows.is_known:
            for i in range(rows.first_new, min(rows.end_new, done)):
                # The caller may have changed the list since it was read.
                if i >= len(contexts):
                    break
                item = PyList_GET_ITEM(contexts, i)
                if is_own(item) and (
                    &(<TextGenerationContext>item)._request != rows.rows[i]
                    or (<TextGenerationContext>item)._manager_uid != self.claims.manager_uid
                ):
                    break
                if not is_recorded(self.claims, item, rows.rows[i].sequence):
                    self.claims.record(<object>item, rows.rows[i].sequence)
        if rows.is_known or done == <int64_t>rows.rows.size():
            self.remember(rows)
        return 0

    cdef bint is_known(self, object batch) noexcept:
        """Return True for the last batch, if none of its contexts began to wait for pages since."""
        return type(batch) is list and self.is_last(<list>batch, self.last)

    cdef bint is_last(self, list batch, const vector[RequestView*]& last) noexcept:
        """Return True for the batch that was read last; usual for the calls of one step."""
        return self.last_epoch == contexts_epoch and self.is_as_read(batch, last)

    cdef bint is_as_read(self, list batch, const vector[RequestView*]& read) noexcept:
        """Return True if `read` has the requests of the contexts in a list, in the same order."""
        cdef Py_ssize_t n = len(batch)
        cdef Py_ssize_t i
        if n != <Py_ssize_t>read.size():
            return False
        for i in range(n):
            if &(<TextGenerationContext>PyList_GET_ITEM(batch, i))._request != read[i]:
                return False
        return True

    cdef bint read_own(self, list batch, Batch* rows) except -1:
        """Point to the requests of a batch; return False, with incomplete rows, if that fails.

        It fails if a context has another class. For a context that does not store its present
        claim, the lookup may run Python code of the id, which may change anything; it also fails
        if this code has changed the rows.
        """
        cdef Py_ssize_t n = len(batch)
        cdef Py_ssize_t i
        cdef PyObject* item
        cdef uint64_t uid = self.claims.manager_uid
        cdef uint64_t before = contexts_epoch
        cdef uint64_t epoch = before
        cdef const ClaimSlot* slots = self.claims.slots.data()
        rows.rows.resize(n)
        cdef RequestView** requests = rows.rows.data()
        rows.first_new = rows.end_new = 0
        for i in range(n):
            if i >= len(batch):
                return False
            item = PyList_GET_ITEM(batch, i)
            if not is_own(item):
                return False
            if i + AHEAD < len(batch):
                prefetch_context(PyList_GET_ITEM(batch, i + AHEAD))
            if not is_claimed(item, uid, slots):
                context = <object>item
                self.request_of(<TextGenerationContext>context)
                slots = self.claims.slots.data()
                epoch += 1
            requests[i] = &(<TextGenerationContext>item)._request
            if not is_recorded(self.claims, item, requests[i].sequence):
                if rows.end_new == 0:
                    rows.first_new = i
                rows.end_new = i + 1
        if uid != self.claims.manager_uid:
            return False
        return epoch == before or (epoch == contexts_epoch and self.is_as_read(batch, rows.rows))
