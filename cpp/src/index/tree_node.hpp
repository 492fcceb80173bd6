// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <string>
#include <utility>

#include "index/slot_arena.hpp"
#include "kvcore/eviction.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

class SiblingOrder;

struct TreeNode;

/// What finding a child reads: the first 32 bytes of a node, which never straddle a cache line.
struct TreeNodeKey {
    TreeNode* parent = nullptr;  // nullptr for a namespace's root
    union {
        TokenId* tokens = nullptr;
        const std::string* name;  // of a root: its namespace; nullptr for the default one
    };
    TreeNode* hash_next = nullptr;  // chain of the ChildIndex; free list of the arena
    std::uint32_t hash = 0;         // of (parent, first page), set while indexed
    std::uint32_t id = 0;
};

/// A run of pages: what the tree is made of.
///
/// One buffer holds the run's tokens and behind them its page ids:
///     tokens [capacity * page_size] int32 | ids [capacity] int32, both filled to num_pages.
/// A node is reached from its parent by its first page; an only child directly, one of several
/// through the ChildIndex.
struct TreeNode : TreeNodeKey, EvictionHook {
    union {
        TreeNode* first_child = nullptr;  // a small family is a list,
        SiblingOrder* order;              // a large one (is_sorted) kept in order
    };
    TreeNode* next_sibling = nullptr;

    std::int32_t start = 0;  // pages between the root and this run
    std::int32_t num_pages = 0;
    std::int32_t capacity = 0;
    std::uint32_t num_children = 0;
    std::uint32_t pins = 0;        // holders whose prefix ends with this run
    std::uint32_t protectors = 0;  // (pins > 0) + children with protectors, as last settled
    std::uint32_t generation = 0;  // changes when pages leave the node: handles go stale
    bool is_sorted = false;        // the children are in `order`
    bool is_indexed = false;       // in the ChildIndex
    bool is_settled_pin = false;   // pins > 0 is counted in protectors
    bool is_queued = false;        // waits to be settled

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
static_assert(sizeof(void*) != 8 || sizeof(TreeNode) == 96, "a node fits 96 bytes");

/// Nodes by id; recycles their slots and keeps their generations, so that a handle to a node that
/// is gone is recognised.
class NodeArena {
   public:
    [[nodiscard]] TreeNode* allocate() {
        if (free_ != nullptr) {
            TreeNode* node = free_;
            free_ = node->hash_next;
            node->hash_next = nullptr;
            return node;
        }
        TreeNode* node = new (slots_.slot(num_used_)) TreeNode{};
        node->id = static_cast<std::uint32_t>(num_used_);
        ++num_used_;
        return node;
    }

    /// Resets all but id and generation; the caller has freed the buffer. A slot that has used up
    /// its generations is not handed out again.
    void recycle(TreeNode* node) noexcept {
        const std::uint32_t id = node->id;
        node->begin_generation();
        const std::uint32_t generation = node->generation;
        *node = TreeNode{};
        node->id = id;
        node->generation = generation;
        if (generation == TreeNode::kNoGeneration) return;
        node->hash_next = free_;
        free_ = node;
    }

    [[nodiscard]] TreeNode* at(std::uint32_t id) noexcept {
        return id < num_used_ ? slots_.slot(id) : nullptr;
    }

   private:
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
