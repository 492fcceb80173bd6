# SPDX-License-Identifier: Apache-2.0
"""Fork, truncate, release of windows, and the search for shared prefixes."""


cdef object fork_error(object error, object parent_id, list claims):
    """Return the same error with the request id before its text; row -1 is the parent."""
    cdef object row = getattr(error, "row", None)
    if isinstance(error, CapacityError) or row == -1:
        return about(error, parent_id)
    return error if row is None else about(error, (<Claim>claims[<int64_t>row]).request_id)


cdef int64_t common_start(TextGenerationContext parent, TextGenerationContext child) noexcept:
    """Return the number of leading child tokens equal to the written tokens of the parent."""
    cdef const int32_t* a = <const int32_t*>cnp.PyArray_DATA(parent._buffer)
    cdef const int32_t* b = <const int32_t*>cnp.PyArray_DATA(child._buffer)
    cdef int64_t n = 0
    while n < min(parent._request.start, child._request.end) and a[n] == b[n]:
        n += 1
    return n


@cython.final
cdef class Fork:
    """A call of fork: claims either all children of a request or no child."""

    cdef ClaimTable table
    cdef Settler settler
    cdef Transfers transfers  # copies of states
    cdef object parent_id
    cdef list children
    cdef vector[bint] keyed  # True for children with extra keys
    cdef list heirs  # children that inherited extra keys of the parent

    cdef bint attempt(self) except -1:
        """Try the fork; return False, and change nothing, if copies into parent pages are pending.

        A pending copy is in flight, or has failed and must be repeated.
        """
        cdef RequestView view
        cdef Batch requests
        cdef list keep = []
        cdef list claims = self.describe_children(&requests, keep)
        cdef Claim parent = self.table.claim_of(self.parent_id)
        cdef size_t i
        if not self.children:
            return True
        self.read_parent(parent, &view, keep)
        self.heirs = []
        try:
            self.inherit_keys(parent)
            self.expect_keys(&requests)
            self.insert_all(claims)
            # No Python code runs from here to the call, so the pointers of the views stay valid.
            if isinstance(parent.context, TextGenerationContext):
                view = (<TextGenerationContext>parent.context)._request
            view.sequence = parent.sequence
            if view.tokens == NULL:
                view.name_space = requests.rows[0].name_space
            for i in range(requests.rows.size()):
                requests.given[i] = requests.rows[i][0]
            self.table.native.fork(
                view, RequestBatch(requests.rows.data(), <int64_t>requests.rows.size()),
                room_for_states(self.settler, &self.transfers),
            )
        except BaseException as error:
            self.disinherit()
            for claim in claims:
                self.table.drop(claim)
            if isinstance(error, PendingTransfersError):
                return False
            raise fork_error(error, self.parent_id, claims) from None
        try:
            self.adopt(claims, &requests, parent.replica)
            if self.transfers.ticket != 0:
                self.copy_states()
        except BaseException:
            if self.transfers.ticket != 0:
                self.table.native.finish(self.transfers.ticket, False)
            self.disown(claims, &requests)
            self.disinherit()
            raise
        return True

    cdef int copy_states(self) except -1:
        """Copy the state of the parent to each child."""
        self.settler.perform(&self.transfers)
        self.table.native.finish(self.transfers.ticket, True)
        self.transfers.clear()
        return 0

    cdef list describe_children(self, Batch* requests, list keep):
        """Check the children without the parent; return their new claims."""
        cdef list claims = []
        cdef size_t i
        requests.rows.resize(len(self.children))
        requests.foreign.resize(len(self.children))
        self.keyed.resize(len(self.children))
        for i in range(requests.rows.size()):
            context = self.children[i]
            if isinstance(context, TextGenerationContext):
                requests.rows[i] = &(<TextGenerationContext>context)._request
                claims.append(new_claim((<TextGenerationContext>context).request_id))
                self.keyed[i] = (<TextGenerationContext>context)._keys is not None
            else:
                requests.rows[i] = &requests.foreign[i]
                claims.append(new_claim(read_foreign(context, requests.rows[i], keep)))
                self.keyed[i] = type(keep[len(keep) - 1]) is ExtraKeys
                check_settable(context)
        requests.given.resize(len(self.children))
        if len(set(claims)) < len(claims):
            names = [(<Claim>claim).request_id for claim in claims]
            raise ValueError(f"the forks {names!r} repeat a request id; name each once")
        return claims

    cdef int read_parent(self, Claim parent, RequestView* view, list keep) except -1:
        """Fill the view of the parent; a claim without a context has no written tokens."""
        cdef object context = parent.context
        if context is None:
            view.active = view.end = 1
        elif not isinstance(context, TextGenerationContext):
            read_foreign(context, view, keep)
        return 0

    cdef int inherit_keys(self, Claim parent) except -1:
        """Give children without extra keys the parent's keys of the shared tokens."""
        cdef TextGenerationContext source
        cdef TextGenerationContext child
        cdef size_t i
        if not isinstance(parent.context, TextGenerationContext):
            return 0
        source = <TextGenerationContext>parent.context
        if source._keys is None:
            return 0
        for i in range(self.keyed.size()):
            if self.keyed[i] or not isinstance(self.children[i], TextGenerationContext):
                continue
            child = <TextGenerationContext>self.children[i]
            keys = keys_in_front(source._keys.keys, common_start(source, child))
            if keys:
                child._show(
                    show_tokens(keys, child._request.tokens, child._request.end, child._capacity)
                )
                self.keyed[i] = True
                self.heirs.append(child)
        return 0

    cdef int disinherit(self) except -1:
        for child in self.heirs:
            (<TextGenerationContext>child)._show(None)
        return 0

    cdef int expect_keys(self, Batch* requests) except -1:
        """Check that no token of a child without extra keys can be mistaken for a stand-in."""
        cdef size_t i
        for i in range(self.keyed.size()):
            if self.keyed[i]:
                self.table.expect_keys()
        for i in range(self.keyed.size()):
            if self.table.trees.is_keyed and not self.keyed[i]:
                require_plain(requests.rows[i].tokens, 0, requests.rows[i].end)
        return 0

    cdef int insert_all(self, list claims) except -1:
        for claim in claims:
            self.table.insert(<Claim>claim, self.table.require_unclaimed(<Claim>claim))
        return 0

    cdef int adopt(self, list claims, Batch* requests, int32_t replica) except -1:
        """Insert the claims of the forks, and set the indices of their contexts."""
        cdef size_t i
        for i in range(requests.rows.size()):
            requests.foreign[i] = requests.rows[i][0]
            self.tell_terms(self.children[i], requests.foreign[i].sequence)
        for i in range(requests.rows.size()):
            (<Claim>claims[i]).replica = replica
            self.table.begin(<Claim>claims[i], requests.foreign[i].sequence)
            self.table.record(self.children[i], requests.foreign[i].sequence)
        change_contexts_epoch()
        for i in range(requests.rows.size()):
            if not isinstance(self.children[i], TextGenerationContext):
                move_indices(self.children[i], requests.foreign[i], requests.given[i])
        for i in range(requests.rows.size()):
            if isinstance(self.children[i], TextGenerationContext):
                (<TextGenerationContext>self.children[i])._manager_uid = self.table.manager_uid
        return 0

    cdef int tell_terms(self, object child, SequenceHandle sequence) except -1:
        cdef TextGenerationContext own
        if isinstance(child, TextGenerationContext):
            own = <TextGenerationContext>child
            if own._terms is not None:
                self.table.tell_terms(sequence, own._terms)
        return 0

    cdef int disown(self, list claims, Batch* requests) except -1:
        """Release all forks after a failed ``adopt``; restore the indices of their contexts."""
        cdef Claim claim
        cdef size_t i
        for i in range(requests.rows.size()):
            claim = <Claim>claims[i]
            try:
                self.table.native.release(requests.foreign[i].sequence)
            except RequestNotFoundError:
                pass  # a setter has released it
            if claim.is_live:
                self.table.end(claim)
            else:
                self.table.drop(claim)
            if isinstance(self.children[i], TextGenerationContext):
                requests.rows[i].start = requests.given[i].start
                requests.rows[i].active = requests.given[i].active
                continue
            try:
                move_indices(self.children[i], requests.given[i], requests.foreign[i])
            except Exception:
                pass  # the first error is raised
        return 0


