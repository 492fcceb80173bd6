# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
cimport numpy as cnp
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.string cimport string
from libcpp.vector cimport vector

from kvcore.cpp cimport (
    CacheManager,
    FetchTarget,
    LookupTable,
    PinHandle,
    RequestView,
    SequenceHandle,
    Transfers,
    TreeNode,
)
from kvcore.cpp cimport PageCopier as CppPageCopier
from kvcore.cpp cimport PrefixHandle as CppPrefixHandle
from kvcore.cpp cimport PrefixTree as CppPrefixTree


@cython.final
cdef class TextGenerationContext:
    # What a step reads comes first, to share cache lines: the request as C++ sees it, with the
    # claim it was last seen with; stale when the manager's slot has another generation.
    cdef uint64_t _manager_uid
    cdef int64_t _capacity
    cdef RequestView _request
    cdef SequenceHandle _recorded  # the claim of that manager that knows this context
    cdef bytes _name  # of the prefix-cache namespace, whose bytes the request points to
    cdef cnp.ndarray _buffer
    cdef readonly object request_id
    cdef readonly object extra_key
    cdef readonly object cache_salt

    cdef int _make_buffer(self, int64_t capacity) except -1
    cdef int _move_buffer(self, int64_t capacity) except -1
    cdef int _append(self, const int32_t* tokens, int64_t n) except -1
    cdef int _update(self, int32_t token) except -1


cdef class RaggedKVCacheInputs:
    cdef readonly object blocks
    cdef readonly object cache_lengths
    cdef readonly object lookup_table
    cdef readonly object max_lengths
    cdef readonly object kv_scales
    cdef cnp.ndarray _new_lengths  # uint32 of a fetch, of at least B rows; None where unknown
    cdef cnp.ndarray _row_offsets  # once asked for


@cython.final
cdef class _TableMemory:
    cdef cnp.ndarray array
    cdef bint is_exported


cdef class _FetchBuffer:
    cdef cnp.ndarray memory  # of both where it is pinned, else None
    cdef cnp.ndarray table
    cdef cnp.ndarray lengths
    cdef cnp.ndarray new_lengths  # held by the inputs handed out
    cdef _TableMemory held  # by the tables handed out
    cdef LookupTable* rows
    cdef bint busy  # a fetch that is not over writes it
    # Arrays handed out last, to be handed out again when nobody holds them any more.
    cdef cnp.ndarray last_table
    cdef cnp.ndarray last_lengths

    cdef bint is_free(self)
    cdef cnp.ndarray unread_new_lengths(self)
    cdef int take(self) except -1


cdef class PinnedPrefix:
    cdef readonly int64_t num_tokens
    cdef PagedHotPath _manager
    cdef PinHandle _pin
    cdef bint _released


# The requests of a call: pointers into contexts, or to the views of foreign ones.
cdef struct Batch:
    vector[RequestView*] rows
    vector[RequestView] foreign
    vector[RequestView] given  # the foreign ones, as their contexts know them
    uint64_t epoch  # of its contexts; 0 when some are foreign
    bint is_known  # the batch that was kept last: its contexts are recorded
    Py_ssize_t first_new  # rows whose contexts may have to be recorded
    Py_ssize_t end_new


@cython.final
cdef class _Claim:
    cdef object request_id
    cdef Py_hash_t hashed
    cdef SequenceHandle sequence
    cdef int32_t replica
    cdef bint is_entered  # the table has had it
    cdef bint is_live
    cdef object context  # that it was used with last


# What is known of a claim by the slot of its sequence; of none, generation 0. Nobody keeps a
# pointer to one while Python code runs.
cdef struct ClaimSlot:
    uint32_t generation
    PyObject* context  # the claim's, which holds it


