# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, autotestdict=False
"""The calls per request and per step: read Python objects, call C++."""

cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_GetItemWithError
from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_INCREF, PyObject
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.utility cimport move
from libcpp.vector cimport vector

cdef extern from *:
    # Cython's macro: keeps rare code away from the code of every call.
    bint unlikely(bint condition) noexcept nogil

from kvcore.cpp cimport (
    UNKNOWN,
    BatchReserve,
    BlockId,
    ADVICE_FACTORS,
    Advice,
    CacheConfig,
    CacheEvent,
    CacheEventKind,
    CacheManager,
    CallTimes,
    EvictionCounts,
    FetchResult,
    FetchStatus,
    FetchTarget,
    GroupStats,
    LatencyHistogram,
    LookupTable,
    Metrics,
    MissCounts,
    Misses,
    MovedRequest,
    NamespaceParts,
    OwedStatus,
    PageKey,
    PageMove,
    PageSwap,
    PoolStats,
    RequestBatch,
    RequestHistory,
    RequestPriority,
    RequestView,
    ReserveOptions,
    ReserveStatus,
    SequenceHandle,
    SequenceMark,
    StateMove,
    StateStats,
    StoreMoves,
    StoreSearch,
    TenantStats,
    Tier,
    TimedCall,
    TokenId,
    Transfers,
    kFetch,
    kNoCeiling,
    kReserve,
    kReserveBatch,
    kStep,
    read_namespace_name,
    string_view,
    translate_exception,
)
from kvcore.cpp cimport PageCopier as CppPageCopier
from kvcore.cpp cimport ReservePlan as CppReservePlan
from kvcore.native.contexts cimport (
    AHEAD,
    ExtraKeys,
    KeyedTrees,
    PoolViews,
    PyList_GET_ITEM,
    Py_REFCNT,
    RaggedKVCacheInputs,
    Terms,
    TextGenerationContext,
    as_extra_keys,
    as_int,
    as_tokens,
    change_contexts_epoch,
    check_settable,
    contexts_epoch,
    has_moved,
    id_of,
    is_own,
    keys_in_front,
    move_indices,
    name_view,
    namespace_of,
    nanoseconds,
    new_inputs,
    no_context,
    prefetch_context,
    read_foreign,
    require_plain,
    return_of,
    return_time,
    room_in,
    show_tokens,
    shown_of,
    tokens_ahead,
    trees_of_manager,
)

import logging
from typing import Any, NamedTuple

import numpy as np

from kvcore._core import DiskLowerStore, PageCopier
from kvcore.errors import (
    AlreadyClaimedError,
    CapacityError,
    InsufficientBlocksError,
    InvalidHandleError,
    KVCacheError,
    PendingTransfersError,
    RequestNotFoundError,
)
from kvcore.metrics import (
    EvictionMetrics,
    GroupMetrics,
    KVCacheMetrics,
    MissMetrics,
    ReplicaMetrics,
    StateMetrics,
    TenantMetrics,
)
from kvcore.metrics import Misses as MissesOfRequest
from kvcore.native.contexts import explaining
from kvcore.results import ReservePlan, SharedPrefix
from kvcore.support.step_order import StepOrder

cnp.import_array()

include "engine/cache_core.pxi"
include "engine/claims.pxi"
include "engine/batches.pxi"
include "engine/settler.pxi"
include "engine/store_side.pxi"
include "engine/lower_stores.pxi"
include "engine/prefixes.pxi"
include "engine/fetch_buffers.pxi"
include "engine/forks.pxi"
include "engine/reservations.pxi"
include "engine/steps.pxi"
include "engine/guards.pxi"
include "engine/step_engine.pxi"
include "engine/moves.pxi"
include "engine/cache_events.pxi"
