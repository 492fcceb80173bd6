# SPDX-License-Identifier: Apache-2.0
# Claimed requests: their ids, and what is known of each.

cdef uint64_t next_manager_uid = 1


@cython.final
@cython.freelist(16)
cdef class _Claim:
    """The claim of a request id, and its own key in the table of claims.

    The id is hashed once, before anything is looked up. Two claims that the table has are equal
    only if they are one object, so that a claim is put there and taken out of it again without any
    code of the id, which could raise, or let other threads run.
    """

    def __hash__(self):
        return self.hashed

    def __eq__(self, _Claim other not None):
        if self is other:
            return True
        if self.is_entered and other.is_entered:
            return False
        return self.request_id is other.request_id or self.request_id == other.request_id


cdef _Claim new_claim(object request_id):
    cdef _Claim claim = _Claim.__new__(_Claim)
    claim.hashed = hash(request_id)
    claim.request_id = request_id
    return claim


cdef object not_found(object request_id):
    return RequestNotFoundError(f"request {request_id!r} is not claimed; call external_claim first")


cdef object about(object error, object request_id):
    """The same error with the request it is about in front."""
    return type(error)(f"request {request_id!r}: {error}")


cdef object named(object error, list contexts):
    """The same error with the request of its row in front."""
    cdef object row = getattr(error, "row", None)
    if row is None:
        return error
    try:
        context = contexts[row]
    except IndexError:  # the caller's list, which may have changed since
        return error
    return about(error, context.request_id)


cdef object id_of(object context):
    try:
        return context.request_id
    except AttributeError:
        raise no_context(context) from None


# Changes whenever a context may no longer be what a batch read earlier took it for: one is gone, so
# that another object may have its address, or has moved to another claim.
cdef uint64_t contexts_epoch = 1


cdef inline void change_contexts_epoch() noexcept:
    global contexts_epoch
    contexts_epoch += 1


cdef inline bint is_claimed(PyObject* item, uint64_t uid, const ClaimSlot* slots) noexcept:
    """True when a context knows its present claim with the manager of this id."""
    cdef SequenceHandle sequence = (<TextGenerationContext>item)._request.sequence
    return (
        (<TextGenerationContext>item)._manager_uid == uid
        and slots[sequence.index].generation == sequence.generation
    )


cdef inline int require_made(ClaimTable table) except -1:
    """First of all in every call: without its constructor a manager has no memory to look at."""
    if not table._is_made:
        raise RuntimeError(
            f"this {type(table).__name__} was not initialised; call __init__ of the base class "
            f"before anything else"
        )
    return 0


cdef inline int listen(ClaimTable table) except -1:
    """Before the cache is read: forget it where somebody asks for that."""
    require_made(table)
    if table._listener is not None and table._listener.is_asked():
        table.reset_prefix_cache()
    return 0


