# SPDX-License-Identifier: Apache-2.0
# The walk from Python contexts to the requests that C++ reads.


cdef object read_foreign(object context, RequestView* view, list keep):
    """Describe an object like a context, all but its claim; answer its request id."""
    cdef cnp.ndarray tokens
    cdef bytes name
    try:
        request_id = context.request_id
        given = context.tokens
        view.start = as_int(context.start_idx, "start_idx")
        view.active = as_int(context.active_idx, "active_idx")
        view.end = as_int(context.end_idx, "end_idx")
    except AttributeError:
        raise no_context(context) from None
    tokens = as_tokens(given)
    name = namespace_of(
        getattr(context, "extra_key", None), getattr(context, "cache_salt", None)
    )
    keep.append((tokens, name))
    view.tokens = <const int32_t*>cnp.PyArray_DATA(tokens)
    view.name_space = name_view(name)
    if view.end > cnp.PyArray_DIM(tokens, 0):
        raise ValueError(
            f"request {request_id!r} has end_idx {view.end} but "
            f"{cnp.PyArray_DIM(tokens, 0)} tokens; end_idx counts all tokens"
        )
    return request_id


cdef inline bint has_moved(const RequestView& now, const RequestView& given) noexcept:
    return now.start != given.start or now.active != given.active


cdef int move_indices(object context, const RequestView& to, const RequestView& given) except -1:
    """Set the indices of a foreign context that differ; `active_idx` first, which stays behind."""
    if to.active != given.active:
        context.active_idx = to.active
    if to.start != given.start:
        context.start_idx = to.start
    return 0


cdef inline bint is_recorded(
    ClaimTable table, PyObject* item, SequenceHandle sequence
) noexcept:
    """True when this claim of the manager was used with this context last."""
    cdef SequenceHandle recorded
    if is_own(item):
        recorded = (<TextGenerationContext>item)._recorded
        return recorded.index == sequence.index and recorded.generation == sequence.generation
    return (
        sequence.index < table._slots.size()
        and table._slots[sequence.index].context == item
    )


