# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3
cimport cython
cimport numpy as cnp
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint64_t
from libcpp.vector cimport vector

from kvcore.cpp cimport (
    CacheManager,
    RequestTerms,
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
    # Borrowed, without counting references per row of a batch.
    PyObject* PyList_GET_ITEM(object list, Py_ssize_t i)
    ctypedef struct PyTypeObject:
        pass
    PyTypeObject* Py_TYPE(PyObject* o)
    bint PyObject_TypeCheck(PyObject* o, PyTypeObject* type) noexcept
    # Of a borrowed pointer: an object argument would count the argument itself.
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
# Of contexts and objects like them, whose code may run.
cdef object no_context(object item)
cdef object id_of(object context)


# The C++ name of a prefix-cache namespace; None for the default one.
cdef inline bytes namespace_of(object extra_key, object cache_salt):
    if extra_key is None and cache_salt is None:
        return None
    return make_namespace(extra_key, cache_salt)


# What C++ reads of a name, for as long as `name` lives.
cdef inline string_view name_view(bytes name) noexcept:
    if name is None:
        return string_view()
    return string_view(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))


# ---- extra keys: contexts/extra_keys.pxi ---------------------------------------------------------

# Of the process. Ids up to the second one may be stand-ins.
cdef StandIns* stand_ins
cdef int32_t HIGHEST_STAND_IN
# True since extra keys were first used in this process: before, nothing has to be looked at.
cdef bint keys_in_use


# A token of a request that is shown to the prefix tree as another id.
cdef struct ShownToken:
    int64_t position
    int32_t stand_in


@cython.final
cdef class ExtraKeys:
    cdef list keys  # (start, length, bytes), normalised; cut at the end
    cdef cnp.ndarray shown  # int32 [at least the tokens]: what the prefix tree sees of them
    cdef vector[ShownToken] held  # by position

    cdef int give_up(self, size_t first) noexcept
    cdef const int32_t* tokens(self) noexcept
    cdef int append(self, const int32_t* tokens, int64_t n, int64_t end) except -1
    cdef int cut(self, int64_t end) except -1


# The trees of one manager, or one tree by itself, and whether extra keys were used with them.
@cython.final
cdef class KeyedTrees:
    cdef object core  # whose manager it is; None for a tree, which is its own
    cdef CacheManager* manager
    cdef CppPrefixTree* tree
    cdef bint is_keyed
    cdef object __weakref__

    cdef int find_stand_ins(self, vector[TokenId]& found) except -1
    cdef int expect_keys(self) except -1


cdef KeyedTrees trees_of_manager(object core)
cdef KeyedTrees trees_of(CppPrefixTree* tree)


# None without keys. `whole`: none may reach behind the n tokens.
cdef inline tuple as_extra_keys(object given, int64_t n, bint whole):
    return None if given is None else checked_keys(given, n, whole)


cdef tuple checked_keys(object given, int64_t n, bint whole)
cdef tuple keys_in_front(list keys, int64_t end)
# The tokens of a request with such keys; `capacity` for what comes behind them.
cdef ExtraKeys show_tokens(tuple keys, const int32_t* tokens, int64_t n, int64_t capacity)


# Of a question: up to the first key that these trees have nothing behind.
cdef inline cnp.ndarray shown_of(KeyedTrees trees, object extra_keys, cnp.ndarray tokens):
    if extra_keys is None and not trees.is_keyed:
        return tokens
    return look_up_keys(trees, extra_keys, tokens)


cdef cnp.ndarray look_up_keys(KeyedTrees trees, object extra_keys, cnp.ndarray tokens)
# ValueError where one may.
cdef int require_plain(const int32_t* tokens, int64_t first, int64_t end) except -1


# ---- terms: contexts/terms.pxi -------------------------------------------------------------------

@cython.final
cdef class Terms:
    cdef RequestTerms native
    cdef object priority
    cdef object ttl
    cdef tuple retention
    cdef object tenant  # a str, or None


cdef int64_t nanoseconds(object seconds, str name) except? -1


# ---- contexts: contexts/text_generation.pxi ------------------------------------------------------

cdef class TextGenerationContext:
    # May be subclassed: what a manager reads of it is here, and cannot be overridden.
    # Two cache lines, where CPython puts objects of this size: what a walk that does not know the
    # batch reads, then the request as C++ sees it, which is all that a step of a known batch reads.
    cdef uint64_t _manager_uid  # of the claim below; stale when its slot has another generation
    cdef SequenceHandle _recorded  # the claim of that manager that knows this context
    cdef int32_t _capacity  # tokens that can be appended in place: none with extra keys
    cdef int32_t _pending  # pages for it are on their way
    cdef bytes _name  # of the prefix-cache namespace, whose bytes the request points to
    cdef cnp.ndarray _buffer
    cdef RequestView _request  # with the claim it was last seen with
    cdef readonly object request_id
    cdef readonly object extra_key
    cdef readonly object cache_salt
    cdef Terms _terms  # None where it asks for nothing
    cdef ExtraKeys _keys  # None without; else what the request's tokens point to
    cdef object _past  # the claim of it that ended last, or None; three lines in all

    cdef int _make_buffer(self, int64_t capacity) except -1
    cdef int _move_buffer(self, int64_t capacity) except -1
    cdef int _append(self, const int32_t* tokens, int64_t n) except -1
    cdef int _append_shown(self, const int32_t* tokens, int64_t n) except -1
    cdef void _show(self, ExtraKeys keys) noexcept
    cdef int _update(self, int32_t token) except -1


# Changes whenever a context may no longer be what a batch read earlier took it for: one is gone, so
# that another object may have its address, or has moved to another claim.
cdef uint64_t contexts_epoch


cdef inline void change_contexts_epoch() noexcept:
    global contexts_epoch
    contexts_epoch += 1


cdef inline bint is_own(PyObject* item) noexcept:
    return PyObject_TypeCheck(item, <PyTypeObject*>TextGenerationContext)


# Of a batch, contexts this far ahead are asked for early.
cdef enum:
    AHEAD = 16


cdef inline void prefetch_context(PyObject* item) noexcept:
    KVCORE_PREFETCH(item)
    KVCORE_PREFETCH(<const char*>item + 64)


# ---- objects like contexts: contexts/foreign.pxi -------------------------------------------------

cdef inline bint has_moved(const RequestView& now, const RequestView& given) noexcept:
    return now.start != given.start or now.active != given.active


# Their code may run and change whatever was read.
cdef object read_foreign(object context, RequestView* view, list keep)
cdef int move_indices(object context, const RequestView& to, const RequestView& given) except -1
cdef int check_settable(object context) except -1


# ---- what kernels get: contexts/inputs.pxi -------------------------------------------------------

cdef class RaggedKVCacheInputs:
    cdef readonly object blocks
    cdef readonly object cache_lengths
    cdef readonly object lookup_table
    cdef readonly object max_lengths
    cdef readonly object kv_scales
    cdef object _tables  # of all bundles; None where there is one
    cdef tuple _states  # slots by State group; None without
    cdef readonly object _layers  # where layers lie, with groups; else None
    cdef readonly object _loads  # by which layers arrive from the host tier; else None
    cdef readonly object _fetched  # the event that the arrays are there on a GPU; else None
    cdef cnp.ndarray _new_lengths  # uint32 of a fetch, of at least B rows; None where unknown
    cdef cnp.ndarray _row_offsets  # once asked for


# As the class makes them, without reading arguments.
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
