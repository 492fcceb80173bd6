# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
cimport numpy as cnp
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp.vector cimport vector

from kvcore.cpp cimport (
    CacheManager,
    RequestPriority,
    RequestView,
    SequenceHandle,
    StandIns,
    TokenId,
    string_view,
)
from kvcore.cpp cimport PrefixTree as CppPrefixTree

cdef extern from "Python.h":
    char* PyBytes_AS_STRING(object o)
    Py_ssize_t PyBytes_GET_SIZE(object o)
    # Returns a borrowed reference: no reference count changes per row of a batch.
    PyObject* PyList_GET_ITEM(object list, Py_ssize_t i)
    ctypedef struct PyTypeObject:
        pass
    PyTypeObject* Py_TYPE(PyObject* o)
    bint PyObject_TypeCheck(PyObject* o, PyTypeObject* type) noexcept
    # Takes a borrowed pointer: an object argument would add a reference to the count.
    Py_ssize_t Py_REFCNT(PyObject* o)

cdef extern from *:
    """
    #if defined(__GNUC__)
    #define KVCORE_PREFETCH(address) __builtin_prefetch(address)
    #else
    #define KVCORE_PREFETCH(address) ((void)(address))
    #endif
    """
    void KVCORE_PREFETCH(const void* address) noexcept


# ---- arguments: contexts/arguments.pxi -----------------------------------------------------------

cdef int64_t INT32_HIGH

cdef int64_t as_int(object value, str name) except? -1
cdef cnp.ndarray as_tokens(object tokens)
cdef int64_t tokens_ahead(object lookahead) except -1
cdef int32_t* room_in(cnp.ndarray out) except NULL
cdef bytes make_namespace(object extra_key, object cache_salt)
# For contexts and context-like objects; their Python code may run.
cdef object no_context(object item)
cdef object id_of(object context)


# The C++ name of a prefix-cache namespace; None for the default namespace.
cdef inline bytes namespace_of(object extra_key, object cache_salt):
    if extra_key is None and cache_salt is None:
        return None
    return make_namespace(extra_key, cache_salt)


# A view of a name for C++; valid as long as `name` lives.
cdef inline string_view name_view(bytes name) noexcept:
    if name is None:
        return string_view()
    return string_view(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))


# ---- extra keys: contexts/extra_keys.pxi ---------------------------------------------------------

# The stand-ins of the process. Only ids up to HIGHEST_STAND_IN may be stand-ins.
cdef StandIns* stand_ins
cdef int32_t HIGHEST_STAND_IN
# True after the first use of extra keys in this process; until that use no token is checked.
cdef bint keys_in_use


# A token of a request that the prefix tree stores as another id.
cdef struct ShownToken:
    int64_t position
    int32_t stand_in


@cython.final
cdef class ExtraKeys:
    cdef list keys  # (start, length, bytes), normalised; ``cut`` removes keys at the end
    cdef cnp.ndarray shown  # int32 [at least the tokens]: the ids for the prefix tree
    cdef vector[ShownToken] held  # sorted by position

    cdef int give_up(self, size_t first) noexcept
    cdef const int32_t* tokens(self) noexcept
    cdef int append(self, const int32_t* tokens, int64_t n, int64_t end) except -1
    cdef int cut(self, int64_t end) except -1


# The trees of one manager, or a single PrefixTree, and whether extra keys were used with them.
@cython.final
cdef class KeyedTrees:
    cdef object core  # owns `manager`; None if this object owns `tree`
    cdef CacheManager* manager
    cdef CppPrefixTree* tree
    cdef bint is_keyed
    cdef object __weakref__

    cdef int find_stand_ins(self, vector[TokenId]& found) except -1
    cdef int expect_keys(self) except -1


# `core` owns `manager`.
cdef KeyedTrees trees_of_manager(object core, CacheManager* manager)
cdef KeyedTrees trees_of(CppPrefixTree* tree)


# Checks extra keys; None without keys. `whole`: no key may extend past the n tokens.
cdef inline tuple as_extra_keys(object given, int64_t n, bint whole):
    return None if given is None else checked_keys(given, n, whole)


cdef tuple checked_keys(object given, int64_t n, bint whole)
cdef tuple keys_in_front(list keys, int64_t end)
# The tokens of a request with extra keys; `capacity` has room for later tokens.
cdef ExtraKeys show_tokens(tuple keys, const int32_t* tokens, int64_t n, int64_t capacity)


# The tokens of a query, up to the first extra key that these trees do not have.
cdef inline cnp.ndarray shown_of(KeyedTrees trees, object extra_keys, cnp.ndarray tokens):
    if extra_keys is None and not trees.is_keyed:
        return tokens
    return look_up_keys(trees, extra_keys, tokens)


cdef cnp.ndarray look_up_keys(KeyedTrees trees, object extra_keys, cnp.ndarray tokens)
# ValueError if a token may be a stand-in.
cdef int require_plain(const int32_t* tokens, int64_t first, int64_t end) except -1


# ---- terms: contexts/terms.pxi -------------------------------------------------------------------