cdef int fork_once(Settler settler, Call* call, object own) except -1:
    cdef Fork it = <Fork>own
    if it.attempt():
        return DONE
    call.waits_for = it.table.find(it.parent_id)
    return WAIT


cdef int fork_request(
    ClaimTable claims, Settler settler, object parent_id, tuple children
) except -1:
    cdef Fork it = Fork.__new__(Fork)
    cdef Call call
    it.table = claims
    it.settler = settler
    it.parent_id = parent_id
    it.children = list(children)
    begin_call(&call, NULL, NULL, 0, 0)
    settler.carry_out(fork_once, &call, None, it)
    return 0


cdef struct CutCall:
    Call call
    int64_t num_tokens
    int64_t leaves_at


cdef int truncate_once(Settler settler, Call* call, object request_id) except -1:
    settler.native.truncate(
        call.waits_for, (<CutCall*>call).num_tokens, room_for_states(settler, &call.transfers)
    )
    return DONE


cdef object name_cut(object error, list contexts, Call* call, object request_id):
    if isinstance(error, RequestNotFoundError):  # released while this call waited
        return not_found(request_id)
    return ValueError(f"request {request_id!r} {error}")


cdef int truncate_request(
    ClaimTable claims, Settler settler, object request_id, int64_t num_tokens
) except -1:
    cdef CutCall truncate
    begin_call(&truncate.call, name_cut, NULL, 0, 0)
    truncate.call.waits_for = claims.find(request_id)
    truncate.num_tokens = num_tokens
    settler.carry_out(truncate_once, &truncate.call, None, request_id)
    return 0


