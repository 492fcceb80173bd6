// SPDX-License-Identifier: Apache-2.0
// What makes the tree grow: split and insert.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "kvcore/prefix_tree.hpp"
#include "support/make_room.hpp"
#include "tree/child_index.hpp"
#include "tree/children.hpp"
#include "tree/protection.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {
namespace {

// A family is sorted when it grows past the first number, left unsorted when it falls to the
// second.
constexpr std::uint32_t kSortAbove = 8;
constexpr std::uint32_t kUnsortAt = 4;

// Room for growth of a run that a sequence goes on writing, in pages: a quarter of what lies above,
// within bounds. Runs grow in place only into this room, so growth never copies.
constexpr std::int32_t kMinRoom = 4;
constexpr std::int32_t kMaxRoom = 256;

std::size_t buffer_bytes(std::int32_t capacity, std::int32_t page_size) noexcept {
    return static_cast<std::size_t>(capacity) * (static_cast<std::size_t>(page_size) + 1) *
           sizeof(std::int32_t);
}

using Buffer = std::unique_ptr<TokenId[], CFree>;

Buffer new_buffer(std::int32_t capacity, std::int32_t page_size) {
    void* memory = std::malloc(buffer_bytes(capacity, page_size));
    if (memory == nullptr) throw std::bad_alloc();
    return Buffer(static_cast<TokenId*>(memory));
}

// Writes `n` pages into a buffer of `capacity` pages, from its page `at` on.
void copy_run(TokenId* buffer, std::int32_t capacity, std::int32_t at, const TokenId* tokens,
              const BlockId* ids, std::int32_t n, std::int32_t page_size) noexcept {
    const auto pages = static_cast<std::size_t>(n);
    std::memcpy(buffer + static_cast<std::ptrdiff_t>(at) * page_size, tokens,
                pages * static_cast<std::size_t>(page_size) * sizeof(TokenId));
    std::memcpy(buffer + static_cast<std::ptrdiff_t>(capacity) * page_size + at, ids,
                pages * sizeof(BlockId));
}

// Moves what follows the first `n` pages of a run to the front of its buffer.
void drop_front(TreeNode* node, std::int32_t n, std::int32_t page_size) noexcept {
    const auto left = static_cast<std::size_t>(node->num_pages - n);
    std::memmove(node->tokens, node->page_tokens(n, page_size),
                 left * static_cast<std::size_t>(page_size) * sizeof(TokenId));
    BlockId* ids = node->ids(page_size);
    std::memmove(ids, ids + n, left * sizeof(BlockId));
    node->num_pages -= n;
}

}  // namespace

// The nodes still to come are chained through what the index needed: no memory is asked for.
PrefixTree::~PrefixTree() {
    TreeNode* next = nullptr;
    const auto enter = [&](TreeNode* node) {
        node->hash_next = next;
        next = node;
    };
    enter(default_root_);
    for (const auto& entry : roots_) enter(entry.second.node);
    for (TreeNode* severed : severed_) enter(severed);
    while (next != nullptr) {
        TreeNode* node = next;
        next = node->hash_next;
        for_each_child(node, enter);
        if (node->is_sorted) delete node->order;
        if (!node->is_root()) std::free(node->tokens);
    }
}

// Ids lie behind the tokens and move first. Where the system has no smaller buffer, the larger one
// serves.
void PrefixTree::shrink_buffer(TreeNode* node) noexcept {
    const BlockId* ids = node->ids(page_size_);
    node->capacity = node->num_pages;
    std::memmove(node->ids(page_size_), ids,
                 static_cast<std::size_t>(node->num_pages) * sizeof(BlockId));
    void* smaller = std::realloc(node->tokens, buffer_bytes(node->capacity, page_size_));
    if (smaller != nullptr) node->tokens = static_cast<TokenId*>(smaller);
}

void PrefixTree::shrink(TreeNode* node) noexcept {
    if (!node->is_root() && node->pins == 0 && node->capacity > node->num_pages) {
        shrink_buffer(node);
    }
}

void PrefixTree::sort_children(TreeNode* parent) {
    auto order = std::make_unique<SiblingOrder>(page_size_, *order_arena_);
    for_each_child(parent, [&](TreeNode* child) { order->insert(child); });
    parent->order = order.release();
    parent->is_sorted = true;
}

