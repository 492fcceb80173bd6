# SPDX-License-Identifier: Apache-2.0
"""Claimed requests: the table of claims by request id and by sequence slot."""


# The claim of a sequence slot; generation 0 if the slot has no claim. No code keeps a pointer to a
# ClaimSlot while Python code runs.
cdef struct ClaimSlot:
    uint32_t generation
    PyObject* context  # borrowed; the claim holds the reference


# True if a context stores its present claim with the manager of this id.
cdef inline bint is_claimed(PyObject* item, uint64_t uid, const ClaimSlot* slots) noexcept:
    cdef SequenceHandle sequence = (<TextGenerationContext>item)._request.sequence
    return (
        (<TextGenerationContext>item)._manager_uid == uid
        and slots[sequence.index].generation == sequence.generation
    )


# True if the claim was used last with this context.
cdef inline bint is_recorded(
    ClaimTable table, PyObject* item, SequenceHandle sequence
) noexcept:
    cdef SequenceHandle recorded
    if is_own(item):
        recorded = (<TextGenerationContext>item)._recorded
        return recorded.index == sequence.index and recorded.generation == sequence.generation
    return (
        sequence.index < table.slots.size()
        and table.slots[sequence.index].context == item
    )


# The prompt with which a claim was used first: its length, and tokens at its start and end. They
# distinguish the next claim of a request from a new request with the same id.
cdef struct Prompt:
    int64_t end  # 0: the claim was not used
    int32_t first[2]
    int32_t last[4]


# What a later claim of the same id needs to go on with the request.
cdef struct EndedClaim:
    Py_hash_t hashed
    Prompt prompt
    RequestHistory history


cdef inline Prompt prompt_of(const TokenId* tokens, int64_t end) noexcept:
    cdef Prompt prompt
    cdef int64_t i
    prompt.end = end
    for i in range(2):
        prompt.first[i] = tokens[min(i, end - 1)]
    for i in range(4):
        prompt.last[i] = tokens[max(0, end - 1 - i)]
    return prompt


cdef inline bint are_equal(const Prompt& a, const Prompt& b) noexcept:
    cdef int64_t i
    cdef bint same = a.end == b.end
    for i in range(2):
        same = same and a.first[i] == b.first[i]
    for i in range(4):
        same = same and a.last[i] == b.last[i]
    return same


cdef inline bint goes_on(const EndedClaim& ended, const RequestView* view) noexcept:
    """Return True if the request of an ended claim goes on in a claim of the same id.

    Its tokens are the prompt of the ended claim and a generated token at least, and at most all
    tokens that the claim had. A client may send the same prompt again under the same id, so a
    prompt without generated tokens is a new request.
    """
    cdef int64_t end = ended.prompt.end
    if end == 0 or view.end <= end or view.end > ended.history.written_tokens + 1:
        return False
    return are_equal(prompt_of(view.tokens, end), ended.prompt)


cdef uint64_t next_manager_uid = 1


@cython.final
@cython.freelist(256)  # many contexts may end at once
cdef class ReleasedMisses:
    """The misses of a claim that has ended."""

    cdef Misses native


@cython.final
@cython.freelist(16)
cdef class Claim:
    """The claim of a request id; also its own key in the table of claims.

    The id is hashed once, before any lookup. Two claims in the table are equal only if they are the
    same object. So the table inserts and removes a claim without a call of the id's Python code,
    which could raise or let other threads run.
    """

    cdef object request_id
    cdef Py_hash_t hashed
    cdef SequenceHandle sequence
    cdef int32_t replica
    cdef bint is_entered  # the claim was inserted into the table
    cdef bint is_live
    cdef Prompt prompt
    cdef object context  # the context with which the claim was used last
    cdef RequestHistory history  # history of the request; set when the claim ends
    cdef ReleasedMisses missed  # set when the claim ends, if the manager explains misses

    def __hash__(self):
        return self.hashed

    def __eq__(self, other):
        cdef Claim claim
        if self is other:
            return True
        if type(other) is str:  # a key of the claims by name
            return self.request_id == other
        claim = <Claim?>other
        if self.is_entered and claim.is_entered:
            return False
        return self.request_id is claim.request_id or self.request_id == claim.request_id

    @property
    def misses(self):
        """Why tokens were not cached, after the claim has ended; or None."""
        return None if self.missed is None else listed_misses(self.missed.native)


