# SPDX-License-Identifier: Apache-2.0
# Requests with a common past: fork, truncate, shared_prefixes.


cdef object fork_error(object error, object parent_id, list claims):
    """The same error with the request it is about in front; row -1 is the parent."""
    cdef object row = getattr(error, "row", None)
    if isinstance(error, CapacityError) or row == -1:
        return about(error, parent_id)
    return error if row is None else about(error, (<_Claim>claims[<int64_t>row]).request_id)


cdef class Forks(ClaimTable):
    """What a claim table does to requests that begin alike."""

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
        cdef RequestView view
        cdef Batch requests
        cdef list children = list(child_ctxs)
        cdef list keep = []
        cdef list claims = self._describe_children(children, &requests, keep)
        cdef _Claim parent = self._claim_of(parent_id)
        if not children:
            return
        self._read_parent(parent, &view, keep)
        try:
            self._insert_all(claims)
            # No code but this runs from here to the call: what the views point to stays.
            if type(parent.context) is TextGenerationContext:
                view = (<TextGenerationContext>parent.context)._request
            view.sequence = parent.sequence
            if view.tokens == NULL:
                view.name_space = requests.rows[0].name_space
            self._native.fork(
                view, RequestBatch(requests.rows.data(), <int64_t>requests.rows.size())
            )
        except BaseException as error:
            for claim in claims:
                self._drop(claim)
            raise fork_error(error, parent_id, claims) from None
        cdef size_t i
        for i in range(requests.rows.size()):
            (<_Claim>claims[i]).replica = parent.replica
            self._begin(<_Claim>claims[i], requests.rows[i].sequence)
            self._record(children[i], requests.rows[i].sequence)
            if type(children[i]) is TextGenerationContext:
                (<TextGenerationContext>children[i])._manager_uid = self._uid
        change_contexts_epoch()
        for i in range(requests.rows.size()):
            if type(children[i]) is not TextGenerationContext:
                self._write_back(children[i], requests.rows[i][0])
        self._check()

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
        try:
            self._native.truncate(sequence, n)
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
