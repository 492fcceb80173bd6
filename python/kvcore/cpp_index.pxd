# SPDX-License-Identifier: Apache-2.0
# distutils: language = c++
"""The public C++ headers beneath the manager: tables, rows, policies, prefix trees, keys."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport unique_ptr
from libcpp.optional cimport optional
from libcpp.string cimport string
from libcpp.vector cimport vector


cdef extern from "kvcore/python_errors.hpp" namespace "kvcore::python" nogil:
    void translate_exception()


cdef extern from "kvcore/types.hpp" namespace "kvcore" nogil:
    ctypedef int32_t BlockId
    ctypedef int32_t TokenId
    cdef cppclass SequenceHandle:
        uint32_t index
        uint32_t generation


cdef extern from "<string_view>" namespace "std" nogil:
    cdef cppclass string_view:
        string_view()
        string_view(const char* data, size_t size)
        const char* data()
        size_t size()


cdef extern from "kvcore/request.hpp" namespace "kvcore" nogil:
    cdef cppclass LookupTable:
        # data: [max_rows, stride], the caller's, as long as the table lives
        LookupTable(uint32_t* data, int64_t max_rows, int64_t stride, uint32_t unassigned)
        int64_t max_rows()
        int64_t stride()
        void forget()


cdef extern from "<cstddef>" namespace "std" nogil:
    ctypedef unsigned char byte "std::byte"
    ctypedef const unsigned char const_byte "const std::byte"


# Bytes between the pools of several sequences and contiguous rows; the caller checks all bounds.
cdef extern from "kvcore/paged_batch.hpp" namespace "kvcore" nogil:
    cdef cppclass TokenShape:
        int64_t heads
        int64_t head_bytes
    cdef cppclass TokenRows[Byte]:
        Byte* data
        int64_t token_stride
        int64_t head_stride
    cdef cppclass PagedRows[Byte]:
        Byte* data
        int64_t block_stride
        int64_t token_stride
        int64_t head_stride
        int64_t block_size
        const BlockId* blocks
        int64_t offset(int64_t token)
    void append_rows(
        TokenShape shape, const PagedRows[byte]& pool, int64_t first,
        const TokenRows[const_byte]& source, int64_t count
    )
    void gather_rows(
        TokenShape shape, const PagedRows[const_byte]& pool, int64_t first,
        const TokenRows[byte]& destination, int64_t count
    )


cdef extern from "kvcore/eviction.hpp" namespace "kvcore" nogil:
    cdef cppclass EvictionPolicy:
        pass
    cdef cppclass Retention:
        Retention()
        Retention(int32_t priority)
        Retention(int32_t priority, int64_t until)


cdef extern from "kvcore/eviction.hpp" namespace "kvcore" nogil:
    cdef enum class EvictionOrder:
        pass
    cdef cppclass EvictionConfig:
        EvictionOrder order
        int32_t attention_tokens
    EvictionOrder eviction_order(string_view name) except +translate_exception
    unique_ptr[EvictionPolicy] make_policy(
        const EvictionConfig& config, int32_t page_size
    ) except +translate_exception


cdef extern from "kvcore/extra_keys.hpp" namespace "kvcore" nogil:
    cdef cppclass NamespaceParts:
        optional[string_view] extra_key
        optional[string_view] cache_salt
    NamespaceParts read_namespace_name(string_view name)


cdef extern from "kvcore/prefix_tree.hpp" namespace "kvcore" nogil:
    cdef cppclass ForgottenListener:
        pass


cdef extern from "kvcore/prefix_tree.hpp" namespace "kvcore" nogil:
    cdef cppclass TreeNode:
        pass
    ctypedef const TreeNode* const_node_ptr "const kvcore::TreeNode*"
    cdef cppclass TreePosition:
        TreeNode* node
        int32_t depth
    cdef cppclass PrefixMatch:
        TreePosition at
        TreePosition partial
        int32_t partial_tokens
    cdef cppclass PrefixHandle:
        uint32_t node
        uint32_t generation
        int32_t depth
    cdef cppclass DuplicatePage:
        int32_t index
        BlockId cached
    cdef cppclass TreeBranches "kvcore::PrefixTree::Branches":
        vector[TreeNode*] tops
        vector[TreeNode*] runs
    cdef cppclass PrefixTree:
        PrefixTree(int32_t page_size) except +translate_exception
        PrefixTree(
            int32_t page_size, unique_ptr[EvictionPolicy] policy
        ) except +translate_exception
        int32_t page_size()
        int64_t num_cached()
        int64_t num_evictable() except +translate_exception
        int64_t num_nodes()
        TreeNode* find_namespace(string_view name) except +translate_exception
        TreeNode* open_namespace(string_view name) except +translate_exception
        PrefixMatch match(TreeNode* root, const TokenId* tokens, int64_t n, cbool want_partial)
        void copy_pages(TreePosition at, int32_t first, BlockId* out)
        vector[TokenId] tokens_of(TreePosition at, int32_t first) except +translate_exception
        vector[const_node_ptr] runs() except +translate_exception

        @staticmethod
        int32_t start_of(const TreeNode* node)

        @staticmethod
        int32_t depth_of(const TreeNode* node)

        @staticmethod
        const TreeNode* parent_of(const TreeNode* node)

        @staticmethod
        string_view name_of(const TreeNode* node)

        cbool is_protected(TreePosition at)
        TreeNode* split(TreePosition at) except +translate_exception
        void pin(TreeNode* node) except +translate_exception
        void unpin(TreeNode* node, cbool touch) except +translate_exception
        TreeNode* insert(
            TreeNode* at, const TokenId* tokens, const BlockId* ids, int32_t n,
            vector[DuplicatePage]& duplicates
        ) except +translate_exception
        TreeNode* insert(
            TreeNode* at, const TokenId* tokens, const BlockId* ids, int32_t n,
            vector[DuplicatePage]& duplicates, const Retention& retention
        ) except +translate_exception
        void touch(TreePosition at) except +translate_exception
        void find_tokens_up_to(TokenId highest, vector[TokenId]& out) except +translate_exception
        int64_t evict(int64_t n, BlockId* out) except +translate_exception
        PrefixHandle handle(TreePosition at)
        TreePosition resolve(PrefixHandle handle) except +translate_exception
        TreeBranches find_branches(const vector[TreePosition]& ends) except +translate_exception
        void forget(const TreeBranches& branches)
        int64_t num_forgotten()
        void set_forgotten_listener(ForgottenListener* listener)

        @staticmethod
        TreePosition position(TreeNode* node, int32_t depth)

        void check_integrity() except +translate_exception


cdef extern from "kvcore/extra_keys.hpp" namespace "kvcore" nogil:
    cdef cppclass ExtraKey:
        int64_t length
        string_view bytes
    string stand_in_name(
        TokenId token, const ExtraKey* keys, size_t n
    ) except +translate_exception
    cdef cppclass StandIns:
        StandIns() except +translate_exception
        StandIns(int64_t num_ids, int64_t fewest) except +translate_exception
        TokenId acquire(string_view name) except +translate_exception
        TokenId find(string_view name) except +translate_exception
        string hold(TokenId id) except +translate_exception
        void release(TokenId id) except +translate_exception
        int64_t size()
        cbool is_sweep_due()
        void begin_sweep()
        void end_sweep(const TokenId* held, size_t n)
        void check_integrity() except +translate_exception


# Sink: a std::string.
cdef extern from "kvcore/page_keys.hpp" namespace "kvcore::cbor" nogil:
    void put_integer[Sink](Sink& out, int64_t value) except +
    void put_bytes[Sink](Sink& out, string_view bytes) except +
    void put_text[Sink](Sink& out, string_view text) except +
    void put_array[Sink](Sink& out, uint64_t n) except +
    void put_nil[Sink](Sink& out) except +


cdef extern from "kvcore/page_keys.hpp" namespace "kvcore" nogil:
    cdef cppclass Sha256:
        @staticmethod
        PageKey of(const void* data, size_t size)


cdef extern from "kvcore/page_keys.hpp" namespace "kvcore" nogil:
    int64_t kKeySchemeVersion
    cdef cppclass PageKey:
        uint8_t* data()
        size_t size()
    cdef enum class KeyScheme:
        kKvcore
        kVllm
    cdef cppclass KeyOptions:
        KeyScheme scheme
        string seed
        optional[string] extra_key
        optional[string] cache_salt
        optional[vector[PageKey]] embeddings
    cdef cppclass PlacedKey:
        int64_t start
        int64_t length
        string_view bytes
    PageKey root_key(const KeyOptions& options) except +translate_exception
    PageKey page_key(
        const PageKey& parent, const TokenId* tokens, int64_t n, string_view extra
    )
    vector[PageKey] embedding_digests(
        const byte* rows, int64_t n, int64_t row_bytes, int64_t page_size
    ) except +translate_exception
    cdef cppclass KeyChain:
        KeyChain(int64_t page_size, const KeyOptions& options) except +translate_exception
        KeyChain(const KeyChain& other) except +translate_exception
        void extend(
            const TokenId* tokens, int64_t n, const PlacedKey* extra, size_t num_extra
        ) except +translate_exception
        void truncate(int64_t num_pages) except +translate_exception
        const PageKey& root()
        const vector[PageKey]& keys()
        int64_t page_size()
        int64_t num_tokens()


cdef extern from "kvcore/prefix_index.hpp" namespace "kvcore" nogil:
    cdef enum class Medium(uint8_t):
        kDevice
        kHost
        kStorage
    cdef cppclass CppPrefixIndex "kvcore::PrefixIndex":
        CppPrefixIndex(int32_t num_workers) except +translate_exception
        int32_t num_workers()
        int64_t num_pages()
        int64_t num_pages(int32_t worker) except +translate_exception
        int64_t num_bytes()
        void store(
            int32_t worker, const uint64_t* pages, size_t n, Medium medium
        ) except +translate_exception
        void remove(
            int32_t worker, const uint64_t* pages, size_t n, Medium medium
        ) except +translate_exception
        void clear(int32_t worker) except +translate_exception
        void match(const uint64_t* pages, size_t n, uint8_t media, int32_t* held)
        void check_integrity() except +translate_exception
