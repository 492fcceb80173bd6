# SPDX-License-Identifier: Apache-2.0
# Claimed requests, and the walk from Python contexts to what C++ reads.

cdef uint64_t next_manager_uid = 1


cdef inline object handle_key(SequenceHandle sequence):
    return (<uint64_t>sequence.generation << 32) | sequence.index


cdef inline SequenceHandle handle_of(object key) except *:
    cdef uint64_t packed = key
    cdef SequenceHandle sequence
    sequence.index = <uint32_t>(packed & 0xffffffff)
    sequence.generation = <uint32_t>(packed >> 32)
    return sequence


cdef object not_found(object request_id):
    return RequestNotFoundError(f"request {request_id!r} is not claimed; call external_claim first")


cdef object named(object error, list contexts):
    """The same error with the request it is about in front."""
    cdef object row = getattr(error, "row", None)
    if row is None:
        return error
    return type(error)(f"request {contexts[row].request_id!r}: {error}")


# Changes whenever a context may no longer be what a batch read earlier took it for: one is gone, so
# that another object may have its address, or has moved to another claim.
cdef uint64_t contexts_epoch = 1


cdef inline void change_contexts_epoch() noexcept:
    global contexts_epoch
    contexts_epoch += 1


cdef inline bint is_claimed(PyObject* item, uint64_t uid, const uint32_t* generations) noexcept:
    """True when a context knows its present claim with the manager of this id."""
    cdef SequenceHandle sequence = (<TextGenerationContext>item)._request.sequence
    return (
        (<TextGenerationContext>item)._manager_uid == uid
        and generations[sequence.index] == sequence.generation
    )


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


