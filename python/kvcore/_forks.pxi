# SPDX-License-Identifier: Apache-2.0
# Requests with a common past: fork, truncate, shared_prefixes.


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
        cdef RequestView parent
        cdef Batch requests
        cdef list children = list(child_ctxs)
        cdef list keep = []
        cdef list names = self._describe_children(children, &requests, keep)
        if not children:
            self._find(parent_id)
            return
        self._describe_parent(parent_id, &parent, keep)
        for name in names:  # now that no Python code runs any more
            self._require_unclaimed(name)
        if parent.tokens == NULL:
            parent.name_space = requests.rows[0].name_space
        try:
            self._native.fork(
                parent, RequestBatch(requests.rows.data(), <int64_t>requests.rows.size())
            )
        except CapacityError as error:
            raise CapacityError(f"request {parent_id!r}: {error}") from None
        except ValueError as error:
            # Row -1 is the parent.
            raise named(error, [*children, self._contexts.get(parent_id)]) from None
        cdef size_t i
        for i in range(requests.rows.size()):
            self._enter(names[i], requests.rows[i].sequence)
            self._contexts[names[i]] = children[i]
        for i in range(requests.rows.size()):
            if type(children[i]) is TextGenerationContext:
                (<TextGenerationContext>children[i])._manager_uid = self._uid
            else:
                self._write_back(children[i], requests.rows[i][0])
        change_contexts_epoch()
        self._check()

    cdef int _describe_parent(self, object parent_id, RequestView* view, list keep) except -1:
        """A claim that no context was used with has nothing written, and no tokens."""
        cdef object context = self._contexts.get(parent_id)
        view.sequence = self._find(parent_id)
        if type(context) is TextGenerationContext:
            view[0] = self._own(<TextGenerationContext>context)[0]
        elif context is not None:
            read_foreign(context, view, keep)
        else:
            view.active = view.end = 1
        return 0

    cdef list _describe_children(self, list children, Batch* requests, list keep):
        """Check what can be wrong with the children by themselves; answer their request ids."""
        cdef list names = []
        cdef size_t i
        requests.rows.resize(len(children))
        requests.foreign.resize(len(children))
        for i in range(requests.rows.size()):
            context = children[i]
            if type(context) is TextGenerationContext:
                requests.rows[i] = &(<TextGenerationContext>context)._request
                names.append((<TextGenerationContext>context).request_id)
            else:
                requests.rows[i] = &requests.foreign[i]
                names.append(read_foreign(context, requests.rows[i], keep))
                self._check_settable(context)
        if len(set(names)) < len(names):
            raise ValueError(f"the forks {names!r} repeat a request id; name each once")
        return names

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
        cdef SequenceHandle sequence = self._find(request_id)
        cdef int64_t n = as_int(n_tokens, "n_tokens")
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
        self._keep(&requests)
        return [
            SharedPrefix(rows=tuple(group.rows), num_tokens=group.num_tokens, replica=group.replica)
            for group in groups
        ]