void PrefixTree::unsort_children(TreeNode* parent) noexcept {
    const std::unique_ptr<SiblingOrder> order(parent->order);
    parent->is_sorted = false;
    parent->first_child = nullptr;
    order->for_each([&](TreeNode* child) {
        child->next_sibling = parent->first_child;
        parent->first_child = child;
    });
}

// The index has room for two. What may still fail is the order of a large family; then the child is
// not in it.
void PrefixTree::attach(TreeNode* parent, TreeNode* child) {
    child->parent = parent;
    child->start = depth_of(parent);
    if (parent->num_children == kSortAbove && !parent->is_sorted) sort_children(parent);
    if (parent->is_sorted) {
        parent->order->insert(child);
    } else {
        child->next_sibling = parent->first_child;
        parent->first_child = child;
    }
    // An only child is found without the index.
    if (++parent->num_children == 2) index_->insert(child->next_sibling);
    if (parent->num_children >= 2) index_->insert(child);
}

void PrefixTree::detach(TreeNode* child) noexcept {
    TreeNode* parent = child->parent;
    if (child->is_indexed) index_->erase(child);
    if (parent->is_sorted) {
        parent->order->erase(child);
        if (--parent->num_children == kUnsortAt) unsort_children(parent);
        return;
    }
    TreeNode** link = &parent->first_child;
    while (*link != child) link = &(*link)->next_sibling;
    *link = child->next_sibling;
    if (--parent->num_children == 1) index_->erase(parent->first_child);
}

// `head` has the same first page as `child` and takes its place among its siblings.
void PrefixTree::replace_child(TreeNode* child, TreeNode* head) noexcept {
    TreeNode* parent = child->parent;
    head->parent = parent;
    head->start = child->start;
    head->is_forgotten = child->is_forgotten;
    if (child->is_severed) {
        *std::find(severed_.begin(), severed_.end(), child) = head;
        head->is_severed = true;
        child->is_severed = false;
        return;
    }
    if (parent->is_sorted) {
        parent->order->replace(child, head);
    } else {
        TreeNode** link = &parent->first_child;
        while (*link != child) link = &(*link)->next_sibling;
        *link = head;
        head->next_sibling = child->next_sibling;
    }
    child->next_sibling = nullptr;
    if (child->is_indexed) index_->replace(child, head);
}

// The tail keeps its node, so that pins, children, handles and the place in the eviction order stay
// with the end they belong to; the head is new. The longer half keeps the buffer.
TreeNode* PrefixTree::split(TreePosition at) {
    const auto [node, depth] = position(at.node, at.depth);
    const std::int32_t cut = depth - node->start;
    if (node->is_root() || cut == node->num_pages) return node;
    const std::int32_t left = node->num_pages - cut;
    const bool keeps_head = cut > left;
    const std::int32_t shorter = std::min(cut, left);
    Buffer buffer = new_buffer(shorter, page_size_);
    TreeNode* head = arena_->allocate();  // from here on nothing can fail
    ++num_nodes_;
    head->num_pages = cut;
    Protection::split(head, node);
    if (keeps_head) {
        copy_run(buffer.get(), shorter, 0, node->page_tokens(cut, page_size_),
                 node->ids(page_size_) + cut, left, page_size_);
        head->tokens = node->tokens;
        head->capacity = node->capacity;
    } else {
        copy_run(buffer.get(), shorter, 0, node->tokens, node->ids(page_size_), cut, page_size_);
        head->tokens = buffer.release();
        head->capacity = cut;
    }
    replace_child(node, head);  // while both still begin with the same page
    if (keeps_head) {
        node->tokens = buffer.release();
        node->capacity = node->num_pages = left;
        shrink_buffer(head);
    } else {
        drop_front(node, cut, page_size_);
        shrink_buffer(node);
    }
    attach(head, node);
    policy_->split(head->id, node->id);
    tell_size(head);
    tell_size(node);
    tell_fingerprint(node);
    return head;
}

