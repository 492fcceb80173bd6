# SPDX-License-Identifier: Apache-2.0
# The calls of PagedKVCacheManager that run per step: fetch, step; match and pin.


cdef class PagedHotPath(Reservations):
    """Base of PagedKVCacheManager: what runs per request and per step."""

    def __init__(self, object core, *, object shards, object copier, object mover,
                 bint runtime_checks, object listener, object gpus):
        super().__init__(
            core, copier=copier, mover=mover, runtime_checks=runtime_checks, gpus=gpus,
        )
        self._page_size = self._native.config().page_size
        self._total_pages = self._native.config().num_pages
        self._shards = shards
        self._listener = listener
        self._buffers = [[] for _ in range(self._num_replicas)]
        self._is_made = True

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
        cdef Transfers transfers
        cdef vector[FetchTarget] targets
        cdef FetchResult result
        cdef list keep = []
        cdef list buffers = []
        cdef _FetchBuffer buffer
        listen(self)
        contexts = self._read(batch, &requests, keep)
        if keep:
            self._expect_moves(contexts, &requests)
        targets.resize(self._num_replicas)
        try:
            self._choose_buffers(buffers, targets)
            while True:
                transfers.clear()
                result = self._native.fetch(
                    RequestBatch(requests.rows.data(), <int64_t>requests.rows.size()), steps,
                    targets.data(), self._room_for(&transfers),
                )
                if transfers.ticket != 0:
                    contexts = self._settle(&transfers, requests.rows.data(), contexts)
                if keep:
                    self._write_back_foreign(contexts, &requests)
                if result.status == FetchStatus.kPending:
                    if transfers.ticket == 0:
                        contexts = contexts[:]  # the caller's list may change while this one waits
                        self._settle_owed(requests.rows[result.row].sequence)
                elif result.status == FetchStatus.kGrow:
                    self._choose_buffers(buffers, targets)
                else:
                    break
            if result.status == FetchStatus.kNoSpace:
                raise InsufficientBlocksError(
                    f"request {contexts[result.row].request_id!r} needs {result.needed} more "
                    f"pages, {result.available} of {self._total_pages} are free; "
                    f"release a request first"
                )
            inputs = self._outputs(buffers[-self._num_replicas:], targets, steps)
        except ValueError as error:
            raise named(error, contexts) from None
        finally:
            for buffer in buffers:
                buffer.busy = False
        self._keep(&requests, contexts, <int64_t>requests.rows.size())
        self._check()
        return inputs

    cdef int _choose_buffers(self, list buffers, vector[FetchTarget]& targets) except -1:
        """Have a fetch write to buffers of the sizes that it has said it needs."""
        cdef _FetchBuffer buffer
        cdef int32_t r
        for r in range(self._num_replicas):
            buffer = self._buffer(r, targets[r].rows, targets[r].width)
            buffers.append(buffer)
            targets[r].table = buffer.rows
            targets[r].cache_lengths = <uint32_t*>cnp.PyArray_DATA(buffer.lengths)
            targets[r].new_lengths = <uint32_t*>cnp.PyArray_DATA(buffer.unread_new_lengths())
        return 0

    cdef list _outputs(self, list buffers, vector[FetchTarget]& targets, int64_t num_steps):
        cdef list inputs = []
        cdef RaggedKVCacheInputs each
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
            lengths = lengths_of(buffer, shape, strides + 1)
            limits = make_max_lengths(targets[r].longest_new, targets[r].longest_active, num_steps)
            for blocks, scales in <list>self._shards[r]:
                if self._gpus is None:
                    each = RaggedKVCacheInputs(blocks, lengths, table, limits, scales)
                else:
                    staged = self._gpus.stage(shard, lengths, table)
                    each = RaggedKVCacheInputs(blocks, *staged, limits, scales)
                    shard += 1
                each._new_lengths = buffer.new_lengths
                inputs.append(each)
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
        pages that are stored there, while other threads may run. Pages that the host tier could not
        take are not there, which the log says ("kvcore"): what is committed stays so.
        """
        cdef list contexts
        cdef Batch requests
        cdef vector[PageSwap] swaps
        cdef Transfers transfers
        cdef Transfers* stored = NULL
        cdef list keep = []
        if self._mover is not None:
            stored = &transfers
        listen(self)  # a page written now must not be swapped for one to be forgotten
        contexts = self._read(batch, &requests, keep)
        while True:
            try:
                self._native.commit(
                    RequestBatch(requests.rows.data(), <int64_t>requests.rows.size()), swaps,
                    stored,
                )
                break
            except PendingTransfersError as error:
                row = error.row
            except ValueError as error:
                raise named(error, contexts) from None
            contexts = contexts[:]  # the caller's list may change while this one waits
            self._settle_owed(requests.rows[row].sequence)
        if transfers.ticket != 0:
            self._store(&transfers, contexts)
        self._keep(&requests, contexts, <int64_t>requests.rows.size())
        self._check()
        return swaps_array(swaps)

    cdef int _store(self, Transfers* transfers, list contexts) except -1:
        """Store pages in the host tier; what it cannot take, it does not have."""
        try:
            self._settle(transfers, NULL, contexts)
        except Exception:
            log.warning(
                "%d pages were not stored in the host tier", transfers.tier_moves.size(),
                exc_info=True,
            )
        return 0

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
