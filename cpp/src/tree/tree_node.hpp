// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <string>
#include <utility>

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

}  // namespace kvcore
