# SPDX-License-Identifier: Apache-2.0
# The calls of PagedKVCacheManager that run per step: reserve, fetch, step; match and pin.

# Above this many tokens to compare or copy, other Python threads run meanwhile.
cdef int64_t RELEASE_GIL_TOKENS = 8192


cdef class PagedHotPath(Copies):
    """Base of PagedKVCacheManager: what runs per request and per step."""

    def __init__(self, object core, *, object shards, bint copies_itself, object mover,
                 bint runtime_checks, object listener, object gpus):
        super().__init__(
            core, copies_itself=copies_itself, mover=mover, runtime_checks=runtime_checks,
            gpus=gpus,
        )
        self._page_size = self._native.config().page_size
        self._total_pages = self._native.config().num_blocks
        self._shards = shards
        self._listener = listener
        self._buffers = [[] for _ in range(self._num_replicas)]
        self._is_made = True

    # ---- reserve ---------------------------------------------------------------

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
        cdef RequestView foreign
        cdef RequestView* request = &foreign
        cdef Owed owed
        cdef vector[PageCopy]* copies = &owed.copies if self._copies_itself else NULL
        cdef ReserveStatus status
        cdef list keep = []
        cdef object buffer
        listen(self)
        if type(data) is TextGenerationContext:
            request = self._own(<TextGenerationContext>data)
            buffer = (<TextGenerationContext>data)._buffer  # kept while the GIL is not held
        else:
            self._foreign_view(data, request, keep)
            self._check_settable(data)
        cdef SequenceHandle sequence = request.sequence
        try:
            if request.end - request.start > RELEASE_GIL_TOKENS:
                with nogil:
                    status = self._native.reserve(request[0], steps, copies, &owed.host_copies)
            else:
                status = self._native.reserve(request[0], steps, copies, &owed.host_copies)
        except ValueError as error:
            raise named(error, [data]) from None
        if status != ReserveStatus.kOk:
            return False
        self._do(&owed)
        if not is_recorded(self, <PyObject*>data, sequence):
            self._record(data, sequence)
        if request is &foreign:
            self._write_back(data, foreign)
        self._check()
        return True

    reserve = maybe_reserve

    def maybe_reserve_batch(self, batch, num_steps=1):
        """Reserve contexts in order up to the first that does not fit; answer how many.

        Every error is raised before anything is reserved.
        """
        cdef int64_t steps = as_int(num_steps, "num_steps")
        cdef list contexts
        cdef Batch requests
        cdef Owed owed
        cdef list keep = []
        cdef int64_t done = 0
        cdef int64_t reserved = 0
        listen(self)
        contexts = self._read(batch, &requests, keep)
        cdef int64_t n = requests.rows.size()
        if keep:
            for context in contexts:
                self._check_settable(context)
        try:
            while True:
                owed.copies.clear()
                owed.host_copies.clear()
                reserved = self._native.reserve_batch(
                    RequestBatch(requests.rows.data() + done, n - done), steps,
                    &owed.copies if self._copies_itself else NULL, &owed.host_copies,
                )
                self._do(&owed)
                if keep:
                    self._write_back_foreign(contexts, requests, done, done + reserved)
                done += reserved
                # It stops behind a row that owes a copy, which is done now.
                if owed.copies.size() == 0 or done == n:
                    break
        except ValueError as error:
            raise named(error, contexts) from None
        self._keep(&requests, contexts, done)
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
        cdef RequestView foreign
        cdef RequestView* request = &foreign
        cdef list keep = []
        listen(self)
        if type(ctx) is TextGenerationContext:
            request = self._own(<TextGenerationContext>ctx)
        else:
            self._foreign_view(ctx, request, keep)
        try:
            plan = self._native.plan(request[0], steps)
        except ValueError as error:
            raise named(error, [ctx]) from None
        return ReservePlan(
            hit_tokens=plan.hit_tokens, new_pages=plan.new_pages,
            evicted_pages=plan.evicted_pages, copied_tokens=plan.copied_tokens, fits=plan.fits,
        )

    cdef int _write_back_foreign(self, list contexts, const Batch& requests, int64_t first,
                                 int64_t end) except -1:
        cdef int64_t i
        for i in range(first, end):
            if type(contexts[i]) is not TextGenerationContext:
                self._write_back(contexts[i], requests.rows[i][0])
        return 0

    # ---- fetch and step ---------------------------------------------------------------

    cdef _FetchBuffer _buffer(self, int32_t replica, int64_t rows, int64_t width):
        """Take a buffer of at least this size that nobody reads; the list keeps the last few."""
        cdef list buffers = self._buffers[replica]
        cdef _FetchBuffer buffer
        cdef Py_ssize_t i
        for i in range(len(buffers)):
            buffer = <_FetchBuffer>buffers[i]
            fits = buffer.rows.max_rows() >= rows and buffer.rows.stride() >= width
            if fits and buffer.is_free():
                buffer.take()
                return buffer
        # Room to grow, so that a growing batch does not make a buffer per step.
        buffer = _FetchBuffer(max(16, rows + rows // 2), max(64, width + width // 2),
                             <uint32_t>self._total_pages,
                             None if self._gpus is None else self._gpus.pinned)
        buffer.take()
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

        On a GPU the arrays are copied to it on cupy's current stream, which from then on is
        ordered behind the streams of earlier fetches; the host waits for nothing.
        """
        cdef int64_t steps = as_int(num_steps, "num_steps")
        cdef list contexts
        cdef Batch requests
        cdef Owed owed
        cdef vector[FetchTarget] targets
        cdef FetchResult result
        cdef list keep = []
        cdef list buffers = []
        cdef _FetchBuffer buffer
        cdef bint has_moved = False
        cdef int32_t r
        listen(self)
        contexts = self._read(batch, &requests, keep)
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
                    RequestBatch(requests.rows.data(), <int64_t>requests.rows.size()), steps,
                    targets.data(), &owed.copies if self._copies_itself else NULL,
                    &owed.host_copies,
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
            self._do(&owed)
            if has_moved and keep:
                self._write_back_foreign(contexts, requests, 0, len(contexts))
            inputs = self._outputs(buffers[-self._num_replicas:], targets, steps)
        except ValueError as error:
            raise named(error, contexts) from None
        finally:
            for buffer in buffers:
                buffer.busy = False
        self._keep(&requests, contexts, <int64_t>requests.rows.size())
        self._check()
        return inputs

    cdef list _outputs(self, list buffers, vector[FetchTarget]& targets, int64_t num_steps):
        cdef list inputs = []
        cdef _FetchBuffer buffer
        cdef cnp.npy_intp shape[2]
        cdef cnp.npy_intp strides[2]
        cdef int32_t r
        cdef int32_t shard = 0
        strides[1] = sizeof(uint32_t)
        for r in range(self._num_replicas):
            buffer = <_FetchBuffer>buffers[r]
            shape[0] = targets[r].rows
            shape[1] = targets[r].width
            strides[0] = buffer.rows.stride() * sizeof(uint32_t)
            table = table_of(buffer, shape, strides)
            lengths = view_of(buffer.lengths, 1, shape, strides + 1)
            limits = make_max_lengths(targets[r].longest_new, targets[r].longest_active, num_steps)
            for blocks, scales in <list>self._shards[r]:
                if self._gpus is None:
                    inputs.append(RaggedKVCacheInputs(blocks, lengths, table, limits, scales))
                    continue
                staged = self._gpus.stage(shard, lengths, table)
                inputs.append(RaggedKVCacheInputs(blocks, *staged, limits, scales))
                shard += 1
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
        Costs O(new tokens), whatever the context length; with a host tier also the bytes of the
        pages that are stored there, while other threads may run.
        """
        cdef list contexts
        cdef Batch requests
        cdef vector[PageSwap] swaps
        cdef Owed owed
        cdef list keep = []
        listen(self)  # a page written now must not be swapped for one to be forgotten
        contexts = self._read(batch, &requests, keep)
        try:
            self._native.commit(
                RequestBatch(requests.rows.data(), <int64_t>requests.rows.size()), swaps,
                &owed.host_copies,
            )
        except ValueError as error:
            raise named(error, contexts) from None
        self._do(&owed)
        self._keep(&requests, contexts, <int64_t>requests.rows.size())
        self._check()
        return swaps_array(swaps)

    # ---- prefixes ---------------------------------------------------------------

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
        listen(self)
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
        listen(self)
        pinned._pin = self._native.pin(
            self._replica(replica_idx), name_view(name),
            <const int32_t*>cnp.PyArray_DATA(source), cnp.PyArray_DIM(source, 0),
        )
        pinned._manager = self
        pinned.num_tokens = pinned._pin.num_tokens
        self._check()
        return pinned

    def reset_prefix_cache(self):
        """Forget every cached page that nobody holds, on every replica and in its host tier."""
        require_made(self)
        self._native.reset_prefix_cache()
        self._check()

    # ---- counters ---------------------------------------------------------------

    def _counters(self):
        require_made(self)
        counters = self._native.metrics()
        return KVCacheMetrics(
            input_tokens=counters.input_tokens, cache_tokens=counters.cache_tokens,
            copied_tokens=counters.copied_tokens, evicted_pages=counters.evicted_pages,
            peak_used_pages=counters.peak_used_pages, h2d_blocks_copied=counters.loaded_pages,
            d2h_blocks_copied=counters.stored_pages,
        )