cdef class ClaimTable:
    cdef readonly object _core
    cdef CacheManager* _native
    cdef uint64_t _uid
    cdef bint _is_made
    cdef dict _claims
    cdef uint64_t _insertions  # into it
    cdef list _by_slot  # the claims, or None
    cdef vector[ClaimSlot] _slots
    cdef vector[RequestView*] _last  # batch that was done with
    cdef uint64_t _last_epoch
    cdef int32_t _num_replicas
    cdef bint _checks
    cdef readonly object _gpus  # kvcore.gpu_pools.GpuPools, or None
    cdef object _listener  # kvcore.zmq_reset.ResetListener, or None

    cdef _Claim _claim_of(self, object request_id)
    cdef SequenceHandle _find(self, object request_id) except *
    cdef int _check(self) except -1
    cdef int32_t _replica(self, object replica_idx) except -1
    cdef int32_t _chosen_replica(self, object replica_idx) except -1
    cdef uint64_t _require_unclaimed(self, _Claim claim) except? 0
    cdef int _insert(self, _Claim claim, uint64_t seen) except -1
    cdef int _begin(self, _Claim claim, SequenceHandle sequence) except -1
    cdef int _drop(self, _Claim claim) except -1
    cdef int _end(self, _Claim claim) except -1


cdef class Batches(ClaimTable):
    cdef RequestView* _own(self, TextGenerationContext own) except NULL
    cdef int _foreign_view(self, object context, RequestView* view, list keep) except -1
    cdef list _read(self, object batch, Batch* rows, list keep)
    cdef int _look_up(self, list contexts, Batch* rows, list keep) except -1
    cdef void _remember(self, Batch* rows) noexcept
    cdef int _keep(self, Batch* rows, list contexts, int64_t done) except -1
    cdef int _record(self, object context, SequenceHandle sequence) except -1
    cdef bint _is_last(self, list batch, const vector[RequestView*]& last) noexcept
    cdef bint _read_own(self, list batch, Batch* rows) except -1
    cdef bint _is_as_read(self, list batch, const vector[RequestView*]& read) noexcept
    cdef int _check_settable(self, object context) except -1


cdef class Copies(Batches):
    cdef bint _copies_itself
    cdef CppPageCopier* _native_copier  # of _copier, where that is the library's own
    cdef readonly object _copier
    cdef readonly object _mover  # None without a host tier

    cdef Transfers* _room_for(self, Transfers* transfers) noexcept nogil
    cdef int _perform(self, Transfers* transfers) except -1
    cdef list _settle(self, Transfers* transfers, RequestView** rows, list contexts)
    cdef int _take_back(self, const RequestView* request) except -1
    cdef int _write_back(
        self, object context, const RequestView& now, const RequestView& given
    ) except -1
    cdef int _settle_owed(self, SequenceHandle sequence) except -1


cdef class Forks(Copies):
    cdef bint _fork(self, object parent_id, list children) except -1
    cdef int _adopt(
        self, list claims, list children, Batch* requests, int32_t replica
    ) except -1
    cdef int _disown(self, list claims, list children, Batch* requests) except -1
    cdef int _read_parent(self, _Claim parent, RequestView* view, list keep) except -1
    cdef list _describe_children(self, list children, Batch* requests, list keep)
    cdef int _insert_all(self, list claims) except -1


cdef class Reservations(Forks):
    cdef int _expect_moves(self, list contexts, Batch* requests) except -1
    cdef int _write_back_foreign(self, list contexts, Batch* requests) except -1


cdef class PagedHotPath(Reservations):
    cdef int32_t _page_size
    cdef int64_t _total_pages
    cdef list _buffers
    cdef readonly list _shards

    cdef int _store(self, Transfers* transfers, list contexts) except -1
    cdef _FetchBuffer _buffer(self, int32_t replica, int64_t rows, int64_t width)
    cdef int _choose_buffers(self, list buffers, vector[FetchTarget]& targets) except -1
    cdef list _outputs(self, list buffers, vector[FetchTarget]& targets, int64_t num_steps)


cdef class PrefixHandle:
    cdef PrefixTree _tree
    cdef CppPrefixHandle _handle
    cdef TreeNode* _node
    cdef int64_t _pins

    cdef int _pin(self) except -1
    cdef int _unpin(self) except -1


cdef class PrefixTree:
    cdef CppPrefixTree* _native

    cdef int _check_own(self, PrefixHandle handle) except -1
