# SPDX-License-Identifier: Apache-2.0
# distutils: language = c++
"""The public C++ headers of kvcore, for Cython. Compile with kvcore.get_include()."""

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
    const int64_t NEVER "kvcore::ReturnTime::kNever"
    const int64_t UNKNOWN "kvcore::ReturnTime::kUnknown"


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


cdef extern from "kvcore/metrics.hpp" namespace "kvcore" nogil:
    cdef cppclass EvictionCounts:
        int64_t policy
        int64_t window
        int64_t unreachable
        int64_t reset
    cdef cppclass GroupStats:
        int64_t held_pages
        int64_t cached_pages
        int64_t holes
        int64_t given_back
        int64_t filled
        int64_t stored_pages
        int64_t loaded_pages
    cdef cppclass TenantStats:
        int64_t held_pages
        int64_t reserved_pages
        int64_t max_pages
        int64_t refused
        int64_t input_tokens
        int64_t cache_tokens
        int64_t generated_tokens
    cdef cppclass Metrics:
        int64_t input_tokens
        int64_t cache_tokens
        int64_t copied_tokens
        int64_t evicted_pages
        EvictionCounts evicted
        EvictionCounts host_evicted
        int64_t peak_used_pages
        int64_t stored_pages
        int64_t loaded_pages
        int64_t loaded_tokens
        int64_t generated_tokens
        int64_t resumed_tokens
        int64_t recomputed_tokens
        int64_t missed_pages
    cdef cppclass PoolStats:
        int64_t total_pages
        int64_t free_pages
        int64_t cached_pages
        int64_t evictable_pages
        int64_t num_sequences
        int64_t host_pages
        int64_t host_cached_pages
        int64_t available_pages()


cdef extern from "kvcore/misses.hpp" namespace "kvcore" nogil:
    cdef cppclass MissedTokens "decltype(kvcore::Misses::tokens)":
        int64_t operator[](size_t)
        size_t size()
    cdef cppclass Misses:
        Misses()
        Misses(const Misses& other) except +translate_exception
        int64_t prompt_tokens
        int64_t cached_tokens
        MissedTokens tokens
        double newest_eviction
        double oldest_eviction
    cdef cppclass MissCounts:
        Misses sum
        int64_t admissions
        int64_t remembered_pages
        int64_t lost_pages


cdef extern from "kvcore/advice.hpp" namespace "kvcore" nogil:
    cdef cppclass FoundTokens "decltype(kvcore::AdviceTokens::found_tokens)":
        double operator[](size_t)
        size_t size()
    cdef cppclass AdviceTokens:
        int64_t prompt_tokens
        int64_t cached_tokens
        FoundTokens found_tokens
        double optimum_tokens
    const FoundTokens ADVICE_FACTORS "kvcore::AdviceTokens::kFactors"
    cdef cppclass Advice:
        vector[AdviceTokens] tenants
        double seconds
        int64_t sample
        int64_t admissions
        int64_t sampled_uses
        int64_t lost_uses


cdef extern from "kvcore/metrics.hpp" namespace "kvcore" nogil:
    cdef enum TimedCall "kvcore::CallTimes::Call":
        kReserve "kvcore::CallTimes::kReserve"
        kReserveBatch "kvcore::CallTimes::kReserveBatch"
        kFetch "kvcore::CallTimes::kFetch"
        kStep "kvcore::CallTimes::kStep"
    cdef cppclass LatencyCounts "kvcore::LatencyHistogram::Counts":
        int64_t operator[](size_t)
        size_t size()
    cdef cppclass LatencyHistogram:
        @staticmethod
        double bound(size_t bucket)
        const LatencyCounts& counts()
    cdef cppclass CallTimes:
        @staticmethod
        double measure_tick()
        void start(double seconds_per_tick)
        void stop()
        int64_t begin()
        void end(TimedCall call, int64_t begun)
        void reset()
        const LatencyHistogram& of(TimedCall call)
        double seconds(TimedCall call)