@cython.final
cdef class Terms:
    cdef RequestPriority native
    cdef object priority
    cdef object ttl
    cdef tuple retention
    cdef object tenant  # a str, or None
    cdef object returns_in  # seconds, a str, or None
    cdef int64_t returns  # the same in nanoseconds, UNKNOWN or NEVER


cdef int64_t nanoseconds(object seconds, str name) except? -1
cdef int64_t return_time(object given, str name) except? -1


# ---- contexts: contexts/text_generation.pxi ------------------------------------------------------

cdef class TextGenerationContext:
    # May be subclassed. A manager reads these fields directly, so no subclass can override them.
    # CPython aligns objects of this size to cache lines. The first line has the fields that a walk
    # over an unknown batch reads; the second line has the request for C++, and a step of a known
    # batch reads only this line.
    cdef uint64_t _manager_uid  # manager of the claim; stale if its slot has another generation
    cdef SequenceHandle _recorded  # the claim of this manager that recorded this context
    cdef int32_t _capacity  # room of the buffer in tokens; 0 with extra keys
    cdef int32_t _pending  # not 0 while pages for it are in flight
    cdef bytes _name  # name of the prefix-cache namespace; the request points to its bytes
    cdef cnp.ndarray _buffer
    cdef RequestView _request  # with the claim of the last call
    cdef readonly object request_id
    cdef readonly object extra_key
    cdef readonly object cache_salt
    cdef Terms _terms  # None for the default priority, duration and tenant
    cdef ExtraKeys _keys  # None without; else it owns the tokens to which the request points
    cdef object _past  # the claim of it that ended last, or None; three cache lines in all

    cdef int _make_buffer(self, int64_t capacity) except -1
    cdef int _move_buffer(self, int64_t capacity) except -1
    cdef int _append(self, const int32_t* tokens, int64_t n) except -1
    cdef int _append_shown(self, const int32_t* tokens, int64_t n) except -1
    cdef void _show(self, ExtraKeys keys) noexcept
    cdef int _update(self, int32_t token) except -1


# Changes whenever an address that a batch read earlier may no longer be valid: a context was
# destroyed, so that another object may have its address, or a context moved to another claim.
cdef uint64_t contexts_epoch


cdef inline void change_contexts_epoch() noexcept:
    global contexts_epoch
    contexts_epoch += 1


cdef inline bint is_own(PyObject* item) noexcept:
    return PyObject_TypeCheck(item, <PyTypeObject*>TextGenerationContext)


# A walk over a batch prefetches the context this many rows ahead.
cdef enum:
    AHEAD = 16


cdef inline void prefetch_context(PyObject* item) noexcept:
    KVCORE_PREFETCH(item)
    KVCORE_PREFETCH(<const char*>item + 64)


# ---- objects like contexts: contexts/foreign.pxi -------------------------------------------------

cdef inline bint has_moved(const RequestView& now, const RequestView& given) noexcept:
    return now.start != given.start or now.active != given.active


# Python code of the objects may run and change values that were read before.
# The hint of any context, or None for "no context", as return_time.
cdef int64_t return_of(object context) except? -1
cdef object read_foreign(object context, RequestView* view, list keep)
cdef int move_indices(object context, const RequestView& to, const RequestView& given) except -1
cdef int check_settable(object context) except -1


# ---- inputs of kernels: contexts/inputs.pxi ------------------------------------------------------

@cython.final
cdef class PoolViews:
    cdef tuple arrays  # (array, view) for each array of the pool; None before the first use
    cdef dict rows  # rows of a layer by layer; a new dict after an array has changed

    cdef bint are_current(self)


cdef class RaggedKVCacheInputs:
    cdef readonly object blocks
    cdef readonly object cache_lengths
    cdef readonly object lookup_table
    cdef readonly object max_lengths
    cdef readonly object kv_scales
    cdef object _tables  # the tables of all bundles; None with one bundle
    cdef tuple _states  # slots by State group; None without states
    cdef readonly object _layers  # the LayerMap; None without groups
    cdef readonly object _loads  # loads of layers from the host tier; None without
    cdef readonly object _fetched  # event after the copies of the arrays to a GPU; None without
    cdef cnp.ndarray _new_lengths  # uint32 of a fetch, of at least B rows; None if unknown
    cdef cnp.ndarray _row_offsets  # computed at the first access
    cdef PoolViews _views  # views of the pool, shared by all inputs over it; None before the first
    cdef dict _bound  # layers that kvcore.ops has bound to the batch; None before the first


# Makes inputs without the argument parsing of the constructor.
cdef inline RaggedKVCacheInputs new_inputs(
    object blocks, object cache_lengths, object lookup_table, object max_lengths, object kv_scales
):
    cdef RaggedKVCacheInputs inputs = RaggedKVCacheInputs.__new__(RaggedKVCacheInputs)
    inputs.blocks = blocks
    inputs.cache_lengths = cache_lengths
    inputs.lookup_table = lookup_table
    inputs.max_lengths = max_lengths
    inputs.kv_scales = kv_scales
    return inputs
