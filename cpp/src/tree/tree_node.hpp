// SPDX-License-Identifier: Apache-2.0
// The nodes of a prefix tree, and the structures in which a node finds its children.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/eviction.hpp"
#include "kvcore/types.hpp"
#include "support/memory.hpp"

namespace kvcore {

class SiblingOrder;

/// A node of the tree: a run of pages.
///
/// One buffer holds the tokens of the run, followed by its page ids:
///     tokens [capacity * page_size] int32 | ids [capacity] int32, both filled to num_pages.
/// A parent finds a child by the child's first page: an only child directly, a child with siblings
/// through the ChildIndex. The fields that a match reads come first.
struct TreeNode {
    TreeNode* parent = nullptr;  // nullptr for a namespace's root
    union {
        TokenId* tokens = nullptr;
        const std::string* name;  // of a root: its namespace; nullptr for the default one
    };
    TreeNode* hash_next = nullptr;  // chain of the ChildIndex; free list of the arena
    std::uint32_t hash = 0;         // of (parent, first page), set while indexed
    NodeId id = 0;
    std::int32_t start = 0;  // pages between the root and this run
    std::int32_t num_pages = 0;
    std::int32_t capacity = 0;
    std::uint32_t num_children = 0;
    union {
        TreeNode* first_child = nullptr;  // small family: a linked list
        SiblingOrder* order;              // large family (is_sorted): a sorted order
    };
    TreeNode* next_sibling = nullptr;
    std::uint32_t pins = 0;        // holders whose prefix ends with this run
    std::uint32_t protectors = 0;  // see Protection
    std::uint32_t generation = 0;  // changes when pages leave the node: handles go stale
    // Bit fields, so that the flags take one word. A new node has no flag set.
    bool is_sorted : 1;       // the children are in `order`
    bool is_indexed : 1;      // in the ChildIndex
    bool is_candidate : 1;    // the eviction policy may return it as a victim
    bool is_settled_pin : 1;  // see Protection
    bool is_unsettled : 1;
    bool is_forgotten : 1;  // no lookup finds it; only earlier holders still use it
    bool is_severed : 1;    // first run of a forgotten branch; not among its parent's children

    /// The last generation. No handle of this generation is valid, so no old handle becomes valid
    /// again.
    static constexpr std::uint32_t kNoGeneration = std::numeric_limits<std::uint32_t>::max();

    void begin_generation() noexcept {
        if (generation != kNoGeneration) ++generation;
    }
    [[nodiscard]] bool is_root() const noexcept { return parent == nullptr; }
    [[nodiscard]] std::int32_t end() const noexcept { return start + num_pages; }
    [[nodiscard]] BlockId* ids(std::int32_t page_size) const noexcept {
        return tokens + static_cast<std::ptrdiff_t>(capacity) * page_size;
    }
    [[nodiscard]] const TokenId* page_tokens(std::int32_t page,
                                             std::int32_t page_size) const noexcept {
        return tokens + static_cast<std::ptrdiff_t>(page) * page_size;
    }
};

// With many short prompts, most of the tree's memory is nodes.
static_assert(sizeof(void*) != 8 || sizeof(TreeNode) == 80, "a node fits 80 bytes");

/// The nodes by id. The policy has room for each id. Recycled slots keep their generation, so that
/// the tree detects a handle to a removed node.
class NodeArena {
   public:
    explicit NodeArena(EvictionPolicy& policy) noexcept : policy_(policy) {}

    /// Throws std::bad_alloc without a visible change.
    [[nodiscard]] TreeNode* allocate() {
        if (free_ != nullptr) {
            TreeNode* node = free_;
            free_ = node->hash_next;
            node->hash_next = nullptr;
            return node;
        }
        TreeNode* node = new (slots_.slot(num_used_)) TreeNode{};
        node->id = static_cast<NodeId>(num_used_);
        policy_.make_room(node->id);
        ++num_used_;
        return node;
    }

    /// Resets all fields except id and generation; the caller has freed the buffer. A slot at its
    /// last generation is not used again.
    void recycle(TreeNode* node) noexcept {
        const NodeId id = node->id;
        node->begin_generation();
        const std::uint32_t generation = node->generation;
        *node = TreeNode{};
        node->id = id;
        node->generation = generation;
        if (generation == TreeNode::kNoGeneration) return;
        node->hash_next = free_;
        free_ = node;
    }

    /// Returns the node of an id that `allocate` assigned.
    [[nodiscard]] TreeNode* at(NodeId id) const noexcept { return slots_.at(id); }
    /// Returns nullptr for an id that was never assigned.
    [[nodiscard]] TreeNode* find(NodeId id) const noexcept {
        return id < num_used_ ? slots_.at(id) : nullptr;
    }

