# SPDX-License-Identifier: Apache-2.0
# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True, auto_pickle=False, autotestdict=False
"""The prefix tree, the index of the pages of workers, and the keys of pages."""

cimport cython
cimport numpy as cnp
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.number cimport PyIndex_Check
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy
from libcpp.memory cimport unique_ptr
from libcpp.optional cimport optional
from libcpp.string cimport string
from libcpp.unordered_map cimport unordered_map
from libcpp.unordered_set cimport unordered_set
from libcpp.utility cimport move
from libcpp.vector cimport vector

from kvcore.cpp cimport (
    BlockId,
    CppPrefixIndex,
    DuplicatePage,
    EvictionConfig,
    EvictionPolicy,
    ForgottenListener,
    KeyOptions,
    KeyScheme,
    Medium,
    NamespaceParts,
    PageKey,
    PlacedKey,
    PrefixMatch,
    Retention,
    Sha256,
    TokenId,
    TreeBranches,
    TreeNode,
    TreePosition,
    byte,
    const_node_ptr,
    embedding_digests,
    eviction_order,
    kKeySchemeVersion,
    make_policy,
    put_array,
    put_bytes,
    put_integer,
    put_nil,
    put_text,
    read_namespace_name,
    string_view,
)
from kvcore.cpp cimport KeyChain as CppKeyChain
from kvcore.cpp cimport PrefixTree as CppPrefixTree
from kvcore.cpp cimport page_key as cpp_page_key
from kvcore.cpp cimport root_key as cpp_root_key
from kvcore.native.contexts cimport (
    INT32_HIGH,
    ExtraKeys,
    KeyedTrees,
    PyBytes_AS_STRING,
    PyBytes_GET_SIZE,
    as_extra_keys,
    as_int,
    as_tokens,
    name_view,
    namespace_of,
    require_plain,
    room_in,
    show_tokens,
    shown_of,
    tokens_ahead,
    trees_of,
)

import numpy as np

from kvcore.errors import InvalidHandleError, KVCacheError
from kvcore.policies import resolved
from kvcore.results import PrefixRun

cnp.import_array()

include "tree/prefix_handle.pxi"
include "tree/tokens.pxi"
include "tree/runs.pxi"
include "tree/forget.pxi"
include "tree/prefix_tree.pxi"
include "tree/worker_pages.pxi"
include "tree/key_arguments.pxi"
include "tree/page_keys.pxi"
