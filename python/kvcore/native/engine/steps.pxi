# SPDX-License-Identifier: Apache-2.0
"""The two calls of every step: fetch before the kernels, commit after them."""


log = logging.getLogger("kvcore")


# ---- fetch ---------------------------------------------------------------------------------------


@cython.final
@cython.no_gc_clear  # objects destroyed together with a manager may still call it
cdef class InputMaker:
    """Makes the inputs of every device from the tables that a fetch writes.

    Parameters
    ----------
    shards : list of list of (blocks, scales)
        The pools by replica, then by device of the replica.
    gpus : kvcore.backends.protocol.DevicePools, or None
        None if no pool is on a GPU.
    layers : kvcore.layers.layer_map.LayerMap, or None
        None without groups.
    pages_per_column : tuple of int
        Pages of each bundle per column, the unit in which hits are counted; (1,) without groups.
    state_groups : int
        Number of groups of layers with a state.
    states : kvcore.pools.StateArrays, or None
        None without arrays of states.
    """

    cdef list shards
    cdef list views  # of each shard's pool, as the inputs over it share them
    cdef object gpus
    cdef int64_t total_pages
    cdef int32_t num_replicas
    cdef FetchBuffers buffers
    cdef object layers  # the LayerMap; None without groups
    cdef vector[int64_t] pages_per_column  # by bundle
    cdef int32_t num_bundles
    cdef int32_t state_groups
    cdef object states
    cdef bint is_extended  # on GPUs, with groups, or with states

    def __cinit__(self, list shards not None, object gpus, int64_t total_pages, object layers,
                  tuple pages_per_column not None, int32_t state_groups, object states):
        self.state_groups = state_groups
        self.states = states
        self.layers = layers
        self.pages_per_column = pages_per_column
        self.num_bundles = <int32_t>len(pages_per_column)
        self.shards = shards
        self.views = [PoolViews() for replica in shards for _ in replica]
        self.gpus = gpus
        self.is_extended = gpus is not None or layers is not None or state_groups > 0
        self.total_pages = total_pages
        self.num_replicas = <int32_t>len(shards)
        self.buffers = FetchBuffers(
            self.num_replicas * self.num_bundles, <uint32_t>total_pages,
            None if gpus is None else gpus.pinned
        )

    cdef int choose_buffers(
        self, list taken, vector[FetchTarget]& targets, vector[LookupTable*]& more
    ) except -1:
        """Take buffers of the sizes in `targets`, and point `targets` to them."""
        cdef FetchBuffer buffer
        cdef int32_t r, b
        cdef int32_t others = self.num_bundles - 1
        cdef int64_t pages
        if unlikely(others > 0):
            more.resize(self.num_replicas * others)
        for r in range(self.num_replicas):
            if unlikely(others > 0):
                for b in range(1, self.num_bundles):
                    pages = targets[r].width * self.pages_per_column[b]
                    buffer = self.buffers.take(r * self.num_bundles + b, targets[r].rows, pages)
                    taken.append(buffer)
                    more[r * others + b - 1] = buffer.rows
                targets[r].more = more.data() + r * others
            pages = targets[r].width * self.pages_per_column[0]
            buffer = self.buffers.take(r * self.num_bundles, targets[r].rows, pages)
            taken.append(buffer)
            targets[r].table = buffer.rows
            targets[r].cache_lengths = <uint32_t*>cnp.PyArray_DATA(buffer.lengths)
            targets[r].new_lengths = <uint32_t*>cnp.PyArray_DATA(buffer.unread_new_lengths())
            if unlikely(self.state_groups > 0):
                targets[r].states = <int32_t*>cnp.PyArray_DATA(buffer.new_states())
        return 0

    cdef int32_t bundle_of(self, object given) except -1:
        """Return a bundle index; IndexError if there is no such bundle."""
        cdef int64_t bundle = as_int(given, "bundle")
        if not 0 <= bundle < self.num_bundles:
            raise IndexError(f"bundle is {bundle}, must be 0 .. {self.num_bundles - 1}")
        return <int32_t>bundle

    cdef list pages_of(
        self, CacheManager* native, SequenceHandle sequence, int32_t bundle, int64_t first
    ):
        """Return the pages of a sequence in a bundle; `total_pages` stands for a missing page."""
        cdef list pages = native.pages_of(sequence, bundle, first)
        if self.layers is None:
            return pages
        return [page if page >= 0 else self.total_pages for page in pages]

    cdef cnp.ndarray table(self, FetchBuffer buffer, const FetchTarget& target, int32_t bundle):
        cdef cnp.npy_intp shape[2]
        cdef cnp.npy_intp strides[2]
        shape[0] = target.rows
        shape[1] = target.width * self.pages_per_column[bundle]
        strides[0] = buffer.rows.stride() * sizeof(uint32_t)
        strides[1] = sizeof(uint32_t)
        return table_of(buffer, shape, strides)

    cdef tuple more_tables(
        self, list taken, Py_ssize_t first, const FetchTarget& target, int32_t shard
    ):
        """Return the tables of all bundles except the first, on the device of a shard."""
        cdef list tables = []
        cdef FetchBuffer buffer
        cdef cnp.npy_intp shape[1]
        cdef cnp.npy_intp strides[1]
        cdef int32_t b
        shape[0] = target.rows
        strides[0] = sizeof(uint32_t)
        for b in range(1, self.num_bundles):
            buffer = <FetchBuffer>taken[first + b - 1]
            table = self.table(buffer, target, b)
            if self.gpus is not None:
                table = self.gpus.stage(shard, lengths_of(buffer, shape, strides), table)[1]
            tables.append(table)
        return tuple(tables)

    cdef int add_more(
        self, RaggedKVCacheInputs inputs, list taken, Py_ssize_t first, const FetchTarget& target,
        int32_t shard
    ) except -1:
        """Move inputs to the GPU of a shard; add the tables of all bundles, and states."""
        cdef FetchBuffer buffer = <FetchBuffer>taken[first + self.num_bundles - 1]
        if self.gpus is not None:
            inputs.cache_lengths, inputs.lookup_table, inputs._fetched = self.gpus.stage(
                shard, inputs.cache_lengths, inputs.lookup_table
            )
            inputs._loads = self.gpus.arriving(shard)
        if self.layers is not None:
            inputs._layers = self.layers
            more = self.more_tables(taken, first, target, shard)
            inputs._tables = (inputs.lookup_table, *more)
        if self.state_groups > 0:
            slots = buffer.states[:target.rows]
            if self.gpus is not None:
                slots = self.states.on_device(shard, slots)
            inputs._states = (slots,) * self.state_groups
        if self.gpus is not None and (self.num_bundles > 1 or self.state_groups > 0):
            inputs._fetched = self.gpus.mark(shard)  # after these copies also
        return 0

    cdef list outputs(self, list taken, vector[FetchTarget]& targets, int64_t num_steps):
        """Return the inputs of every device, over the buffers that were taken last."""
        cdef list inputs = []
        cdef RaggedKVCacheInputs each
        cdef FetchBuffer buffer
        cdef tuple pool
        cdef cnp.npy_intp shape[2]
        cdef cnp.npy_intp strides[2]
        cdef Py_ssize_t first = len(taken) - self.num_replicas * self.num_bundles
        cdef int32_t r
        cdef int32_t shard = 0
        strides[1] = sizeof(uint32_t)
        for r in range(self.num_replicas):
            buffer = <FetchBuffer>taken[first + self.num_bundles - 1]
            table = self.table(buffer, targets[r], 0)
            shape[0] = targets[r].rows
            lengths = lengths_of(buffer, shape, strides + 1)
            limits = make_max_lengths(targets[r].longest_new, targets[r].longest_active, num_steps)
            for pool in <list>self.shards[r]:
                each = new_inputs(pool[0], lengths, table, limits, pool[1])
                each._views = <PoolViews>self.views[shard]
                each._new_lengths = buffer.new_lengths
                if unlikely(self.is_extended):
                    self.add_more(each, taken, first, targets[r], shard)
                shard += 1
                inputs.append(each)
            first += self.num_bundles
        return inputs