// In place only where the caller alone ends: its one pin moves on with the end of the run.
bool PrefixTree::extend(TreeNode* leaf, const TokenId* tokens, const BlockId* ids, std::int32_t n,
                        const Retention& retention) noexcept {
    if (leaf->is_root() || leaf->num_children > 0 || leaf->pins != 1 ||
        leaf->capacity - leaf->num_pages < n) {
        return false;
    }
    if (interest_.growth && !policy_->joins(leaf->id, retention)) return false;
    if (interest_.retention) policy_->retain(leaf->id, retention);
    copy_run(leaf->tokens, leaf->capacity, leaf->num_pages, tokens, ids, n, page_size_);
    leaf->num_pages += n;
    num_cached_ += n;
    protection_->grow(leaf, n);
    tell_size(leaf);
    if (listener_ != nullptr) listener_->stored(leaf, leaf->end() - n, n);
    return true;
}

// Whatever can fail does so before the tree changes: where the run at `at` is cut in two, its end
// has no other child but the tail, and room in the index is all that the leaf needs there.
TreeNode* PrefixTree::add_leaf(TreePosition at, const TokenId* tokens, const BlockId* ids,
                               std::int32_t n, const Retention& retention) {
    // The first run of a prompt is exact; what follows a run of one's own is a sequence that grows.
    const bool grows = at.depth == depth_of(at.node) && !at.node->is_root() && at.node->pins == 1 &&
                       at.node->num_children == 0;
    const std::int32_t room = grows ? std::clamp(at.depth / 4, kMinRoom, kMaxRoom) : n;
    const std::int32_t capacity = std::max(n, room);
    Buffer buffer = new_buffer(capacity, page_size_);
    copy_run(buffer.get(), capacity, 0, tokens, ids, n, page_size_);
    FreshNode leaf(*arena_);
    leaf->tokens = buffer.get();
    leaf->capacity = capacity;
    leaf->num_pages = n;
    index_->reserve(2);
    TreeNode* parent = at.depth == depth_of(at.node) ? at.node : split(at);
    attach(parent, leaf.get());
    static_cast<void>(buffer.release());
    ++num_nodes_;
    num_cached_ += n;
    // With a child it cannot grow any more.
    if (grows && parent->capacity > parent->num_pages) shrink_buffer(parent);
    policy_->insert(leaf->id, leaf->end(), n, retention.priority);
    if (interest_.retention) policy_->retain(leaf->id, retention);
    tell_fingerprint(leaf.get());
    return leaf.release();
}

void PrefixTree::prefetch_node(const TreeNode* node) noexcept {
    prefetch(node);
    prefetch(reinterpret_cast<const char*>(node) + 64);
}

void PrefixTree::prefetch_end(const TreeNode* node) const noexcept {
    if (node == nullptr || node->is_root()) return;
    prefetch(node->page_tokens(node->num_pages, page_size_));
    prefetch(node->ids(page_size_) + node->num_pages);
}

TreeNode* PrefixTree::insert(TreeNode* at, const TokenId* tokens, const BlockId* ids,
                             std::int32_t n, std::vector<DuplicatePage>& duplicates,
                             const Retention& retention) {
    if (n == 0 || extend(at, tokens, ids, n, retention)) return at;
    const std::int32_t depth = depth_of(at);
    const TreePosition known = match(at, tokens, static_cast<std::int64_t>(n) * page_size_).at;
    const std::int32_t repeated = known.depth - depth;
    make_room(duplicates, static_cast<std::size_t>(repeated));
    TreeNode* end = repeated == n ? split(known)
                                  : add_leaf(known, tokens + std::ptrdiff_t{repeated} * page_size_,
                                             ids + repeated, n - repeated, retention);
    if (repeated > 0) {
        report_pages(known, depth, duplicates);
        use(known, depth);
        retain(known, depth, known.depth, retention);
    }
    if (listener_ != nullptr && repeated < n) listener_->stored(end, known.depth, n - repeated);
    return end;
}

// The pages behind `first` on the way to `at` were inserted again; there is room for them.
void PrefixTree::report_pages(TreePosition at, std::int32_t first,
                              std::vector<DuplicatePage>& duplicates) const noexcept {
    const auto [end, depth] = position(at.node, at.depth);
    auto place = duplicates.size() + static_cast<std::size_t>(depth - first);
    duplicates.resize(place);
    std::int32_t below = depth;
    for (const TreeNode* node = end; below > first; node = node->parent) {
        const BlockId* ids = node->ids(page_size_);
        while (below > std::max(first, node->start)) {
            --below;
            duplicates[--place] = {below - first, ids[below - node->start]};
        }
    }
}

}  // namespace kvcore