cdef Claim new_claim(object request_id):
    cdef Claim claim = Claim.__new__(Claim)
    claim.hashed = hash(request_id)
    claim.request_id = request_id
    return claim


# Errors that name their request.
cdef object not_found(object request_id):
    return RequestNotFoundError(f"request {request_id!r} is not claimed; call claim first")


cdef object about(object error, object request_id):
    """Return the same error with the request id before its text."""
    return type(error)(f"request {request_id!r}: {error}")


cdef object named(object error, list contexts, int64_t first):
    """Return the same error with the request id of its row before its text.

    Row 0 is context `first`.
    """
    cdef object row = getattr(error, "row", None)
    if row is None:
        return error
    try:
        context = contexts[first + row]
    except IndexError:  # the caller may have changed the list since
        return error
    return about(error, context.request_id)


@cython.final
@cython.no_gc_clear  # objects destroyed together with a manager may still call it
cdef class ClaimTable:
    """The claims of a manager, by request id and by sequence slot.

    An id is hashed once, before anything is read. Python code of an id runs only in ``lookup``
    and ``require_unclaimed``. Ids that are exactly str have no Python code: they are found by name,
    without an object for the lookup.
    """

    cdef CacheCore core  # owns `native`
    cdef CacheManager* native
    cdef uint64_t manager_uid
    cdef int32_t num_replicas
    cdef bint explains  # the manager explains misses
    cdef dict by_id  # the claims whose id is no str, by claim
    cdef dict by_name  # the claims whose id is a str, by id
    cdef uint64_t num_entered  # number of claims ever inserted into both
    cdef list by_slot  # the claim of each slot, or None
    cdef vector[EndedClaim] ended  # the claims that ended last, each in the place of its hash
    cdef vector[ClaimSlot] slots
    cdef KeyedTrees trees
    cdef dict tenants  # the number of each tenant with a quota

    def __cinit__(self, CacheCore core not None, tuple tenants not None=()):
        global next_manager_uid
        self.core = core
        self.tenants = {tenant: i for i, tenant in enumerate(tenants)}
        self.native = core.manager
        self.manager_uid = next_manager_uid
        next_manager_uid += 1
        self.by_id = {}
        self.by_name = {}
        self.by_slot = []
        self.num_replicas = self.native.config().num_replicas
        self.explains = self.native.config().explain_pages > 0
        cdef size_t size = 256
        while size < 4096 and <int64_t>size < 4 * self.native.config().max_sequences:
            size *= 2
        self.ended.resize(size)
        self.trees = trees_of_manager(core, core.manager)

    cdef int expect_keys(self) except -1:
        """Accept requests with extra keys from now on; each context is checked again."""
        global next_manager_uid
        if self.trees.is_keyed:
            return 0
        self.trees.expect_keys()
        self.manager_uid = next_manager_uid
        next_manager_uid += 1
        change_contexts_epoch()
        return 0

    cdef int tell_terms(self, SequenceHandle sequence, Terms terms) except -1:
        """Set priority, duration and tenant of a request; -1 for a tenant without a quota."""
        cdef RequestPriority native = terms.native
        if terms.tenant is not None:
            native.tenant = <int32_t>self.tenants.get(terms.tenant, -1)
        self.native.set_priority(sequence, native)
        return 0

    cdef Claim lookup(self, object request_id):
        """Return the claim of an id, or None. Python code of the id may run during this call."""
        cdef PyObject* known
        cdef Claim claim = None
        if type(request_id) is str:
            known = PyDict_GetItemWithError(self.by_name, request_id)
            if known != NULL:
                claim = <Claim>known
        if claim is None and (self.by_id or type(request_id) is not str):
            claim = self.known(new_claim(request_id))
        return claim if claim is not None and claim.is_live else None

    cdef Claim known(self, Claim claim):
        """Return the claim in the table whose id equals the id of `claim`, or None."""
        cdef object found
        if type(claim.request_id) is str:
            found = self.by_name.get(claim.request_id)
            return found if found is not None or not self.by_id else self.by_id.get(claim)
        found = self.by_id.get(claim)
        return found if found is not None or not self.by_name else self.by_name.get(claim)

    cdef Claim claim_of(self, object request_id):
        """Return the claim of an id; RequestNotFoundError if the id is not claimed."""
        cdef Claim claim = self.lookup(request_id)
        if claim is None:
            raise not_found(request_id)
        return claim

    cdef SequenceHandle find(self, object request_id) except *:
        return self.claim_of(request_id).sequence

    cdef int claim(self, object request_id, object replica_idx) except -1:
        """Register a request on a replica."""
        cdef Claim claim = new_claim(request_id)
        cdef uint64_t seen = self.require_unclaimed(claim)
        claim.replica = self.chosen_replica(replica_idx)
        try:
            self.insert(claim, seen)
            self.begin(claim, self.native.claim(claim.replica))
        except BaseException as error:
            self.drop(claim)
            if isinstance(error, CapacityError):
                raise about(error, request_id) from None
            raise
        return 0

    cdef int release(self, Claim claim, int64_t returns) except -1:
        """End a claim and release the pages and the state of its request; `returns` is a hint."""
        cdef Misses* misses = NULL
        if self.explains:
            claim.missed = ReleasedMisses.__new__(ReleasedMisses)
            misses = &claim.missed.native
        self.native.release(claim.sequence, &claim.history, returns, misses)
        if isinstance(claim.context, TextGenerationContext):
            (<TextGenerationContext>claim.context)._past = claim
        self.end(claim)
        return 0

    cdef int32_t chosen_replica(self, object replica_idx) except -1:
        if replica_idx is None and self.num_replicas > 1:
            raise ValueError(
                f"replica_idx is None, must be 0 .. {self.num_replicas - 1} or 'auto': "
                f"there are {self.num_replicas} replicas"
            )
        if not isinstance(replica_idx, str):
            return 0 if replica_idx is None else self.replica(replica_idx)
        if replica_idx != "auto":
            raise ValueError(f"replica_idx is {replica_idx!r}, must be an index or 'auto'")
        return self.native.recommend_replica(string_view(), NULL, 0)

    cdef uint64_t require_unclaimed(self, Claim claim) except? 0:
        """Raise AlreadyClaimedError if the id is claimed; return num_entered before the lookup."""
        cdef uint64_t seen = self.num_entered
        cdef Claim present = self.known(claim)
        if present is not None:
            raise AlreadyClaimedError(
                f"request {claim.request_id!r} is claimed already, on replica {present.replica}; "
                f"release it first"
            )
        return seen

    cdef int insert(self, Claim claim, uint64_t seen) except -1:
        """Reserve an id for a claim that is about to begin."""
        while seen != self.num_entered:  # another claim was inserted while code of the id ran
            seen = self.require_unclaimed(claim)
        claim.is_entered = True
        if type(claim.request_id) is str:
            self.by_name[claim.request_id] = claim
        else:
            self.by_id[claim] = claim
        self.num_entered += 1
        # Grow the list while a failure is still allowed.
        while len(self.by_slot) < len(self.by_id) + len(self.by_name):
            self.by_slot.append(None)
            self.slots.resize(len(self.by_slot))
        return 0

    cdef EndedClaim* ended_of(self, Claim claim) noexcept:
        return &self.ended[<size_t>claim.hashed & (self.ended.size() - 1)]

    cdef int see(self, Claim claim, const RequestView* view, bint is_known) except -1:
        """Take over the counts of the request if it goes on; at the first use of a claim.

        `is_known`: the context has passed the counts on.
        """
        cdef EndedClaim* ended
        if claim.prompt.end > 0:
            return 0
        claim.prompt = prompt_of(view.tokens, view.end)
        ended = self.ended_of(claim)
        if not is_known and ended.hashed == claim.hashed and goes_on(ended[0], view):
            self.native.recall(claim.sequence, ended.history)
            claim.prompt = ended.prompt
        return 0

    cdef int begin(self, Claim claim, SequenceHandle sequence) except -1:
        while len(self.by_slot) <= sequence.index:
            self.by_slot.append(None)
        if self.slots.size() < <size_t>len(self.by_slot):
            self.slots.resize(len(self.by_slot))
        self.slots[sequence.index].generation = sequence.generation
        self.slots[sequence.index].context = NULL
        self.by_slot[sequence.index] = claim
        claim.sequence = sequence
        claim.is_live = True
        return 0

    cdef int drop(self, Claim claim) except -1:
        """Release the id that a claim has reserved."""
        if not claim.is_entered:
            return 0
        if type(claim.request_id) is str:
            self.by_name.pop(claim.request_id, None)
        else:
            self.by_id.pop(claim, None)
        claim.is_entered = False  # later the id may belong to another claim
        return 0

    cdef int end(self, Claim claim) except -1:
        """Remove a claim whose sequence C++ has released."""
        cdef object _last_holder = claim.context
        cdef EndedClaim* ended
        if claim.prompt.end > 0:
            ended = self.ended_of(claim)
            ended.hashed = claim.hashed
            ended.prompt, ended.history = claim.prompt, claim.history
        claim.is_live = False
        self.slots[claim.sequence.index].generation = 0
        self.slots[claim.sequence.index].context = NULL
        self.by_slot[claim.sequence.index] = None
        change_contexts_epoch()
        self.drop(claim)
        claim.context = None
        return 0  # the context may be destroyed here, which can run Python code

    cdef int record(self, object context, SequenceHandle sequence) except -1:
        """Record the context with which a request was used, for ``fork``.

        Only successful calls record their context. The context of a refused call or of a query may
        have other tokens than the request's pages.
        """
        cdef Claim claim
        cdef object before
        cdef ClaimSlot* slot
        if <Py_ssize_t>sequence.index >= len(self.by_slot):
            return 0
        slot = &self.slots[sequence.index]
        if slot.generation != sequence.generation:
            return 0
        claim = <Claim>PyList_GET_ITEM(self.by_slot, sequence.index)
        before, claim.context = claim.context, context
        slot.context = <PyObject*>context
        if isinstance(before, TextGenerationContext):
            (<TextGenerationContext>before)._recorded.generation = 0
        if isinstance(context, TextGenerationContext):
            (<TextGenerationContext>context)._recorded = sequence
        if before is not None:
            change_contexts_epoch()  # the batch that was read last may contain `before`
        return 0  # `before` may be destroyed here, which can run Python code

    cdef int32_t replica(self, object replica_idx) except -1:
        cdef int64_t index = as_int(replica_idx, "replica_idx")
        if not 0 <= index < self.num_replicas:
            raise IndexError(
                f"replica_idx is {index}, must be 0 .. {self.num_replicas - 1}"
            )
        return <int32_t>index


