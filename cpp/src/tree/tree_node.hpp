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
#include "tree/slot_arena.hpp"

namespace kvcore {

class SiblingOrder;

/// A run of pages: what the tree is made of.
///
/// One buffer holds the run's tokens and behind them its page ids:
///     tokens [capacity * page_size] int32 | ids [capacity] int32, both filled to num_pages.
/// A node is reached from its parent by its first page; an only child directly, one of several
/// through the ChildIndex. What a match reads of it comes first.
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
        TreeNode* first_child = nullptr;  // a small family is a list,
        SiblingOrder* order;              // a large one (is_sorted) kept in order
    };
    TreeNode* next_sibling = nullptr;
    std::uint32_t pins = 0;        // holders whose prefix ends with this run
    std::uint32_t protectors = 0;  // see Protection
    std::uint32_t generation = 0;  // changes when pages leave the node: handles go stale
    // Bits, so that they take one word; a new node has none of them.
    bool is_sorted : 1;       // the children are in `order`
    bool is_indexed : 1;      // in the ChildIndex
    bool is_candidate : 1;    // the eviction policy may name it
    bool is_settled_pin : 1;  // see Protection
    bool is_unsettled : 1;
    bool is_forgotten : 1;  // nothing finds it any more; held by who held it then
    bool is_severed : 1;    // the first of such runs: not among its parent's children

    /// The last generation: no handle to it is ever right, so none comes round again.
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

// Metadata is what a cache of many short prompts is made of.
static_assert(sizeof(void*) != 8 || sizeof(TreeNode) == 80, "a node fits 80 bytes");

/// Nodes by id, for each of which the policy has room too; recycles their slots and keeps their
/// generations, so that a handle to a node that is gone is recognised.
class NodeArena {
   public:
    explicit NodeArena(EvictionPolicy& policy) noexcept : policy_(policy) {}

    /// Throws std::bad_alloc and has changed nothing that anybody sees.
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

    /// Resets all but id and generation; the caller has freed the buffer. A slot that has used up
    /// its generations is not handed out again.
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

    /// The node with an id that was handed out.
    [[nodiscard]] TreeNode* at(NodeId id) const noexcept { return slots_.at(id); }
    /// nullptr for an id that never was.
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
