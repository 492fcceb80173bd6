# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, autotestdict=False
"""The two calls of every step: fetch in front of the kernels, commit behind them."""

cimport cython
cimport numpy as cnp
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t
from libcpp.vector cimport vector

from kvcore._hot.batches cimport Batch, BatchReader
from kvcore._hot.inputs cimport (
    FetchBuffer,
    FetchBuffers,
    RaggedKVCacheInputs,
    lengths_of,
    make_max_lengths,
    table_of,
)
from kvcore._hot.reservations cimport expect_moves
from kvcore._hot.settler cimport (
    AGAIN,
    DONE,
    WAIT,
    Call,
    Settler,
    begin_call,
    int32_rows,
    name_row,
    room_for,
)
from kvcore.cpp cimport (
    FetchResult,
    FetchStatus,
    FetchTarget,
    PageSwap,
    RequestBatch,
    Transfers,
)

import logging

from kvcore.errors import InsufficientBlocksError

cnp.import_array()

log = logging.getLogger("kvcore")


# ---- fetch ---------------------------------------------------------------------------------------

@cython.final
@cython.no_gc_clear  # what dies with a manager may still ask
cdef class InputMaker:
    """Make the inputs of every device out of the tables that a fetch writes.

    Parameters
    ----------
    shards : list of list of (blocks, scales)
        The pools by replica and device in it.
    gpus : kvcore.backends.protocol.DevicePools, or None
        None where no pool is on a GPU.
    """

    def __cinit__(self, list shards not None, object gpus, int64_t total_pages):
        self.shards = shards
        self.gpus = gpus
        self.total_pages = total_pages
        self.num_replicas = <int32_t>len(shards)
        self.buffers = FetchBuffers(
            self.num_replicas, <uint32_t>total_pages, None if gpus is None else gpus.pinned
        )

    cdef int choose_buffers(self, list taken, vector[FetchTarget]& targets) except -1:
        """Have a fetch write to buffers of the sizes that it has said it needs."""
        cdef FetchBuffer buffer
        cdef int32_t r
        for r in range(self.num_replicas):
            buffer = self.buffers.take(r, targets[r].rows, targets[r].width)
            taken.append(buffer)
            targets[r].table = buffer.rows
            targets[r].cache_lengths = <uint32_t*>cnp.PyArray_DATA(buffer.lengths)
            targets[r].new_lengths = <uint32_t*>cnp.PyArray_DATA(buffer.unread_new_lengths())
        return 0

    cdef list outputs(self, list taken, vector[FetchTarget]& targets, int64_t num_steps):
        """The inputs of every device over the buffers that were taken last."""
        cdef list inputs = []
        cdef RaggedKVCacheInputs each
        cdef FetchBuffer buffer
        cdef cnp.npy_intp shape[2]
        cdef cnp.npy_intp strides[2]
        cdef Py_ssize_t first = len(taken) - self.num_replicas
        cdef int32_t r
        cdef int32_t shard = 0
        strides[1] = sizeof(uint32_t)
        for r in range(self.num_replicas):
            buffer = <FetchBuffer>taken[first + r]
            shape[0] = targets[r].rows
            shape[1] = targets[r].width
            strides[0] = buffer.rows.stride() * sizeof(uint32_t)
            table = table_of(buffer, shape, strides)
            lengths = lengths_of(buffer, shape, strides + 1)
            limits = make_max_lengths(targets[r].longest_new, targets[r].longest_active, num_steps)
            for blocks, scales in <list>self.shards[r]:
                if self.gpus is None:
                    each = RaggedKVCacheInputs(blocks, lengths, table, limits, scales)
                else:
                    staged = self.gpus.stage(shard, lengths, table)
                    each = RaggedKVCacheInputs(blocks, *staged, limits, scales)
                    shard += 1
                each._new_lengths = buffer.new_lengths
                inputs.append(each)
        return inputs


cdef struct FetchCall:
    Call call
    PyObject* maker  # an InputMaker, which the caller holds
    vector[FetchTarget] targets
    FetchResult result


cdef int fetch_once(Settler settler, Call* call, object taken) except -1:
    cdef FetchCall* fetch = <FetchCall*>call
    if fetch.result.status == FetchStatus.kGrow:
        (<InputMaker>fetch.maker).choose_buffers(<list>taken, fetch.targets)
    fetch.result = settler.native.fetch(
        RequestBatch(call.rows, call.n), call.steps, fetch.targets.data(),
        room_for(settler, call),
    )
    if fetch.result.status == FetchStatus.kPending:
        call.waits_for = call.rows[fetch.result.row].sequence
        return WAIT
    return AGAIN if fetch.result.status == FetchStatus.kGrow else DONE


cdef list fetch(
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
    if keep:
        expect_moves(contexts, &requests, &fetch.call)
    if maker.gpus is not None:
        contexts = contexts[:]  # pinned memory is allocated by Python code
    fetch.maker = <PyObject*>maker
    fetch.targets.resize(maker.num_replicas)
    fetch.result.status = FetchStatus.kGrow  # from no buffers to the first ones
    try:
        contexts = settler.carry_out(fetch_once, &fetch.call, contexts, taken)
        if fetch.result.status == FetchStatus.kNoSpace:
            raise InsufficientBlocksError(
                f"request {contexts[fetch.result.row].request_id!r} needs {fetch.result.needed} "
                f"more pages, {fetch.result.available} of {maker.total_pages} are free; "
                f"release a request first"
            )
        inputs = maker.outputs(taken, fetch.targets, steps)
    finally:
        for buffer in taken:
            buffer.busy = False
    reader.record(&requests, contexts, fetch.call.n)
    return inputs


# ---- commit --------------------------------------------------------------------------------------

cdef struct CommitCall:
    Call call
    vector[PageSwap] swaps
    Transfers stores


cdef int commit_once(Settler settler, Call* call, object own) except -1:
    cdef CommitCall* commit = <CommitCall*>call
    cdef Transfers* stores = NULL
    if settler.mover is not None:
        stores = &commit.stores
    settler.native.commit(RequestBatch(call.rows, call.n), commit.swaps, stores)
    return DONE


cdef cnp.ndarray commit(BatchReader reader, Settler settler, object batch):
    cdef Batch requests
    cdef CommitCall commit
    cdef list keep = []
    cdef list contexts = reader.read(batch, &requests, keep)
    begin_call(
        &commit.call, name_row, requests.rows.data(), <int64_t>requests.rows.size(), 0
    )
    contexts = settler.carry_out(commit_once, &commit.call, contexts, None)
    if commit.stores.ticket != 0:
        store(settler, &commit.stores, contexts)
    reader.record(&requests, contexts, commit.call.n)
    return swaps_array(commit.swaps)


cdef int store(Settler settler, Transfers* transfers, list contexts) except -1:
    """Store pages in the host tier; what it cannot take, it does not have."""
    try:
        settler.settle(transfers, NULL, contexts)
    except Exception:
        log.warning(
            "%d pages were not stored in the host tier", transfers.tier_moves.size(),
            exc_info=True,
        )
    return 0


cdef cnp.ndarray swaps_array(const vector[PageSwap]& swaps):
    """int32 [n, 3]: batch row, column, page."""
    cdef cnp.ndarray out = int32_rows(<int64_t>swaps.size(), 3)
    cdef int32_t* data = <int32_t*>cnp.PyArray_DATA(out)
    cdef size_t i
    for i in range(swaps.size()):
        data[3 * i] = swaps[i].row
        data[3 * i + 1] = swaps[i].column
        data[3 * i + 2] = swaps[i].page
    return out