cdef class ClaimTable:
    """Who is claimed, by request id."""

    def __init__(self, object core, *, bint runtime_checks, object gpus=None):
        global next_manager_uid
        if self._native is not NULL:
            raise RuntimeError(
                f"this {type(self).__name__} is initialised already; make another one"
            )
        self._core = core
        self._native = <CacheManager*>PyCapsule_GetPointer(
            core._capsule(), "kvcore.CacheManager"
        )
        self._uid = next_manager_uid
        next_manager_uid += 1
        self._claims = {}
        self._by_slot = []
        self._num_replicas = self._native.config().num_replicas
        self._checks = runtime_checks
        self._gpus = gpus

    cdef _Claim _claim_of(self, object request_id):
        """The claim of an id; the code of an id may run before this answers, none after."""
        require_made(self)
        cdef _Claim claim = self._claims.get(new_claim(request_id))
        if claim is None or not claim.is_live:
            raise not_found(request_id)
        return claim

    cdef SequenceHandle _find(self, object request_id) except *:
        return self._claim_of(request_id).sequence

    cdef int _check(self) except -1:
        if self._checks:
            self._native.check_integrity()
        return 0

    # ---- claims ---------------------------------------------------------------

    def external_claim(self, request_id, replica_idx=None):
        """Register a request on a replica; takes no pages.

        Parameters
        ----------
        request_id
            Any hashable object.
        replica_idx : int or "auto", optional
            Needed with several replicas; "auto" takes the one with the most free pages.

        Raises
        ------
        AlreadyClaimedError, CapacityError, IndexError, ValueError
        """
        require_made(self)
        cdef _Claim claim = new_claim(request_id)
        cdef uint64_t seen = self._require_unclaimed(claim)
        claim.replica = self._chosen_replica(replica_idx)
        try:
            self._insert(claim, seen)
            self._begin(claim, self._native.claim(claim.replica))
        except BaseException as error:
            self._drop(claim)
            if isinstance(error, CapacityError):
                raise about(error, request_id) from None
            raise
        self._check()

    claim = external_claim

    cdef int32_t _chosen_replica(self, object replica_idx) except -1:
        if replica_idx is None and self._num_replicas > 1:
            raise ValueError(
                f"replica_idx is None, must be 0 .. {self._num_replicas - 1} or 'auto': "
                f"there are {self._num_replicas} replicas"
            )
        if not isinstance(replica_idx, str):
            return 0 if replica_idx is None else self._replica(replica_idx)
        if replica_idx != "auto":
            raise ValueError(f"replica_idx is {replica_idx!r}, must be an index or 'auto'")
        return self._native.recommend_replica(string_view(), NULL, 0)

    cdef uint64_t _require_unclaimed(self, _Claim claim) except? 0:
        """Answer how many claims had been inserted before this one was looked for."""
        cdef uint64_t seen = self._insertions
        cdef _Claim present = self._claims.get(claim)
        if present is not None:
            raise AlreadyClaimedError(
                f"request {claim.request_id!r} is claimed already, on replica {present.replica}; "
                f"release it first"
            )
        return seen

    cdef int _insert(self, _Claim claim, uint64_t seen) except -1:
        """Take an id for a claim that is about to begin, before anybody else does."""
        while seen != self._insertions:  # others came while code of the id ran
            seen = self._require_unclaimed(claim)
        claim.is_entered = True
        self._claims[claim] = claim
        self._insertions += 1
        while len(self._by_slot) < len(self._claims):  # here, where it may still fail
            self._by_slot.append(None)
            self._slots.resize(len(self._by_slot))
        return 0

    cdef int _begin(self, _Claim claim, SequenceHandle sequence) except -1:
        while len(self._by_slot) <= sequence.index:
            self._by_slot.append(None)
        if self._slots.size() < <size_t>len(self._by_slot):
            self._slots.resize(len(self._by_slot))
        self._slots[sequence.index].generation = sequence.generation
        self._slots[sequence.index].context = NULL
        self._by_slot[sequence.index] = claim
        claim.sequence = sequence
        claim.is_live = True
        return 0

    cdef int _drop(self, _Claim claim) except -1:
        """Give the id back that a claim has taken."""
        if claim.is_entered:
            self._claims.pop(claim, None)
        return 0

    cdef int _end(self, _Claim claim) except -1:
        """Forget a claim that C++ knows no more."""
        cdef object context = claim.context
        claim.is_live = False
        self._slots[claim.sequence.index].generation = 0
        self._slots[claim.sequence.index].context = NULL
        self._by_slot[claim.sequence.index] = None
        change_contexts_epoch()
        self._drop(claim)
        claim.context = None
        return 0  # here `context` may die, and run code of its own

    cdef int32_t _replica(self, object replica_idx) except -1:
        cdef int64_t index = as_int(replica_idx, "replica_idx")
        if not 0 <= index < self._num_replicas:
            raise IndexError(
                f"replica_idx is {index}, must be 0 .. {self._num_replicas - 1}"
            )
        return <int32_t>index

    def contains(self, request_id):
        """Tell whether a request is claimed now."""
        require_made(self)
        cdef _Claim claim = self._claims.get(new_claim(request_id))
        return claim is not None and claim.is_live

    def release(self, request_id, *, after=None):
        """Drop a request; its committed pages stay cached and evictable.

        Parameters
        ----------
        request_id : hashable
        after : stream or event, optional
            Of cupy or torch, or a stream's handle: on GPU pools nothing writes the request's pages
            before the work that it stands for is done. Not needed for work on the streams that
            were current when the batch was fetched.

        Raises
        ------
        RequestNotFoundError
        ValueError
            `after` is given, but no pool is on a GPU.
        """
        cdef _Claim claim = self._claim_of(request_id)
        if after is not None:
            if self._gpus is None:
                raise ValueError(
                    f"after is {after!r}, but this manager has no pool on a GPU; leave it out"
                )
            self._gpus.reuse_after(after)
            if not claim.is_live:
                raise not_found(request_id)
        self._native.release(claim.sequence)
        self._end(claim)
        self._check()

    def get_replica(self, context):
        """Answer the index of the replica that a context's request is claimed on."""
        return self._claim_of(id_of(context)).replica

    def get_or_recommend_replica(self, context):
        """Answer the replica of a claimed request, or the best one for one not claimed yet.

        Longest prefix hit first, then most free pages, then fewest requests, then lowest index.
        Changes nothing.
        """
        require_made(self)
        cdef _Claim claim = self._claims.get(new_claim(id_of(context)))
        cdef cnp.ndarray source
        cdef bytes name
        if claim is not None and claim.is_live:
            return claim.replica
        listen(self)
        try:
            tokens = context.tokens
        except AttributeError:
            raise no_context(context) from None
        source = as_tokens(tokens)
        name = namespace_of(
            getattr(context, "extra_key", None), getattr(context, "cache_salt", None)
        )
        return self._native.recommend_replica(
            name_view(name), <const int32_t*>cnp.PyArray_DATA(source),
            cnp.PyArray_DIM(source, 0),
        )

    def get_req_blocks(self, request_id):
        """Answer a request's page ids in logical order, a list of int."""
        return self._native.pages_of(self._find(request_id))