   private:
    EvictionPolicy& policy_;
    SlotArena<TreeNode> slots_;
    std::size_t num_used_ = 0;
    TreeNode* free_ = nullptr;
};

/// A new node that is not part of the tree yet: recycled unless it is released.
class FreshNode {
   public:
    explicit FreshNode(NodeArena& arena) : arena_(arena), node_(arena.allocate()) {}
    FreshNode(const FreshNode&) = delete;
    FreshNode& operator=(const FreshNode&) = delete;
    ~FreshNode() {
        if (node_ != nullptr) arena_.recycle(node_);
    }
    [[nodiscard]] TreeNode* get() const noexcept { return node_; }
    [[nodiscard]] TreeNode* operator->() const noexcept { return node_; }
    [[nodiscard]] TreeNode* release() noexcept { return std::exchange(node_, nullptr); }

   private:
    NodeArena& arena_;
    TreeNode* node_;
};

// ---- how a node finds its children --------------------------------------------------------------

/// A linear-hashing table of all nodes that have siblings. Finds a child by its first page.
///
/// The table grows and shrinks by one bucket at a time, so no insertion stalls on a rehash. Nodes
/// are chained through `hash_next`; a bucket holds one node on average. A match always compares the
/// tokens of the page, not only the hash.
class ChildIndex {
   public:
    explicit ChildIndex(std::int32_t page_size);

    /// The hash of a first page below `parent`. Seeded per table, so that token ids cannot be
    /// chosen to collide.
    [[nodiscard]] std::uint32_t hash(const TreeNode* parent, const TokenId* page) const noexcept;

    /// Returns the child of `parent` whose first page equals `page` [page_size]; nullptr if no
    /// child matches.
    [[nodiscard]] TreeNode* find(const TreeNode* parent, const TokenId* page) const noexcept;

    /// Makes room, so that the next `n` insertions cannot fail. Throws std::bad_alloc, without a
    /// change, if a segment cannot be allocated.
    void reserve(std::size_t n);
    /// Adds a node with tokens and parent set. It must not be indexed. Throws as `reserve(1)`.
    void insert(TreeNode* node);
    /// Removes an indexed node.
    void erase(TreeNode* node) noexcept;
    /// Replaces the indexed `node` by `replacement`, which has the same parent and first page.
    void replace(TreeNode* node, TreeNode* replacement) noexcept;

    /// Prefetches the bucket that `erase` of the node reads.
    void prefetch(const TreeNode* node) const noexcept {
        if (node->is_indexed) kvcore::prefetch(&bucket(bucket_of(node->hash)));
    }

    [[nodiscard]] std::size_t size() const noexcept { return size_; }

   private:
    using Segment = std::unique_ptr<TreeNode*[], CFree>;

    // The first segments are small; later segments have 2 MiB.
    static constexpr std::size_t kSmall = 1024;  // buckets
    static constexpr std::size_t kLarge = std::size_t{1} << 18;
    static constexpr std::size_t kNumSmall = kLarge / kSmall;

    [[nodiscard]] static Segment new_segment(std::size_t buckets);
    [[nodiscard]] static std::size_t segment_of(std::size_t index) noexcept {
        return index < kLarge ? index / kSmall : kNumSmall - 1 + index / kLarge;
    }
    [[nodiscard]] TreeNode*& bucket(std::size_t index) const noexcept {
        return index < kLarge ? segments_[index / kSmall][index % kSmall]
                              : segments_[kNumSmall - 1 + index / kLarge][index % kLarge];
    }
    [[nodiscard]] static bool starts_segment(std::size_t index) noexcept {
        return index % (index < kLarge ? kSmall : kLarge) == 0;
    }
    [[nodiscard]] std::size_t bucket_of(std::uint32_t hash) const noexcept;
    void add_bucket() noexcept;
    void drop_bucket() noexcept;

    std::int32_t page_size_;
    std::uint64_t seed_;
    std::size_t size_ = 0;
    std::size_t num_buckets_ = kSmall;
    std::size_t base_ = kSmall;      // the power of two with base <= num_buckets < 2 * base
    std::vector<Segment> segments_;  // the buckets, at times with a spare segment
};

/// A chunk of a SiblingOrder: eight cache lines, because in a large family every line is cold.
struct alignas(64) OrderChunk {
    static constexpr std::size_t kCapacity = 31;

    union {
        std::size_t size = 0;
        OrderChunk* next_free;
    };
    std::uint64_t keys[kCapacity];
    TreeNode* children[kCapacity];