cdef extern from "kvcore/block_pool.hpp" namespace "kvcore" nogil:
    const int64_t kNoCeiling "kvcore::TenantQuota::kNoCeiling"


cdef extern from "kvcore/page_moves.hpp" namespace "kvcore" nogil:
    cdef enum class Tier:
        kDevice
        kHost
    cdef cppclass PageMove:
        int32_t replica
        BlockId source
        BlockId destination
        int32_t num_tokens
        SequenceHandle sequence
        Tier source_tier
        Tier destination_tier
        BlockId page_in(Tier tier)
        cbool is_load()


cdef extern from "kvcore/cache_manager.hpp" namespace "kvcore" nogil:
    cdef cppclass StateGroup:
        int64_t interval
    cdef cppclass StateMove:
        int32_t replica
        int32_t source
        int32_t destination
        int32_t slot_in(Tier tier)
        cbool is_load()
    cdef cppclass StateStats:
        int64_t total_slots
        int64_t used_slots
        int64_t checkpoints
        int64_t available_slots
        int64_t checkpoint_hits
        int64_t checkpoints_made
        int64_t host_slots
        int64_t host_checkpoints
        int64_t stored_checkpoints
        int64_t loaded_checkpoints
        int64_t evicted_checkpoints


cdef extern from "kvcore/cache_manager.hpp" namespace "kvcore" nogil:
    cdef cppclass CacheConfig:
        int64_t num_pages
        BlockId first_page
        cbool keep_windows
        int32_t page_size
        int64_t max_sequences
        int64_t max_seq_len
        int32_t num_replicas
        cbool prefix_caching
        cbool dedup
        int32_t partial_page_reuse  # fewest tokens; 0: never
        int64_t host_pages
        EvictionConfig eviction
        cbool reserve_chunks
        int64_t max_draft_tokens
        vector[StateGroup] states
        int64_t num_state_slots
        int64_t num_host_state_slots
        int64_t event_pages
        int64_t explain_pages
        int64_t advice_sample
    cdef cppclass RequestView:
        SequenceHandle sequence
        const TokenId* tokens
        int64_t start
        int64_t active
        int64_t end
        string_view name_space
        int64_t reserve_to  # tokens to hold pages for; else to the end
    cdef cppclass RetainedTokens:
        int64_t start
        int64_t end
        int32_t priority
        int64_t duration
    cdef cppclass RequestPriority:
        int32_t priority
        int64_t duration
        vector[RetainedTokens] ranges
        int32_t tenant
    cdef cppclass RequestHistory:
        int64_t prompt_tokens
        int64_t counted_tokens
        int64_t written_tokens
    cdef cppclass RequestBatch:
        RequestBatch(RequestView* views, int64_t n)
        RequestBatch(RequestView** rows, int64_t n)
    cdef enum class ReserveStatus:
        kOk
        kNoSpace
        kPending
    cdef cppclass SequenceMark:
        int64_t written
        int64_t state
        int64_t run
        uint32_t pages
        uint32_t windows
    cdef cppclass BatchReserve:
        int64_t reserved
        ReserveStatus status
    cdef cppclass ReserveOptions:
        int64_t max_hit
        int64_t keep_free
        int64_t must_fit
    cdef cppclass ReservePlan:
        int64_t hit_tokens
        int64_t new_pages
        int64_t evicted_pages
        int64_t copied_tokens
        cbool fits
        int64_t active
        int64_t evictable_hit_pages
    cdef cppclass MovedRequest:
        int64_t row
        int64_t start
        int64_t active
    cdef cppclass Transfers:
        uint64_t ticket
        vector[PageMove] copies
        vector[PageMove] tier_moves
        vector[StateMove] state_copies
        vector[StateMove] state_moves
        vector[MovedRequest] moved
        void clear()
    cdef enum class OwedStatus:
        kNone
        kTaken
        kUnderWay
    cdef cppclass SharedPrefix:
        int32_t replica
        int64_t num_tokens
        vector[int32_t] rows
    cdef cppclass PageSwap:
        int32_t row
        int32_t column
        BlockId page
        int32_t bundle
    cdef cppclass FetchTarget:
        LookupTable* table
        uint32_t* cache_lengths
        uint32_t* new_lengths
        int64_t rows
        int32_t width
        int64_t longest_new
        int64_t longest_active
        LookupTable** more  # of other bundles, with groups
        int32_t* states  # slots, with states
    cdef enum class FetchStatus:
        kOk
        kNoSpace
        kGrow
        kPending
    cdef cppclass FetchResult:
        FetchStatus status
        int64_t row
        int64_t needed
        int64_t available
        cbool has_moved
        cbool is_over_quota
        cbool lacks_slot
    cdef cppclass PinHandle:
        uint32_t index
        uint32_t generation
        int64_t num_tokens