@cython.final
cdef class RowClaims:
    """The claims of a batch's rows, to check later whether a row still has a page.

    Parameters
    ----------
    claims : ClaimTable
        The claims of a manager.
    request_ids : list [B]

    Raises
    ------
    RequestNotFoundError
        A request is not claimed.
    """

    cdef ClaimTable _claims
    cdef list _names
    cdef vector[SequenceHandle] _rows
    cdef int32_t _bundle  # the bundle of the pages

    def __cinit__(self, ClaimTable claims not None, list request_ids not None, int32_t bundle=0):
        self._bundle = bundle
        self._claims = claims
        self._names = list(request_ids)
        for name in self._names:
            self._rows.push_back(claims.find(name))

    def __call__(self, row, column, page):
        """Raise InvalidHandleError unless the claim of `row` is live and has `page` at `column`.

        Notes
        -----
        Costs O(pages of the row), a copy of their ids.
        """
        cdef size_t at = row
        cdef size_t place = column
        cdef vector[BlockId] pages
        try:
            pages = self._claims.native.pages_of(self._rows.at(at), self._bundle)
        except RequestNotFoundError:
            raise InvalidHandleError(
                f"request {self._names[row]!r} was released after this view of it was made; "
                f"fetch its present claim"
            ) from None
        if place >= pages.size() or pages[place] != page:
            raise InvalidHandleError(
                f"page {page} is no longer page {column} of request {self._names[row]!r}: it was "
                f"swapped, copied or dropped after this view was made; fetch again"
            )
