# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, autotestdict=False
"""The arguments per request as C values: contexts, tokens, extra keys, arrays; and inputs.

Each topic has an included file. A file needs only the files included before it.
"""

# This check runs before any code that would block for ever in a sub-interpreter. The other modules
# import this module, so they are refused also.
cdef extern from "interpreter.hpp":
    int require_main_interpreter "kvcore::python::require_main_interpreter"() except -1

require_main_interpreter()

cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.number cimport PyIndex_Check, PyNumber_Index
from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport Py_INCREF, PyObject
from cpython.weakref cimport PyWeakref_NewRef
from libc.math cimport floor
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy
from libcpp.queue cimport priority_queue
from libcpp.string cimport string
from libcpp.vector cimport vector

from kvcore.cpp cimport (
    NEVER,
    UNKNOWN,
    CacheManager,
    ExtraKey,
    RequestView,
    RetainedTokens,
    StandIns,
    TokenId,
    stand_in_name,
    string_view,
)
from kvcore.cpp cimport PrefixTree as CppPrefixTree

import sys
from copy import copy
from weakref import WeakSet

import numpy as np

from kvcore.support.dtypes import numpy_dtype

cnp.import_array()

include "contexts/tensors.pxi"
include "contexts/arguments.pxi"
include "contexts/extra_keys.pxi"
include "contexts/terms.pxi"
include "contexts/text_generation.pxi"
include "contexts/update_batch.pxi"
include "contexts/foreign.pxi"
include "contexts/packing.pxi"
include "contexts/inputs.pxi"