cdef extern from "kvcore/store_moves.hpp" namespace "kvcore" nogil:
    cdef cppclass StoredPart:
        int32_t part
        BlockId page
    cdef cppclass ColumnParts:
        int32_t column
        uint64_t parts
    cdef cppclass StoreMoves:
        uint64_t ticket
        int32_t replica
        vector[PageKey] keys
        vector[StoredPart] parts
        vector[int32_t] ends
    cdef cppclass StoreSearch:
        int32_t replica
        int32_t stored
        int32_t have
        int32_t legal
        int32_t most
        PageKey parent
        cbool has_gaps
cdef extern from "kvcore/cached_columns.hpp" namespace "kvcore" nogil:
    cdef cppclass CachedRun:
        int32_t parent
        int32_t name_space
        int32_t first
        int32_t num_columns
        int32_t rank
    cdef cppclass CachedTree:
        uint64_t num_resets
        vector[string] name_spaces
        vector[CachedRun] runs
        vector[TokenId] tokens
    cdef cppclass CachedColumn:
        uint8_t windows
        uint8_t passed
        int32_t state
    cdef cppclass ColumnSpan:
        int32_t replica
        uint64_t num_resets
        string_view name_space
        const TokenId* tokens
        int64_t n
        int32_t first
    cdef cppclass CacheExport:
        CacheExport()
        const vector[CachedColumn]& columns()
        const vector[BlockId]& pages()
    cdef enum class ImportStatus:
        kTaken
        kKnown
        kNoParent
        kNoRoom
        kReset
    cdef cppclass CacheImport:
        CacheImport()
        ImportStatus status()
        const vector[CachedColumn]& columns()
        const vector[BlockId]& pages()


cdef extern from "kvcore/cache_events.hpp" namespace "kvcore" nogil:
    cdef enum class CacheMedium:
        kDevice
        kHost
        kStorage
    cdef cppclass PageExtra:
        int32_t page
        int64_t start
        int64_t length
        string bytes
    cdef enum class CacheEventKind "kvcore::CacheEvent::Kind":
        kStored
        kRemoved
        kCleared
    cdef cppclass CacheEvent:
        CacheEventKind kind
        CacheMedium medium
        int32_t replica
        int32_t group  # -1: the manager has no groups
        vector[PageKey] keys
        optional[PageKey] parent
        vector[TokenId] tokens
        string name_space
        vector[PageExtra] extras


cdef extern from "kvcore/extra_keys.hpp" namespace "kvcore" nogil:
    cdef cppclass NamespaceParts:
        optional[string_view] extra_key
        optional[string_view] cache_salt
    NamespaceParts read_namespace_name(string_view name)


cdef extern from "kvcore/cache_manager.hpp" namespace "kvcore" nogil:
    cdef cppclass HeldPages:
        HeldPages()
        const vector[BlockId]& pages()
        void let_go() except +translate_exception


