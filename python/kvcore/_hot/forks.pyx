# SPDX-License-Identifier: Apache-2.0
# Requests with a common past: fork, truncate, shared_prefixes.


cdef object fork_error(object error, object parent_id, list claims):
    """The same error with the request it is about in front; row -1 is the parent."""
    cdef object row = getattr(error, "row", None)
    if isinstance(error, CapacityError) or row == -1:
        return about(error, parent_id)
    return error if row is None else about(error, (<_Claim>claims[<int64_t>row]).request_id)


cdef class Forks(Copies):
    """What a manager does to requests that begin alike."""

    def fork(self, parent_id, *child_ctxs):
        """Claim requests that go on from what another one has written; copies nothing yet.

        Parameters
        ----------
        parent_id
            A claimed request. Its tokens written as of its last ``step`` are shared.
        *child_ctxs : context
            Not claimed yet; each holds the parent's written tokens and at least one more, in the
            same namespace. Its ``start_idx`` moves behind them, an ``active_idx`` not behind that
            to ``end_idx``.

        Raises
        ------
        RequestNotFoundError, AlreadyClaimedError, CapacityError
        ValueError
            Other tokens or another namespace than the parent's; nothing has been claimed.

        Notes
        -----
        Pages are shared; the one that is written next is copied when parent or child reserves it,
        whichever comes first. Costs O(pages) and one comparison of the tokens per child.
        """
        cdef list children = list(child_ctxs)
        while not self._fork(parent_id, children):
            self._settle_owed(self._find(parent_id))

    cdef bint _fork(self, object parent_id, list children) except -1:
        """False, with nothing done, while copies into the parent's pages are owed or under way."""
        cdef RequestView view
        cdef Batch requests
        cdef list keep = []
        cdef list claims = self._describe_children(children, &requests, keep)
        cdef _Claim parent = self._claim_of(parent_id)
        if not children:
            return True
        self._read_parent(parent, &view, keep)
        cdef size_t i
        try:
            self._insert_all(claims)
            # No code but this runs from here to the call: what the views point to stays.
            if type(parent.context) is TextGenerationContext:
                view = (<TextGenerationContext>parent.context)._request
            view.sequence = parent.sequence
            if view.tokens == NULL:
                view.name_space = requests.rows[0].name_space
            for i in range(requests.rows.size()):
                requests.given[i] = requests.rows[i][0]
            self._native.fork(
                view, RequestBatch(requests.rows.data(), <int64_t>requests.rows.size())
            )
        except BaseException as error:
            for claim in claims:
                self._drop(claim)
            if isinstance(error, PendingTransfersError):
                return False
            raise fork_error(error, parent_id, claims) from None
        try:
            self._adopt(claims, children, &requests, parent.replica)
        except BaseException:
            self._disown(claims, children, &requests)
            raise
        self._check()
        return True

    cdef int _adopt(
        self, list claims, list children, Batch* requests, int32_t replica
    ) except -1:
        """Make forks known by their claims, and have their contexts stand where they begin."""
        cdef size_t i
        for i in range(requests.rows.size()):
            requests.foreign[i] = requests.rows[i][0]
        for i in range(requests.rows.size()):
            (<_Claim>claims[i]).replica = replica
            self._begin(<_Claim>claims[i], requests.foreign[i].sequence)
            self._record(children[i], requests.foreign[i].sequence)
        change_contexts_epoch()
        for i in range(requests.rows.size()):
            if type(children[i]) is not TextGenerationContext:
                move_indices(children[i], requests.foreign[i], requests.given[i])
        for i in range(requests.rows.size()):
            if type(children[i]) is TextGenerationContext:
                (<TextGenerationContext>children[i])._manager_uid = self._uid
        return 0

    cdef int _disown(self, list claims, list children, Batch* requests) except -1:
        """Release forks that could not all be adopted; each stands where it stood before."""
        cdef _Claim claim
        cdef size_t i
        for i in range(requests.rows.size()):
            claim = <_Claim>claims[i]
            try:
                self._native.release(requests.foreign[i].sequence)
            except RequestNotFoundError:
                pass  # a setter has released it
            if claim.is_live:
                self._end(claim)
            else:
                self._drop(claim)
            if type(children[i]) is TextGenerationContext:
                requests.rows[i].start = requests.given[i].start
                requests.rows[i].active = requests.given[i].active
                continue
            try:
                move_indices(children[i], requests.given[i], requests.foreign[i])
            except Exception:
                pass  # what is raised is the first error
        return 0

    cdef int _read_parent(self, _Claim parent, RequestView* view, list keep) except -1:
        """A claim that no context was used with has nothing written, and no tokens."""
        cdef object context = parent.context
        if context is None:
            view.active = view.end = 1
        elif type(context) is not TextGenerationContext:
            read_foreign(context, view, keep)
        return 0

    cdef list _describe_children(self, list children, Batch* requests, list keep):
        """Check what can be wrong with the children by themselves; answer their claims to be."""
        cdef list claims = []
        cdef size_t i
        requests.rows.resize(len(children))
        requests.foreign.resize(len(children))
        for i in range(requests.rows.size()):
            context = children[i]
            if type(context) is TextGenerationContext:
                requests.rows[i] = &(<TextGenerationContext>context)._request
                claims.append(new_claim((<TextGenerationContext>context).request_id))
            else:
                requests.rows[i] = &requests.foreign[i]
                claims.append(new_claim(read_foreign(context, requests.rows[i], keep)))
                self._check_settable(context)
        requests.given.resize(len(children))
        if len(set(claims)) < len(claims):
            names = [(<_Claim>claim).request_id for claim in claims]
            raise ValueError(f"the forks {names!r} repeat a request id; name each once")
        return claims

    cdef int _insert_all(self, list claims) except -1:
        for claim in claims:
            self._insert(<_Claim>claim, self._require_unclaimed(<_Claim>claim))
        return 0

    def truncate(self, request_id, n_tokens):
        """Forget written tokens of a request beyond the first `n_tokens`.

        For draft tokens that were rejected: pages that hold none of the rest are free, those
        reserved ahead as well. Committed pages are never rewritten; the next write into one copies
        it first. Set the context back with ``ctx.rewind(n_tokens)``.

        Raises
        ------
        RequestNotFoundError
        ValueError
            `n_tokens` outside 0 .. the ``active_idx`` that was fetched last.
        """
        cdef int64_t n = as_int(n_tokens, "n_tokens")
        cdef SequenceHandle sequence = self._find(request_id)
        while True:
            try:
                self._native.truncate(sequence, n)
                break
            except PendingTransfersError:
                self._settle_owed(sequence)
            except RequestNotFoundError:  # released while this one waited
                raise not_found(request_id) from None
            except ValueError as error:
                raise ValueError(f"request {request_id!r} {error}") from None
        self._check()

    def shared_prefixes(self, batch):
        """Find the rows of a batch that hold the same leading pages.

        Returns
        -------
        list of SharedPrefix
            Longest first; nested groups are listed each.

        Notes
        -----
        Read off the prefix tree and the pages that forks share: O(batch x runs), no token is
        compared.
        """
        cdef Batch requests
        cdef list keep = []
        self._read(batch, &requests, keep)
        groups = self._native.shared_prefixes(
            RequestBatch(requests.rows.data(), <int64_t>requests.rows.size())
        )
        if requests.is_known:
            self._remember(&requests)
        return [
            SharedPrefix(rows=tuple(group.rows), num_tokens=group.num_tokens, replica=group.replica)
            for group in groups
        ]