    void insert(std::size_t at, std::uint64_t key, TreeNode* child) noexcept;
    void erase(std::size_t at) noexcept;
};

/// The allocator for the chunks of all families of a tree.
class OrderArena {
   public:
    [[nodiscard]] OrderChunk* allocate() {
        OrderChunk* chunk = free_ != nullptr ? free_ : slots_.slot(num_used_);
        if (chunk == free_) {
            free_ = chunk->next_free;
        } else {
            ++num_used_;
        }
        return new (chunk) OrderChunk;
    }
    void recycle(OrderChunk* chunk) noexcept {
        chunk->next_free = free_;
        free_ = chunk;
    }

   private:
    SlotArena<OrderChunk> slots_;
    std::size_t num_used_ = 0;
    OrderChunk* free_ = nullptr;
};

/// The children of a node, sorted by the tokens of their first pages. The sibling with the longest
/// common start is next to the position where a page would be inserted.
///
/// A sorted sequence in chunks. The key of a child is its first two tokens, so that most
/// comparisons read only the keys of a chunk (four cache lines, prefetched together).
/// Cost: O(log n) to search; insert and erase move at most one chunk and, when a chunk splits or
/// empties, the directory (about n / 22 entries).
class SiblingOrder {
   public:
    SiblingOrder(std::int32_t page_size, OrderArena& arena)
        : page_size_(page_size), arena_(arena) {}
    SiblingOrder(const SiblingOrder&) = delete;
    SiblingOrder& operator=(const SiblingOrder&) = delete;
    ~SiblingOrder() {
        for (OrderChunk* chunk : chunks_) arena_.recycle(chunk);
    }

    /// Adds a child. Throws std::bad_alloc, without a change, if a chunk cannot be allocated.
    void insert(TreeNode* child);
    /// Removes a child of the order. Its tokens must still be in place.
    void erase(const TreeNode* child) noexcept;
    /// Replaces `child` by `replacement`, which has the same first page.
    void replace(const TreeNode* child, TreeNode* replacement) noexcept;

    /// Returns the child with the longest common start with the first `limit` tokens of `page`, and
    /// writes the length to `*common`; nullptr if no child shares a token.
    [[nodiscard]] TreeNode* longest_common_start(const TokenId* page, std::int32_t limit,
                                                 std::int32_t* common) const noexcept;

    /// Finds the children that share a start with the first `limit` tokens of `page`, the longest
    /// start first. Writes at most `n` children to `out` and the lengths to `common`. Returns the
    /// number of children. O(log children + n).
    std::size_t common_starts(const TokenId* page, std::int32_t limit, TreeNode** out,
                              std::int32_t* common, std::size_t n) const noexcept;

    /// Prefetches the chunk that a search for this page reads.
    void prefetch(const TokenId* page) const noexcept;

    /// Calls visit(child) for each child, in order.
    template <class Visit>
    void for_each(Visit&& visit) const {
        for (const Chunk* chunk : chunks_) {
            for (std::size_t i = 0; i < chunk->size; ++i) visit(chunk->children[i]);
        }
    }

   private:
    using Chunk = OrderChunk;

    struct Place {
        std::size_t chunk;
        std::size_t index;
    };

    [[nodiscard]] std::uint64_t key_of(const TokenId* page) const noexcept;
    [[nodiscard]] std::size_t chunk_of(std::uint64_t wanted, const TokenId* page,
                                       std::int32_t limit) const noexcept;
    [[nodiscard]] Place lower_bound(const TokenId* page, std::int32_t limit) const noexcept;
    [[nodiscard]] Place place_of(const TreeNode* child) const noexcept;
    [[nodiscard]] Chunk* new_chunk();
    void split_chunk(std::size_t chunk);

    std::int32_t page_size_;
    OrderArena& arena_;
    std::vector<Chunk*> chunks_;             // not empty
    std::vector<std::uint64_t> first_keys_;  // of each chunk
    // The chunks in which the last searches ended: an insert follows a match of the same page, and
    // an erase follows its prefetch. A hint: used only if the page is between the first keys of the
    // chunk and the next chunk.
    mutable std::array<std::size_t, 4> recent_{};
    mutable std::size_t next_recent_ = 0;
};

/// Returns the number of leading tokens in which `a` and `b` agree, at most `limit`.
[[nodiscard]] inline std::int32_t common_tokens(const TokenId* a, const TokenId* b,
                                                std::int32_t limit) noexcept {
    std::int32_t i = 0;
    while (i < limit && a[i] == b[i]) ++i;
    return i;
}

/// Calls visit(child) for each child of a node, sorted or not.
template <class Visit>
void for_each_child(const TreeNode* node, Visit&& visit) {
    if (node->is_sorted) return node->order->for_each(visit);
    for (TreeNode* child = node->first_child; child != nullptr; child = child->next_sibling) {
        visit(child);
    }
}

}  // namespace kvcore