cdef int accept_tokens(
    ClaimTable claims, Settler settler, object context, int64_t num_tokens
) except -1:
    """Truncate a request and rewind its context; the checks before make the rewind succeed."""
    cdef int64_t end
    request_id = id_of(context)
    if isinstance(context, TextGenerationContext):
        end = (<TextGenerationContext>context)._request.end
    else:
        end = as_int(context.end_idx, "end_idx")
    rewind = context.rewind
    if not 1 <= num_tokens <= end:
        raise ValueError(
            f"request {request_id!r} cannot accept {num_tokens} tokens, must be 1 .. {end}, the "
            f"tokens of its context"
        )
    truncate_request(claims, settler, request_id, num_tokens)
    rewind(num_tokens)
    return 0


cdef int leave_once(Settler settler, Call* call, object request_id) except -1:
    cdef CutCall* leaving = <CutCall*>call
    leaving.leaves_at = settler.native.leave_windows(call.waits_for, leaving.num_tokens)
    return DONE


cdef int64_t leave_windows_of(
    ClaimTable claims, Settler settler, object request_id, int64_t num_tokens
) except -1:
    cdef CutCall leaving
    begin_call(&leaving.call, name_cut, NULL, 0, 0)
    leaving.call.waits_for = claims.find(request_id)
    leaving.num_tokens = num_tokens
    settler.carry_out(leave_once, &leaving.call, None, request_id)
    return leaving.leaves_at


cdef list find_shared_prefixes(BatchReader reader, object batch):
    cdef Batch requests
    cdef list keep = []
    cdef list contexts = reader.read(batch, &requests, keep)
    groups = reader.claims.native.shared_prefixes(
        RequestBatch(requests.rows.data(), <int64_t>requests.rows.size())
    )
    if requests.is_known:
        reader.remember(&requests)
    del contexts  # keeps the rows valid until here
    return [
        SharedPrefix(rows=tuple(group.rows), num_tokens=group.num_tokens, replica=group.replica)
        for group in groups
    ]