cdef class ClaimTable:
    """Who is claimed, by request id; and the way from Python contexts to C++ requests."""

    def __init__(self, object core, *, bint runtime_checks, object gpus=None):
        global next_manager_uid
        self._core = core
        self._native = <CacheManager*>PyCapsule_GetPointer(
            core._capsule(), "kvcore.CacheManager"
        )
        self._uid = next_manager_uid
        next_manager_uid += 1
        self._handles = {}
        self._contexts = {}
        self._num_replicas = self._native.config().num_replicas
        self._checks = runtime_checks
        self._gpus = gpus

    # ---- from Python objects to views ---------------------------------------------------------

    cdef SequenceHandle _find(self, object request_id) except *:
        cdef object key = self._handles.get(request_id)
        if key is None:
            raise not_found(request_id)
        return handle_of(key)

    cdef RequestView* _own(self, TextGenerationContext own) except NULL:
        """The request of a context, with its present claim."""
        if not is_claimed(<PyObject*>own, self._uid, self._generations.data()):
            own._request.sequence = self._find(own.request_id)
            own._manager_uid = self._uid
            self._contexts[own.request_id] = own
            change_contexts_epoch()
        return &own._request

    cdef int _foreign_view(self, object context, RequestView* view, list keep) except -1:
        """The same of any object like a context; `keep` holds what the view refers to."""
        cdef object request_id = read_foreign(context, view, keep)
        view.sequence = self._find(request_id)
        self._contexts[request_id] = context
        return 0

    cdef list _read(self, object batch, Batch* rows, list keep):
        """Point to the requests of a batch; answer its contexts as a list that nothing changes.

        That is the caller's own list when it holds nothing but TextGenerationContext, for then no
        Python code runs during the call; otherwise a copy.
        """
        cdef list contexts
        cdef size_t i
        rows.rows.swap(self._last)  # or its memory
        if type(batch) is list:
            if self._is_last(<list>batch, rows.rows) or self._read_own(<list>batch, rows):
                rows.epoch = contexts_epoch
                return <list>batch
        rows.epoch = 0
        contexts = list(batch)
        rows.rows.resize(len(contexts))
        rows.foreign.resize(len(contexts))
        for i in range(rows.rows.size()):
            context = contexts[i]
            if type(context) is TextGenerationContext:
                rows.rows[i] = self._own(<TextGenerationContext>context)
            else:
                self._foreign_view(context, &rows.foreign[i], keep)
                rows.rows[i] = &rows.foreign[i]
        return contexts

    cdef void _keep(self, Batch* rows) noexcept:
        """Remember a batch that is done with."""
        self._last.swap(rows.rows)
        self._last_epoch = rows.epoch

    cdef bint _is_last(self, list batch, const vector[RequestView*]& last) noexcept:
        """True for the batch that was read last, as it is from one call of a step to the next."""
        cdef Py_ssize_t n = len(batch)
        cdef Py_ssize_t i
        if self._last_epoch != contexts_epoch or n != <Py_ssize_t>last.size():
            return False
        for i in range(n):
            if &(<TextGenerationContext>PyList_GET_ITEM(batch, i))._request != last[i]:
                return False
        return True

    cdef bint _read_own(self, list batch, Batch* rows) except -1:
        """False, with rows unfinished, when there is a context of another class."""
        cdef Py_ssize_t n = len(batch)
        cdef Py_ssize_t i
        cdef PyObject* item
        cdef uint64_t uid = self._uid
        cdef const uint32_t* generations = self._generations.data()
        rows.rows.resize(n)
        cdef RequestView** requests = rows.rows.data()
        for i in range(n):
            item = PyList_GET_ITEM(batch, i)
            if not is_own(item):
                return False
            if i + AHEAD < n:
                prefetch_context(PyList_GET_ITEM(batch, i + AHEAD))
            if not is_claimed(item, uid, generations):
                self._own(<TextGenerationContext>item)
            requests[i] = &(<TextGenerationContext>item)._request
        return True

    cdef int _write_back(self, object context, const RequestView& view) except -1:
        """Move the indices of a foreign context to where its request now stands."""
        if context.start_idx != view.start:
            context.start_idx = view.start
        if context.active_idx != view.active:
            context.active_idx = view.active
        return 0

    cdef int _check_settable(self, object context) except -1:
        """Raise before anything is reserved for a context whose indices could not be moved."""
        if type(context) is not TextGenerationContext:
            context.start_idx = context.start_idx
            context.active_idx = context.active_idx
        return 0

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
        cdef int32_t replica
        cdef SequenceHandle sequence
        self._require_unclaimed(request_id)
        if replica_idx is None and self._num_replicas > 1:
            raise ValueError(
                f"replica_idx is None, must be 0 .. {self._num_replicas - 1} or 'auto': "
                f"there are {self._num_replicas} replicas"
            )
        if isinstance(replica_idx, str):
            if replica_idx != "auto":
                raise ValueError(f"replica_idx is {replica_idx!r}, must be an index or 'auto'")
            replica = self._native.recommend_replica(string_view(), NULL, 0)
        else:
            replica = 0 if replica_idx is None else self._replica(replica_idx)
        try:
            sequence = self._native.claim(replica)
        except CapacityError as error:
            raise CapacityError(f"request {request_id!r}: {error}") from None
        self._enter(request_id, sequence)
        self._check()

    claim = external_claim

    cdef int _require_unclaimed(self, object request_id) except -1:
        if request_id in self._handles:
            home = self._native.replica_of(self._find(request_id))
            raise AlreadyClaimedError(
                f"request {request_id!r} is claimed already, on replica {home}; release it first"
            )
        return 0

    cdef int _enter(self, object request_id, SequenceHandle sequence) except -1:
        self._handles[request_id] = handle_key(sequence)
        if self._generations.size() <= sequence.index:
            self._generations.resize(sequence.index + 1)
        self._generations[sequence.index] = sequence.generation
        return 0

    cdef int32_t _replica(self, object replica_idx) except -1:
        cdef int64_t index = as_int(replica_idx, "replica_idx")
        if not 0 <= index < self._num_replicas:
            raise IndexError(
                f"replica_idx is {index}, must be 0 .. {self._num_replicas - 1}"
            )
        return <int32_t>index

    def contains(self, request_id):
        """Tell whether a request is claimed now."""
        return request_id in self._handles

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
        if after is not None:
            if request_id not in self._handles:
                raise not_found(request_id)
            if self._gpus is None:
                raise ValueError(
                    f"after is {after!r}, but this manager has no pool on a GPU; leave it out"
                )
            self._gpus.reuse_after(after)
        cdef object key = self._handles.pop(request_id, None)
        if key is None:
            raise not_found(request_id)
        cdef SequenceHandle sequence = handle_of(key)
        self._contexts.pop(request_id, None)
        self._generations[sequence.index] = 0
        change_contexts_epoch()
        self._native.release(sequence)
        self._check()

    def get_replica(self, context):
        """Answer the index of the replica that a context's request is claimed on."""
        return self._native.replica_of(self._find(context.request_id))

    def get_or_recommend_replica(self, context):
        """Answer the replica of a claimed request, or the best one for one not claimed yet.

        Longest prefix hit first, then most free pages, then fewest requests, then lowest index.
        Changes nothing.
        """
        cdef object key = self._handles.get(context.request_id)
        cdef cnp.ndarray source
        cdef bytes name
        if key is not None:
            return self._native.replica_of(handle_of(key))
        source = as_tokens(context.tokens)
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
