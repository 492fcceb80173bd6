# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libcpp.vector cimport vector

from kvcore._hot.contexts cimport TextGenerationContext, is_own
from kvcore._hot.extra_keys cimport KeyedTrees
from kvcore._hot.terms cimport Terms
from kvcore.cpp cimport CacheManager, RequestHistory, RequestView, SequenceHandle


@cython.final
cdef class Claim:
    cdef object request_id
    cdef Py_hash_t hashed
    cdef SequenceHandle sequence
    cdef int32_t replica
    cdef bint is_entered  # the table has had it
    cdef bint is_live
    cdef object context  # that it was used with last
    cdef RequestHistory history  # of its request, once it has ended


cdef Claim new_claim(object request_id)

# Errors that name the request they are about.
cdef object not_found(object request_id)
cdef object about(object error, object request_id)
cdef object named(object error, list contexts, int64_t first)


# What is known of a claim by the slot of its sequence; of none, generation 0. Nobody keeps a
# pointer to one while Python code runs.
cdef struct ClaimSlot:
    uint32_t generation
    PyObject* context  # the claim's, which holds it


@cython.final
cdef class ClaimTable:
    cdef object core  # whose manager `native` is
    cdef CacheManager* native
    cdef uint64_t manager_uid
    cdef int32_t num_replicas
    cdef dict by_id
    cdef uint64_t num_entered  # into it, ever
    cdef list by_slot  # the claims, or None
    cdef vector[ClaimSlot] slots
    cdef KeyedTrees trees
    cdef dict tenants  # the number of each that has a quota

    cdef int expect_keys(self) except -1
    cdef int tell_terms(self, SequenceHandle sequence, Terms terms) except -1
    cdef Claim lookup(self, object request_id)
    cdef Claim claim_of(self, object request_id)
    cdef SequenceHandle find(self, object request_id) except *
    cdef int claim(self, object request_id, object replica_idx) except -1
    cdef int release(self, Claim claim) except -1
    cdef int32_t replica(self, object replica_idx) except -1
    cdef int32_t chosen_replica(self, object replica_idx) except -1
    cdef uint64_t require_unclaimed(self, Claim claim) except? 0
    cdef int insert(self, Claim claim, uint64_t seen) except -1
    cdef int begin(self, Claim claim, SequenceHandle sequence) except -1
    cdef int drop(self, Claim claim) except -1
    cdef int end(self, Claim claim) except -1
    cdef int record(self, object context, SequenceHandle sequence) except -1


@cython.final
cdef class RowClaims:
    cdef ClaimTable _claims
    cdef list _names
    cdef vector[SequenceHandle] _rows
    cdef int32_t _bundle  # whose pages are asked for


# True when a context knows its present claim with the manager of this id.
cdef inline bint is_claimed(PyObject* item, uint64_t uid, const ClaimSlot* slots) noexcept:
    cdef SequenceHandle sequence = (<TextGenerationContext>item)._request.sequence
    return (
        (<TextGenerationContext>item)._manager_uid == uid
        and slots[sequence.index].generation == sequence.generation
    )


# True when this claim of the manager was used with this context last.
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