cdef struct FetchCall:
    Call call
    PyObject* maker  # an InputMaker; the caller holds the reference
    vector[FetchTarget] targets
    vector[LookupTable*] more  # tables that `targets` point to
    FetchResult result


cdef int fetch_once(Settler settler, Call* call, object taken) except -1:
    cdef FetchCall* fetch = <FetchCall*>call
    if fetch.result.status == FetchStatus.kGrow:
        (<InputMaker>fetch.maker).choose_buffers(<list>taken, fetch.targets, fetch.more)
    fetch.result = settler.native.fetch(
        RequestBatch(call.rows, call.n), call.steps, fetch.targets.data(),
        room_for(settler, call),
    )
    if unlikely(fetch.result.status == FetchStatus.kPending):
        call.waits_for = call.rows[fetch.result.row].sequence
        return WAIT
    return AGAIN if fetch.result.status == FetchStatus.kGrow else DONE


cdef object no_space(FetchResult* result, list contexts, Settler settler, InputMaker maker):
    """Return the error for the row that gets no pages or no slot."""
    request_id = contexts[result.row].request_id
    if result.is_over_quota:
        return InsufficientBlocksError(
            f"request {request_id!r} needs {result.needed} more pages, quotas leave its tenant "
            f"{result.available} of {maker.total_pages}; release one of its requests first"
        )
    if result.lacks_slot:
        return InsufficientBlocksError(
            f"request {request_id!r} needs a slot for its state, all "
            f"{settler.native.config().num_state_slots} of its replica are in use; release a "
            f"request or a pin first"
        )
    return InsufficientBlocksError(
        f"request {request_id!r} needs {result.needed} more pages, {result.available} of "
        f"{maker.total_pages} are free; release a request first"
    )


