# SPDX-License-Identifier: Apache-2.0
# The calls of PagedKVCacheManager that run per request or per step.

cdef uint64_t next_manager_uid = 1

# Above this many tokens to compare or copy, other Python threads run meanwhile.
cdef int64_t RELEASE_GIL_TOKENS = 8192


# Contexts this far ahead in a batch are asked for early.
cdef Py_ssize_t AHEAD = 8


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


cdef class PagedHotPath:
    """Base of PagedKVCacheManager: claim, reserve, fetch, step, release, match and pin."""

    def __init__(self, object core, *, object shards, bint copies_itself, bint runtime_checks,
                 object listener):
        global next_manager_uid
        self._core = core
        self._native = <CacheManager*>PyCapsule_GetPointer(
            core._capsule(), "kvcore.CacheManager"
        )
        self._uid = next_manager_uid
        next_manager_uid += 1
        self._handles = {}
        self._num_replicas = self._native.config().num_replicas
        self._page_size = self._native.config().page_size
        self._total_pages = self._native.config().num_blocks
        self._shards = shards
        self._copies_itself = copies_itself
        self._checks = runtime_checks
        self._listener = listener
        self._buffers = [[] for _ in range(self._num_replicas)]

    # ---- from Python objects to views -----------------------------------------------------------

    cdef SequenceHandle _find(self, object request_id) except *:
        cdef object key = self._handles.get(request_id)
        if key is None:
            raise not_found(request_id)
        return handle_of(key)

    cdef int _own_view(self, TextGenerationContext own, RequestView* view) except -1:
        if (
            own._manager_uid != self._uid
            or self._generations[own._sequence.index] != own._sequence.generation
        ):
            own._sequence = self._find(own.request_id)
            own._manager_uid = self._uid
        view.sequence = own._sequence
        view.tokens = own._data
        view.start = own._start
        view.active = own._active
        view.end = own._end
        view.name_space = name_view(own._name)
        return 0

    cdef int _view(self, object context, RequestView* view, list keep) except -1:
        if type(context) is TextGenerationContext:
            return self._own_view(<TextGenerationContext>context, view)
        return self._foreign_view(context, view, keep)

    cdef int _foreign_view(self, object context, RequestView* view, list keep) except -1:
        """The same of any object with the attributes of a context; `keep` holds what it refers to."""
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
        view.sequence = self._find(request_id)
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
        return 0

    cdef int _views(self, list batch, vector[RequestView]& views, list keep) except -1:
        cdef Py_ssize_t n = len(batch)
        cdef Py_ssize_t i
        cdef PyObject* item
        views.swap(self._scratch)  # the last batch's memory
        views.resize(n)
        for i in range(n):
            item = PyList_GET_ITEM(batch, i)  # borrowed: the list is nobody else's to change
            if i + AHEAD < n:
                KVCORE_PREFETCH(<const char*>PyList_GET_ITEM(batch, i + AHEAD) + 64)
            if is_own(item):
                self._own_view(<TextGenerationContext>item, &views[i])
            else:
                self._foreign_view(<object>item, &views[i], keep)
        return 0

    cdef int _write_back(self, object context, const RequestView& view) except -1:
        if type(context) is TextGenerationContext:
            (<TextGenerationContext>context)._start = view.start
            (<TextGenerationContext>context)._active = view.active
        else:
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

    cdef int _copy(self, vector[PageCopy]& copies) except -1:
        if copies.size() == 0:
            return 0
        try:
            self._copy_pages(copies_array(copies))
        finally:
            self._native.finish_copies(copies)
        return 0

    cdef int _check(self) except -1:
        if self._checks:
            self._native.check_integrity()
        return 0

    # ---- claims -----------------------------------------------------------------------------------

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
        if request_id in self._handles:
            home = self._native.replica_of(self._find(request_id))
            raise AlreadyClaimedError(
                f"request {request_id!r} is claimed already, on replica {home}; release it first"
            )
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
        self._handles[request_id] = handle_key(sequence)
        if self._generations.size() <= sequence.index:
            self._generations.resize(sequence.index + 1)
        self._generations[sequence.index] = sequence.generation
        self._check()

    claim = external_claim

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

    def release(self, request_id):
        """Drop a request; its committed pages stay cached and evictable.

        Raises
        ------
        RequestNotFoundError
        """
        cdef object key = self._handles.pop(request_id, None)
        if key is None:
            raise not_found(request_id)
        cdef SequenceHandle sequence = handle_of(key)
        self._generations[sequence.index] = 0
        self._native.release(sequence)
        self._check()

    def get_replica(self, context):
        """Answer the index of the replica that a context's request is claimed on."""
        return self._native.replica_of(self._find(context.request_id))

    def get_req_blocks(self, request_id):
        """Answer a request's page ids in logical order, a list of int."""
        return self._native.pages_of(self._find(request_id))

    # ---- reserve ------------------------------------------------------------------------------------

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
        cdef RequestView view
        cdef vector[PageCopy] copies
        cdef vector[PageCopy]* wanted = &copies if self._copies_itself else NULL
        cdef ReserveStatus status
        cdef list keep = []
        self._view(data, &view, keep)
        self._check_settable(data)
        try:
            if view.end - view.start > RELEASE_GIL_TOKENS:
                if type(data) is TextGenerationContext:
                    keep.append((<TextGenerationContext>data)._buffer)
                with nogil:
                    status = self._native.reserve(view, steps, wanted)
            else:
                status = self._native.reserve(view, steps, wanted)
        except ValueError as error:
            raise named(error, [data]) from None
        if status != ReserveStatus.kOk:
            return False
        self._copy(copies)
        self._write_back(data, view)
        self._check()
        return True

    reserve = maybe_reserve

    def maybe_reserve_batch(self, batch, num_steps=1):
        """Reserve contexts in order up to the first that does not fit; answer how many.

        Every error is raised before anything is reserved.
        """
        cdef int64_t steps = as_int(num_steps, "num_steps")
        cdef list contexts = batch_of(batch)
        cdef vector[RequestView] views
        cdef vector[PageCopy] copies
        cdef list keep = []
        cdef int64_t done = 0
        cdef int64_t reserved = 0
        cdef int64_t i
        self._views(contexts, views, keep)
        if keep:
            for context in contexts:
                self._check_settable(context)
        try:
            while True:
                copies.clear()
                reserved = self._native.reserve_batch(
                    views.data() + done, <int64_t>views.size() - done, steps,
                    &copies if self._copies_itself else NULL,
                )
                self._copy(copies)
                for i in range(done, done + reserved):
                    self._write_back(contexts[i], views[i])
                done += reserved
                # Sources of copies could not be evicted for the rows behind; now they can.
                if copies.size() == 0 or done == <int64_t>views.size():
                    break
        except ValueError as error:
            raise named(error, contexts) from None
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
        cdef RequestView view
        cdef list keep = []
        self._view(ctx, &view, keep)
        try:
            plan = self._native.plan(view, steps)
        except ValueError as error:
            raise named(error, [ctx]) from None
        return ReservePlan(
            hit_tokens=plan.hit_tokens, new_pages=plan.new_pages,
            evicted_pages=plan.evicted_pages, copied_tokens=plan.copied_tokens, fits=plan.fits,
        )

    # ---- fetch and step -----------------------------------------------------------------------------

    cdef FetchBuffer _buffer(self, int32_t replica, int64_t rows, int64_t width):
        """Take a buffer of at least this size that nobody reads; the list keeps the last few."""
        cdef list buffers = self._buffers[replica]
        cdef FetchBuffer buffer
        cdef Py_ssize_t i
        for i in range(len(buffers)):
            buffer = <FetchBuffer>buffers[i]
            if buffer.is_free() and buffer.rows.max_rows() >= rows and buffer.rows.stride() >= width:
                buffer.busy = True
                return buffer
        # Room to grow, so that a growing batch does not make a buffer per step.
        buffer = FetchBuffer(max(16, rows + rows // 2), max(64, width + width // 2),
                             <uint32_t>self._total_pages)
        buffer.busy = True
        buffers.insert(0, buffer)
        del buffers[4:]
        return buffer

    def fetch(self, batch, num_steps=1):
        """Hand out what the kernels need for a batch, reserving pages that are missing.

        Parameters
        ----------
        batch : sequence of contexts
        num_steps : int
            Steps that run before the next fetch.

        Returns
        -------
        list of RaggedKVCacheInputs
            One per device, replica-major; batch order is kept inside a replica.

        Raises
        ------
        InsufficientBlocksError
            Pages are missing; no context of the batch has changed.
        CapacityError, RequestNotFoundError, ValueError

        Notes
        -----
        One native call. Costs O(batch) plus O(pages changed since the buffer was last used); after
        a True ``maybe_reserve`` with the same or more steps it cannot fail for memory.
        """
        cdef int64_t steps = as_int(num_steps, "num_steps")
        cdef list contexts = batch_of(batch)
        cdef vector[RequestView] views
        cdef vector[PageCopy] copies
        cdef vector[FetchTarget] targets
        cdef FetchResult result
        cdef list keep = []
        cdef list buffers = []
        cdef FetchBuffer buffer
        cdef bint has_moved = False
        cdef int32_t r
        cdef Py_ssize_t i
        if self._listener is not None and self._listener.is_asked():
            self.reset_prefix_cache()
        self._views(contexts, views, keep)
        if keep:
            for context in contexts:
                self._check_settable(context)
        targets.resize(self._num_replicas)
        try:
            while True:
                # Sizes are known once the first try has reserved.
                for r in range(self._num_replicas):
                    buffer = self._buffer(r, targets[r].rows, targets[r].width)
                    buffers.append(buffer)
                    targets[r].table = buffer.rows
                    targets[r].cache_lengths = <uint32_t*>cnp.PyArray_DATA(buffer.lengths)
                result = self._native.fetch(
                    views.data(), <int64_t>views.size(), steps, targets.data(),
                    &copies if self._copies_itself else NULL,
                )
                has_moved = has_moved or result.has_moved
                if result.status != FetchStatus.kGrow:
                    break
            if result.status == FetchStatus.kNoSpace:
                raise InsufficientBlocksError(
                    f"request {contexts[result.row].request_id!r} needs {result.needed} more "
                    f"pages, {result.available} of {self._total_pages} are free; "
                    f"release a request first"
                )
            self._copy(copies)
            if has_moved:
                for i in range(len(contexts)):
                    self._write_back(contexts[i], views[i])
            inputs = self._outputs(buffers[-self._num_replicas:], targets, steps)
        except ValueError as error:
            raise named(error, contexts) from None
        finally:
            for buffer in buffers:
                buffer.busy = False
        views.swap(self._scratch)
        self._check()
        return inputs

    cdef list _outputs(self, list buffers, vector[FetchTarget]& targets, int64_t num_steps):
        cdef list inputs = []
        cdef FetchBuffer buffer
        cdef cnp.npy_intp shape[2]
        cdef cnp.npy_intp strides[2]
        cdef int32_t r
        strides[1] = sizeof(uint32_t)
        for r in range(self._num_replicas):
            buffer = <FetchBuffer>buffers[r]
            shape[0] = targets[r].rows
            shape[1] = targets[r].width
            strides[0] = buffer.rows.stride() * sizeof(uint32_t)
            table = view_of(buffer.table, 2, shape, strides)
            lengths = view_of(buffer.lengths, 1, shape, strides + 1)
            limits = make_max_lengths(targets[r].longest_new, targets[r].longest_active, num_steps)
            for blocks, scales in <list>self._shards[r]:
                inputs.append(RaggedKVCacheInputs(blocks, lengths, table, limits, scales))
        return inputs

    def step(self, batch):
        """Commit every page whose tokens are all written to the prefix cache.

        Parameters
        ----------
        batch : sequence of contexts
            After ``update``: ``start_idx`` tokens are written.

        Returns
        -------
        int32 [n, 3]
            Pages that were swapped for equal cached ones: batch row, column, page. Usually empty.

        Raises
        ------
        ValueError
            A context claims more written tokens than its pages hold; nothing has been committed.

        Notes
        -----
        Costs O(new tokens), whatever the context length.
        """
        cdef list contexts = batch_of(batch)
        cdef vector[RequestView] views
        cdef vector[PageSwap] swaps
        cdef list keep = []
        self._views(contexts, views, keep)
        try:
            self._native.commit(views.data(), <int64_t>views.size(), swaps)
        except ValueError as error:
            raise named(error, contexts) from None
        views.swap(self._scratch)
        self._check()
        return swaps_array(swaps)

    # ---- prefixes -----------------------------------------------------------------------------------

    def match_prefix(self, tokens, extra_key=None, cache_salt=None, replica_idx=0, *,
                     bint return_pages=False):
        """Count the tokens of a prefix that are cached in whole pages; changes nothing.

        Parameters
        ----------
        tokens : list of int, or array int32 or int64 [n]
        return_pages : bool
            Also answer the page ids, int32.

        Returns
        -------
        int, or (int, int32 [pages])
        """
        cdef cnp.ndarray source = as_tokens(tokens)
        cdef bytes name = namespace_of(extra_key, cache_salt)
        cdef vector[BlockId] pages
        cdef int64_t depth
        depth = self._native.match(
            self._replica(replica_idx), name_view(name),
            <const int32_t*>cnp.PyArray_DATA(source), cnp.PyArray_DIM(source, 0),
            &pages if return_pages else NULL,
        )
        if not return_pages:
            return depth * self._page_size
        return depth * self._page_size, np.array(pages, dtype=np.int32)

    def pin(self, tokens, extra_key=None, cache_salt=None, replica_idx=0):
        """Keep the cached whole pages of a prefix from eviction.

        Returns
        -------
        PinnedPrefix
            A context manager; ``num_tokens`` tells how many tokens are kept.

        Notes
        -----
        Costs the match plus O(1). Pinned pages do not count as free.
        """
        cdef cnp.ndarray source = as_tokens(tokens)
        cdef bytes name = namespace_of(extra_key, cache_salt)
        cdef PinnedPrefix pinned = PinnedPrefix.__new__(PinnedPrefix)
        pinned._pin = self._native.pin(
            self._replica(replica_idx), name_view(name),
            <const int32_t*>cnp.PyArray_DATA(source), cnp.PyArray_DIM(source, 0),
        )
        pinned._manager = self
        pinned.num_tokens = pinned._pin.num_tokens
        self._check()
        return pinned

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

    def take_copies(self):
        """Hand out the page copies that a manager without a pool of its own owes.

        Returns
        -------
        int32 [n, 4]
            Replica, source page, destination page, tokens; to be done before the next fetch's
            kernels run.
        """
        return copies_array(self._native.take_copies())

    def reset_prefix_cache(self):
        """Forget every cached page that nobody holds, on every replica."""
        self._native.reset_prefix_cache()
        self._check()

    # ---- counters -----------------------------------------------------------------------------------

    def _counters(self):
        counters = self._native.metrics()
        return KVCacheMetrics(
            input_tokens=counters.input_tokens, cache_tokens=counters.cache_tokens,
            copied_tokens=counters.copied_tokens, evicted_pages=counters.evicted_pages,
            peak_used_pages=counters.peak_used_pages,
        )