cdef extern from "kvcore/cache_manager.hpp" namespace "kvcore" nogil:
    cdef cppclass CacheManager:
        CacheManager(const CacheConfig& config) except +translate_exception
        const CacheConfig& config()
        SequenceHandle claim(int32_t replica) except +translate_exception
        void set_priority(
            SequenceHandle sequence, const RequestPriority& terms
        ) except +translate_exception
        void advance(int64_t now) except +translate_exception
        cbool contains(SequenceHandle sequence)
        int32_t replica_of(SequenceHandle sequence) except +translate_exception
        vector[BlockId] pages_of(SequenceHandle sequence) except +translate_exception
        vector[BlockId] pages_of(
            SequenceHandle sequence, int32_t bundle
        ) except +translate_exception
        vector[BlockId] pages_of(
            SequenceHandle sequence, int32_t bundle, int64_t first
        ) except +translate_exception
        void release(SequenceHandle sequence) except +translate_exception
        void release(
            SequenceHandle sequence, RequestHistory* history, int64_t returns_in, Misses* misses
        ) except +translate_exception
        void recall(
            SequenceHandle sequence, const RequestHistory& history
        ) except +translate_exception
        void begin_again(SequenceHandle sequence) except +translate_exception
        # `transfers`, empty before, get what the caller is to copy; without them see take_copies.
        ReserveStatus reserve(
            RequestView& request, int64_t num_steps
        ) except +translate_exception
        ReserveStatus reserve(
            RequestView& request, int64_t num_steps, Transfers* transfers
        ) except +translate_exception
        ReserveStatus reserve(
            RequestView& request, int64_t num_steps, Transfers* transfers,
            const ReserveOptions& options
        ) except +translate_exception
        BatchReserve reserve_batch(
            const RequestBatch& batch, int64_t num_steps
        ) except +translate_exception
        BatchReserve reserve_batch(
            const RequestBatch& batch, int64_t num_steps, Transfers* transfers
        ) except +translate_exception
        ReserveStatus begin_at(
            RequestView& request, int64_t n, Transfers* transfers
        ) except +translate_exception
        SequenceMark mark_of(SequenceHandle sequence) except +translate_exception
        ReservePlan plan(
            const RequestView& request, int64_t num_steps, const ReserveOptions& options
        ) except +translate_exception
        ReservePlan plan(
            int32_t replica, const RequestView& request, int64_t num_steps,
            const ReserveOptions& options, int32_t tenant
        ) except +translate_exception
        FetchResult fetch(
            const RequestBatch& batch, int64_t num_steps, FetchTarget* targets
        ) except +translate_exception
        FetchResult fetch(
            const RequestBatch& batch, int64_t num_steps, FetchTarget* targets,
            Transfers* transfers
        ) except +translate_exception
        void commit(
            const RequestBatch& batch, vector[PageSwap]& swaps
        ) except +translate_exception
        void commit(
            const RequestBatch& batch, vector[PageSwap]& swaps, Transfers* transfers
        ) except +translate_exception
        void fork(
            const RequestView& parent, const RequestBatch& children
        ) except +translate_exception
        void fork(
            const RequestView& parent, const RequestBatch& children, Transfers* transfers
        ) except +translate_exception
        int64_t leave_windows(SequenceHandle sequence, int64_t n) except +translate_exception
        void truncate(SequenceHandle sequence, int64_t n) except +translate_exception
        void truncate(
            SequenceHandle sequence, int64_t n, Transfers* transfers
        ) except +translate_exception
        vector[SharedPrefix] shared_prefixes(
            const RequestBatch& batch
        ) except +translate_exception
        int64_t match(
            int32_t replica, string_view name_space, const TokenId* tokens, int64_t n,
            vector[BlockId]* pages, int32_t* partial_tokens, int32_t bundle
        ) except +translate_exception
        int64_t touch(
            int32_t replica, string_view name_space, const TokenId* tokens, int64_t n,
            vector[BlockId]* pages, int32_t* partial_tokens, int64_t most_pages,
            int32_t bundle
        ) except +translate_exception
        PinHandle pin(
            int32_t replica, string_view name_space, const TokenId* tokens, int64_t n
        ) except +translate_exception
        void unpin(PinHandle pin) except +translate_exception
        int64_t forget(
            int32_t replica, const BlockId* pages, int64_t n
        ) except +translate_exception
        HeldPages hold(
            int32_t replica, const BlockId* pages, int64_t n
        ) except +translate_exception
        vector[BlockId] next_pages(int32_t replica) except +translate_exception
        int32_t recommend_replica(
            string_view name_space, const TokenId* tokens, int64_t n
        ) except +translate_exception
        vector[TokenId] tokens_up_to(TokenId highest) except +translate_exception
        int64_t first_uncached(SequenceHandle sequence) except +translate_exception
        CachedTree cached_tree(int32_t replica) except +translate_exception
        CacheExport export_columns(const ColumnSpan& span) except +translate_exception
        CacheImport import_columns(
            const ColumnSpan& span, const CachedColumn* columns
        ) except +translate_exception
        cbool publish(CacheImport& filled, cbool more) except +translate_exception
        uint64_t num_resets() except +translate_exception
        cbool reset_prefix_cache() except +translate_exception
        void finish(uint64_t ticket, cbool done) except +translate_exception
        void note_late_reads(
            const PageMove* stores, int64_t n, uint64_t mark
        ) except +translate_exception
        uint64_t late_reads(int32_t replica) except +translate_exception
        OwedStatus take_owed(
            SequenceHandle sequence, Transfers& transfers
        ) except +translate_exception
        void wait(SequenceHandle sequence) except +translate_exception
        cbool take_writes(int64_t most, StoreMoves& out) except +translate_exception
        void finish_writes(uint64_t ticket) except +translate_exception
        int64_t num_waiting_writes()
        int64_t num_dropped_writes()
        StoreSearch search_below(const RequestView& request) except +translate_exception
        StoreSearch search_below(
            const RequestView& request, int64_t max_hit
        ) except +translate_exception
        StoreSearch search_below(
            int32_t replica, string_view name_space, const TokenId* tokens, int64_t n
        ) except +translate_exception
        void keys_below(
            string_view name_space, const TokenId* tokens, int32_t first, int32_t last,
            const PageKey& parent, PageKey* out
        ) except +translate_exception
        PageKey root_key_below(string_view name_space) except +translate_exception
        vector[ColumnParts] needed_below(
            int32_t replica, string_view name_space, const TokenId* tokens, int32_t end
        ) except +translate_exception
        void begin_fill(
            int32_t replica, string_view name_space, const TokenId* tokens, int32_t end,
            const ColumnParts* columns, const PageKey* keys, int64_t n, StoreMoves& out
        ) except +translate_exception
        void finish_fill(
            uint64_t ticket, int64_t arrived, cbool forward
        ) except +translate_exception
        vector[CacheEvent] take_events() except +translate_exception
        void note_written(
            int32_t replica, const PageKey* keys, int64_t n, uint64_t num_resets
        ) except +translate_exception
        vector[PageMove] take_copies() except +translate_exception
        vector[StateMove] take_state_copies() except +translate_exception
        int32_t state_of(SequenceHandle sequence) except +translate_exception
        StateStats state_stats(int32_t replica) except +translate_exception
        PoolStats stats(int32_t replica) except +translate_exception
        vector[GroupStats] group_stats(int32_t replica) except +translate_exception
        vector[TenantStats] tenant_stats(int32_t replica) except +translate_exception
        Metrics metrics() except +translate_exception
        Misses misses_of(SequenceHandle sequence) except +translate_exception
        MissCounts miss_counts() except +translate_exception
        Advice advice() except +translate_exception
        void reset_metrics() except +translate_exception
        void check_integrity() except +translate_exception


cdef extern from "kvcore/host_store.hpp" namespace "kvcore" nogil:
    cdef cppclass PageCopier:
        void run(const PageMove* copies, int64_t n)
        int64_t bytes_of(const PageMove* copies, int64_t n)