cdef list fetch_batch(
    BatchReader reader, Settler settler, InputMaker maker, object batch, int64_t steps
):
    cdef Batch requests
    cdef FetchCall fetch
    cdef FetchBuffer buffer
    cdef list keep = []
    cdef list taken = []
    cdef list contexts = reader.read(batch, &requests, keep)
    begin_call(
        &fetch.call, name_row, requests.rows.data(), <int64_t>requests.rows.size(), steps
    )
    if unlikely(len(keep) > 0):
        expect_moves(contexts, &requests, &fetch.call)
    if unlikely(maker.gpus is not None or reader.order is not None):
        contexts = contexts[:]  # Python code runs, for example to allocate pinned memory
    if unlikely(reader.order is not None):
        reader.order.before_fetch(placed(&requests, contexts))
    if unlikely(settler.below is not None):
        contexts = contexts[:]
        bring_all(settler, requests.rows, contexts, True)
    fetch.maker = <PyObject*>maker
    fetch.targets.resize(maker.num_replicas)
    fetch.result.status = FetchStatus.kGrow  # take the first buffers
    try:
        contexts = settler.carry_out(fetch_once, &fetch.call, contexts, taken)
        if unlikely(fetch.result.status == FetchStatus.kNoSpace):
            raise no_space(&fetch.result, contexts, settler, maker)
        inputs = maker.outputs(taken, fetch.targets, steps)
    finally:
        for buffer in taken:
            buffer.busy = False
    if unlikely(reader.order is not None):
        reader.order.fetched(placed(&requests, contexts))
    reader.record(&requests, contexts, fetch.call.n)
    return inputs


cdef list placed(Batch* requests, list contexts):
    """Return per row: slot, generation, request id, and (start, active, end)."""
    cdef list rows = []
    cdef RequestView* row
    cdef size_t i
    for i in range(requests.rows.size()):
        row = requests.rows[i]
        place = (row.start, row.active, row.end)
        rows.append((row.sequence.index, row.sequence.generation, id_of(contexts[i]), place))
    return rows


# ---- commit --------------------------------------------------------------------------------------


cdef struct CommitCall:
    Call call
    vector[PageSwap] swaps
    Transfers stores


cdef int commit_once(Settler settler, Call* call, object own) except -1:
    cdef CommitCall* commit = <CommitCall*>call
    cdef Transfers* stores = NULL
    if unlikely(settler.mover is not None or settler.states is not None):
        stores = &commit.stores
    settler.native.commit(RequestBatch(call.rows, call.n), commit.swaps, stores)
    return DONE


cdef cnp.ndarray commit_batch(BatchReader reader, Settler settler, object batch):
    cdef Batch requests
    cdef CommitCall commit
    cdef list keep = []
    cdef list contexts = reader.read(batch, &requests, keep)
    if unlikely(reader.order is not None):
        contexts = contexts[:]  # Python code runs
        reader.order.before_step(placed(&requests, contexts))
    begin_call(
        &commit.call, name_row, requests.rows.data(), <int64_t>requests.rows.size(), 0
    )
    contexts = settler.carry_out(commit_once, &commit.call, contexts, None)
    if unlikely(commit.stores.ticket != 0):
        store(settler, &commit.stores, contexts)
    if unlikely(reader.order is not None):
        reader.order.stepped(placed(&requests, contexts))
    reader.record(&requests, contexts, commit.call.n)
    return swaps_array(commit.swaps, settler.num_bundles > 1)


cdef int store(Settler settler, Transfers* transfers, list contexts) except -1:
    """Store pages in the host tier, and states as checkpoints; log a failure as a warning."""
    try:
        settler.settle(transfers, NULL, contexts)
    except Exception:
        if transfers.tier_moves.size() != 0:
            log.warning(
                "%d pages were not stored in the host tier", transfers.tier_moves.size(),
                exc_info=True,
            )
        if transfers.state_copies.size() != 0:
            log.warning(
                "%d checkpoints of states were not made", transfers.state_copies.size(),
                exc_info=True,
            )
        if transfers.state_moves.size() != 0:
            log.warning(
                "%d checkpoints of states were not stored in the host tier",
                transfers.state_moves.size(), exc_info=True,
            )
    return 0


cdef cnp.ndarray swaps_array(const vector[PageSwap]& swaps, bint has_bundles):
    """Return int32 [n, 3]: batch row, column, page; with bundles [n, 4], the bundle last."""
    cdef int32_t wide = 4 if has_bundles else 3
    cdef cnp.ndarray out = int32_rows(<int64_t>swaps.size(), wide)
    cdef int32_t* data = <int32_t*>cnp.PyArray_DATA(out)
    cdef size_t i
    for i in range(swaps.size()):
        data[0] = swaps[i].row
        data[1] = swaps[i].column
        data[2] = swaps[i].page
        if has_bundles:
            data[3] = swaps[i].bundle
        data += wide
    return out