cdef class Batches(ClaimTable):
    """The way from the contexts of a call to C++ requests, and back."""

    cdef RequestView* _own(self, TextGenerationContext own) except NULL:
        """The request of a context, with its present claim."""
        if not is_claimed(<PyObject*>own, self._uid, self._slots.data()):
            own._request.sequence = self._find(own.request_id)
            own._manager_uid = self._uid
            own._recorded.generation = 0
            change_contexts_epoch()
        return &own._request

    cdef int _foreign_view(self, object context, RequestView* view, list keep) except -1:
        """The same of any object like a context; `keep` holds what the view refers to."""
        view.sequence = self._find(read_foreign(context, view, keep))
        return 0

    cdef list _read(self, object batch, Batch* rows, list keep):
        """Point to the requests of a batch; answer its contexts as a list that nothing changes.

        That is the caller's own list when it holds nothing but contexts that know their claims, for
        then no Python code runs during the call; otherwise a copy.
        """
        cdef list contexts
        require_made(self)
        rows.rows.swap(self._last)  # or its memory
        rows.is_known = False
        if type(batch) is list:
            rows.is_known = self._is_last(<list>batch, rows.rows)
            if rows.is_known or self._read_own(<list>batch, rows):
                rows.epoch = contexts_epoch
                return <list>batch
        contexts = list(batch)
        self._look_up(contexts, rows, keep)
        return contexts

    cdef int _look_up(self, list contexts, Batch* rows, list keep) except -1:
        """Point to requests of any class, whose code may run and change whatever was read."""
        cdef size_t i
        cdef PyObject* item
        rows.rows.resize(len(contexts))
        rows.foreign.resize(len(contexts))
        for i in range(rows.rows.size()):
            context = contexts[i]
            if type(context) is TextGenerationContext:
                rows.rows[i] = self._own(<TextGenerationContext>context)
            else:
                self._foreign_view(context, &rows.foreign[i], keep)
                rows.rows[i] = &rows.foreign[i]
        rows.epoch = 0 if keep else contexts_epoch
        rows.first_new = 0
        rows.end_new = len(contexts)
        # Another manager's handle, read as one of this manager, would name any of its requests.
        for i in range(rows.rows.size()):
            item = PyList_GET_ITEM(contexts, i)
            if is_own(item) and not is_claimed(item, self._uid, self._slots.data()):
                raise not_found((<TextGenerationContext>item).request_id)
        return 0

    cdef void _remember(self, Batch* rows) noexcept:
        """Keep what was read of a batch whose contexts are all recorded."""
        self._last.swap(rows.rows)
        self._last_epoch = rows.epoch

    cdef int _keep(self, Batch* rows, list contexts, int64_t done) except -1:
        """Record the contexts of the first `done` rows, and remember the batch."""
        cdef Py_ssize_t i
        cdef PyObject* item
        if not rows.is_known:
            for i in range(rows.first_new, min(rows.end_new, done)):
                # The caller's list may have changed since it was read.
                if i >= len(contexts):
                    break
                item = PyList_GET_ITEM(contexts, i)
                if is_own(item) and (
                    &(<TextGenerationContext>item)._request != rows.rows[i]
                    or (<TextGenerationContext>item)._manager_uid != self._uid
                ):
                    break
                if not is_recorded(self, item, rows.rows[i].sequence):
                    self._record(<object>item, rows.rows[i].sequence)
        if rows.is_known or done == <int64_t>rows.rows.size():
            self._remember(rows)
        return 0

    cdef int _record(self, object context, SequenceHandle sequence) except -1:
        """Note which context a request was used with, for ``fork`` to read.

        Only calls that were done do so: the context of a refused one, or of a question, may hold
        other tokens than the request's pages.
        """
        cdef _Claim claim
        cdef object before
        cdef ClaimSlot* slot
        if self._by_slot is None or sequence.index >= self._slots.size():
            return 0
        slot = &self._slots[sequence.index]
        if slot.generation != sequence.generation:
            return 0
        claim = <_Claim>PyList_GET_ITEM(self._by_slot, sequence.index)
        before, claim.context = claim.context, context
        slot.context = <PyObject*>context
        if type(before) is TextGenerationContext:
            (<TextGenerationContext>before)._recorded.generation = 0
        if type(context) is TextGenerationContext:
            (<TextGenerationContext>context)._recorded = sequence
        if before is not None:
            change_contexts_epoch()  # the batch that was read last may hold it
        return 0  # here `before` may die, and run code of its own

    cdef bint _is_last(self, list batch, const vector[RequestView*]& last) noexcept:
        """True for the batch that was read last, as it is from one call of a step to the next."""
        return self._last_epoch == contexts_epoch and self._is_as_read(batch, last)

    cdef bint _is_as_read(self, list batch, const vector[RequestView*]& read) noexcept:
        """True when the requests that were read are those of the contexts in a list."""
        cdef Py_ssize_t n = len(batch)
        cdef Py_ssize_t i
        if n != <Py_ssize_t>read.size():
            return False
        for i in range(n):
            if &(<TextGenerationContext>PyList_GET_ITEM(batch, i))._request != read[i]:
                return False
        return True

    cdef bint _read_own(self, list batch, Batch* rows) except -1:
        """False, with rows unfinished, when there is a context of another class.

        Where a context has not seen its claim yet, code of the id may run to find it, and change
        anything: also False then, unless all is as it was read.
        """
        cdef Py_ssize_t n = len(batch)
        cdef Py_ssize_t i
        cdef PyObject* item
        cdef uint64_t uid = self._uid
        cdef uint64_t before = contexts_epoch
        cdef uint64_t epoch = before
        cdef const ClaimSlot* slots = self._slots.data()
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
                self._own(<TextGenerationContext>context)
                slots = self._slots.data()
                epoch += 1
            requests[i] = &(<TextGenerationContext>item)._request
            if not is_recorded(self, item, requests[i].sequence):
                if rows.end_new == 0:
                    rows.first_new = i
                rows.end_new = i + 1
        return epoch == before or (epoch == contexts_epoch and self._is_as_read(batch, rows.rows))

    cdef int _check_settable(self, object context) except -1:
        """Raise before anything is reserved for a context whose indices could not be moved."""
        if type(context) is not TextGenerationContext:
            context.start_idx = context.start_idx
            context.active_idx = context.active_idx
        return 0
