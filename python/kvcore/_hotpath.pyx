# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, autotestdict=False
"""What runs per request and per step: contexts, and the walk of a batch from Python objects to C++.

No decision is made here: the rules live in the C++ library.
"""

# Before anything that such an interpreter waits for without end.
cdef extern from "interpreter.hpp":
    int require_main_interpreter "kvcore::python::require_main_interpreter"() except -1

require_main_interpreter()

cimport cython
cimport numpy as cnp
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.number cimport PyIndex_Check, PyNumber_Index
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport Py_INCREF, PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.string cimport string
from libcpp.vector cimport vector

from kvcore.cpp cimport (
    BlockId,
    BatchReserve,
    CacheManager,
    DuplicatePage,
    FetchResult,
    FetchStatus,
    FetchTarget,
    LookupTable,
    MovedRequest,
    OwedStatus,
    PageMove,
    PageSwap,
    RequestBatch,
    RequestView,
    ReserveStatus,
    SequenceHandle,
    Tier,
    Transfers,
    TreeNode,
    TreePosition,
    string_view,
)
from kvcore.cpp cimport PageCopier as CppPageCopier
from kvcore.cpp cimport PrefixTree as CppPrefixTree

import logging

import numpy as np

from kvcore._core import PageCopier
from kvcore.errors import (
    AlreadyClaimedError,
    CapacityError,
    InsufficientBlocksError,
    InvalidHandleError,
    PendingTransfersError,
    RequestNotFoundError,
)
from kvcore.metrics import KVCacheMetrics
from kvcore.plans import ReservePlan, SharedPrefix

cnp.import_array()

log = logging.getLogger("kvcore")

cdef extern from "Python.h":
    # Of a borrowed pointer: an object argument would count the argument itself.
    Py_ssize_t Py_REFCNT(PyObject* o)
    # Borrowed, without counting references per row of a batch.
    PyObject* PyList_GET_ITEM(object list, Py_ssize_t i)
    void* Py_TYPE(PyObject* o)
    char* PyBytes_AS_STRING(object o)
    PyObject** PySequence_Fast_ITEMS(object o)
    bint PyLong_CheckExact(PyObject* o)
    Py_ssize_t PyBytes_GET_SIZE(object o)

cdef extern from *:
    """
    #include "kvcore/name_space.hpp"

    #if defined(__GNUC__)
    #define KVCORE_PREFETCH(address) __builtin_prefetch(address)
    #else
    #define KVCORE_PREFETCH(address) ((void)(address))
    #endif

    static std::string join_namespace(bool has_extra, const std::string& extra, bool has_salt,
                                      const std::string& salt) {
        using Key = std::optional<std::string_view>;
        return kvcore::namespace_name(has_extra ? Key(extra) : Key(),
                                      has_salt ? Key(salt) : Key());
    }
    """
    void KVCORE_PREFETCH(const void* address) noexcept
    string join_namespace(bint has_extra, const string& extra, bint has_salt, const string& salt)

include "_tokens.pxi"
include "_context.pxi"
include "_inputs.pxi"
include "_claims.pxi"
include "_batches.pxi"
include "_copies.pxi"
include "_forks.pxi"
include "_reserve.pxi"
include "_manager.pxi"
include "_row_claims.pxi"
include "_packing.pxi"
include "_prefix_tree.pxi"
