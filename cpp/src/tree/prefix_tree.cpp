// SPDX-License-Identifier: Apache-2.0
#include "kvcore/prefix_tree.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include "kvcore/errors.hpp"
#include "support/memory.hpp"
#include "tree/pins.hpp"
#include "tree/policies/lru.hpp"
#include "tree/token_hash.hpp"
#include "tree/tree_node.hpp"

namespace kvcore {
namespace {

std::int32_t checked_page_size(std::int32_t page_size) {
    if (page_size < 1) {
        throw std::invalid_argument(
            detail::concat("page_size is ", page_size, ", must be at least 1 token"));
    }
    return page_size;
}

// The scan checks this many tokens at a time. It skips a piece without a match; most pieces have no
// match.
constexpr std::int64_t kScanned = 256;

void append_up_to(TokenId highest, const TokenId* tokens, std::int64_t n,
                  std::vector<TokenId>& out) {
    TokenId lowest = std::numeric_limits<TokenId>::max();
    for (std::int64_t i = 0; i < n; ++i) lowest = std::min(lowest, tokens[i]);
    if (lowest > highest) return;
    std::copy_if(tokens, tokens + n, std::back_inserter(out),
                 [&](TokenId token) { return token <= highest; });
}

bool equal(const TokenId* a, const TokenId* b, std::size_t tokens) noexcept {
    return std::memcmp(a, b, tokens * sizeof(TokenId)) == 0;
}

// Returns the number of leading pages in which two runs agree. memcmp returns only that two pieces
// differ, so the function compares ever smaller pieces; a full hit costs the same as comparing the
// bytes.
std::int32_t common_pages(const TokenId* a, const TokenId* b, std::int32_t n,
                          std::int32_t page_size) noexcept {
    const auto page = static_cast<std::size_t>(page_size);
    const auto total = static_cast<std::size_t>(n);
    std::size_t done = 0;
    for (const std::size_t piece_tokens : {std::size_t{8192}, std::size_t{512}, std::size_t{1}}) {
        const std::size_t piece = std::max<std::size_t>(1, piece_tokens / page);
        while (done < total) {
            const std::size_t pages = std::min(piece, total - done);
            if (!equal(a + done * page, b + done * page, pages * page)) break;
            done += pages;
        }
    }
    return static_cast<std::int32_t>(done);
}

[[noreturn]] void refuse_unpin(const TreeNode* node) {
    throw InvalidHandleError(detail::concat("a prefix of ", PrefixTree::depth_of(node),
                                            " pages is not pinned; unpin each pin once"));
}

}  // namespace

PrefixTree::PrefixTree(std::int32_t page_size, std::unique_ptr<EvictionPolicy> policy)
    : page_size_(checked_page_size(page_size)),
      policy_(policy != nullptr ? std::move(policy) : std::make_unique<LruPolicy>()),
      interest_(policy_->interest()),
      arena_(std::make_unique<NodeArena>(*policy_)),
      order_arena_(std::make_unique<OrderArena>()),
      index_(std::make_unique<ChildIndex>(page_size)),
      protection_(std::make_unique<Protection>(page_size_)),
      default_root_(arena_->allocate()) {}

void PrefixTree::set_protection_listener(ProtectionListener* listener) noexcept {
    protection_->set_listener(listener);
}

TreeNode* PrefixTree::find_namespace(std::string_view name) const noexcept {
    if (name.empty()) return default_root_;
    const auto found = roots_.find(name);
    return found == roots_.end() ? nullptr : found->second.node;
}

std::int32_t PrefixTree::match_elsewhere(std::string_view name, const TokenId* tokens,
                                         std::int64_t n, std::int32_t most) const noexcept {
    std::int32_t longest = 0;
    const auto search = [&](TreeNode* root) {
        longest = std::max(longest, match(root, tokens, n).at.depth);
        --most;
    };
    if (!name.empty()) search(default_root_);
    for (auto each = roots_.begin(); each != roots_.end() && most > 0; ++each) {
        if (each->first != name) search(each->second.node);
    }
    return longest;
}

TreeNode* PrefixTree::open_namespace(std::string_view name) {
    if (TreeNode* known = find_namespace(name)) return known;
    auto own_name = std::make_unique<const std::string>(name);
    FreshNode root(*arena_);
    root->name = own_name.get();
    const std::string_view key = *own_name;
    roots_.emplace(key, NamedRoot{std::move(own_name), root.get()});
    return root.release();
}

void PrefixTree::drop_root_if_unused(TreeNode* root) noexcept {
    if (root == default_root_ || root->pins > 0 || root->num_children > 0) return;
    roots_.erase(roots_.find(*root->name));  // by iterator: erase frees the key
    arena_->recycle(root);
}

TreeNode* PrefixTree::find_child(const TreeNode* node, const TokenId* page) const noexcept {
    if (node->num_children > 1) return index_->find(node, page);
    TreeNode* child = node->first_child;
    const bool matches =
        child != nullptr && equal(child->tokens, page, static_cast<std::size_t>(page_size_));
    return matches ? child : nullptr;
}

PrefixMatch PrefixTree::match(TreeNode* root, const TokenId* tokens, std::int64_t n,
                              bool want_partial) const noexcept {
    const auto max_pages = static_cast<std::int32_t>(n / page_size_);
    PrefixMatch found{{root, depth_of(root)}, {}, 0};
    const TokenId* rest = tokens;
    std::int32_t left = max_pages;
    // If the index does not have the page, the partial search reads the neighbours of the page. The
    // prefetch overlaps the cache misses of both searches.
    if (want_partial && left > 0 && root->is_sorted) root->order->prefetch(rest);
    while (left > 0) {
        TreeNode* child = find_child(found.at.node, rest);
        if (child == nullptr) break;
        const std::int32_t common =
            common_pages(child->tokens, rest, std::min(child->num_pages, left), page_size_);
        found.at = {child, found.at.depth + common};
        rest += static_cast<std::ptrdiff_t>(common) * page_size_;
        left -= common;
        if (common < child->num_pages) break;
    }
    if (want_partial) {
        const std::int64_t limit = std::min<std::int64_t>(n - (rest - tokens), page_size_ - 1);
        if (limit > 0) find_partial(found, rest, static_cast<std::int32_t>(limit));
    }
    return found;
}

// The candidates are the page after the match in its run or, at the end of a run, the first pages
// of the children.
void PrefixTree::find_partial(PrefixMatch& match, const TokenId* rest,
                              std::int32_t limit) const noexcept {
    TreeNode* node = match.at.node;
    const auto consider = [&](TreeNode* source, std::int32_t page) {
        const std::int32_t common =
            common_tokens(source->page_tokens(page, page_size_), rest, limit);
        if (common > match.partial_tokens) {
            match.partial_tokens = common;
            match.partial = {source, match.at.depth + 1};
        }
    };
    if (match.at.depth < depth_of(node)) {
        consider(node, match.at.depth - node->start);
    } else if (node->is_sorted) {
        TreeNode* best = node->order->longest_common_start(rest, limit, &match.partial_tokens);
        if (best != nullptr) match.partial = {best, match.at.depth + 1};
    } else {
        for_each_child(node, [&](TreeNode* child) { consider(child, 0); });
    }
}

std::size_t PrefixTree::find_partials(TreePosition at, const TokenId* rest, std::int32_t limit,
                                      PartialPage* out, std::size_t n) const noexcept {
    const auto [node, depth] = position(at.node, at.depth);
    limit = std::min(limit, page_size_ - 1);
    std::size_t found = 0;
    const auto consider = [&](TreeNode* source, std::int32_t page) {
        const std::int32_t common =
            common_tokens(source->page_tokens(page, page_size_), rest, limit);
        if (common > 0 && found < n) out[found++] = {{source, depth + 1}, common};
    };
    if (depth < depth_of(node)) {
        consider(node, depth - node->start);
        return found;
    }
    if (!node->is_sorted) {
        for_each_child(node, [&](TreeNode* child) { consider(child, 0); });
        std::sort(out, out + found,
                  [](const PartialPage& a, const PartialPage& b) { return a.tokens > b.tokens; });
        return found;
    }
    constexpr std::size_t kMost = 64;
    std::array<TreeNode*, kMost> children;
    std::array<std::int32_t, kMost> common;
    found =
        node->order->common_starts(rest, limit, children.data(), common.data(), std::min(n, kMost));
    for (std::size_t i = 0; i < found; ++i) out[i] = {{children[i], depth + 1}, common[i]};
    return found;
}

std::int32_t PrefixTree::depth_of(const TreeNode* node) noexcept { return node->end(); }

std::int32_t PrefixTree::start_of(const TreeNode* node) noexcept { return node->start; }

const TreeNode* PrefixTree::parent_of(const TreeNode* node) noexcept {
    return node->parent->is_root() ? nullptr : node->parent;
}

std::string_view PrefixTree::name_of(const TreeNode* node) noexcept {
    while (!node->is_root()) node = node->parent;
    return node->name == nullptr ? std::string_view{} : *node->name;
}

TreePosition PrefixTree::position(TreeNode* node, std::int32_t depth) noexcept {
    while (!node->is_root() && depth <= node->start) node = node->parent;
    return {node, depth};
}

void PrefixTree::copy_pages(TreePosition at, std::int32_t first, BlockId* out) const noexcept {
    auto [node, depth] = position(at.node, at.depth);
    while (depth > first) {
        const std::int32_t from = std::max(first, node->start);
        std::memcpy(out + (from - first), node->ids(page_size_) + (from - node->start),
                    static_cast<std::size_t>(depth - from) * sizeof(BlockId));
        depth = from;
        node = node->parent;
    }
}

std::vector<TokenId> PrefixTree::tokens_of(TreePosition at, std::int32_t first) const {
    auto [node, depth] = position(at.node, at.depth);
    const auto page = static_cast<std::size_t>(page_size_);
    std::vector<TokenId> tokens(static_cast<std::size_t>(depth - first) * page);
    while (depth > first) {
        const std::int32_t from = std::max(first, node->start);
        std::memcpy(tokens.data() + static_cast<std::size_t>(from - first) * page,
                    node->page_tokens(from - node->start, page_size_),
                    static_cast<std::size_t>(depth - from) * page * sizeof(TokenId));
        depth = from;
        node = node->parent;
    }
    return tokens;
}

bool PrefixTree::is_protected(TreePosition at) const noexcept {
    return protection_->is_protected(position(at.node, at.depth).node);
}

std::int64_t PrefixTree::num_unprotected(TreePosition at) const noexcept {
    const TreeNode* end = position(at.node, at.depth).node;
    return at.depth - std::min(at.depth, protection_->protected_depth(end));
}

std::int64_t PrefixTree::num_evictable() const noexcept {
    return num_cached_ - protection_->num_protected();
}

void PrefixTree::pin(TreeNode* node) noexcept { protection_->pin(node); }

void PrefixTree::unpin(TreeNode* node, bool touch) {
    if (node->pins == 0) refuse_unpin(node);
    protection_->unpin(node);
    if (node->is_root()) return drop_root_if_unused(node);
    if (node->is_forgotten) return drop_forgotten(node);
    if (touch) release_to_policy(node);
    offer_if_free(node);
}

PrefixHandle PrefixTree::handle(TreePosition at) const noexcept {
    const TreePosition exact = position(at.node, at.depth);
    return {exact.node->id, exact.node->generation, exact.depth};
}

TreePosition PrefixTree::resolve(PrefixHandle handle) const {
    TreeNode* node = arena_->find(handle.node);
    if (node == nullptr || node->generation != handle.generation ||
        node->generation == TreeNode::kNoGeneration || handle.depth > depth_of(node)) {
        throw InvalidHandleError(detail::concat(
            "prefix handle of ", handle.depth,
            " pages is stale: pages of its run were evicted since; match the tokens again"));
    }
    return position(node, handle.depth);
}

void PrefixTree::check_node(const TreeNode* node) const {
    using detail::require_law;
    const bool root = node->is_root();
    require_law(root || (node->num_pages >= 1 && node->num_pages <= node->capacity),
                "prefix tree: a run holds 1 .. capacity pages");
    require_law(node->num_children > 0 || node->pins > 0 || root || node->is_candidate,
                "prefix tree: a leaf without pins is a candidate for eviction");
    std::uint32_t children = 0;
    std::uint32_t protected_children = 0;
    for_each_child(node, [&](TreeNode* c) {
        ++children;
        require_law(c->parent == node && c->start == depth_of(node),
                    "prefix tree: a child starts at the end of its parent");
        require_law(find_child(node, c->tokens) == c, "prefix tree: a child is found by its page");
        require_law(c->is_indexed == (node->num_children > 1),
                    "prefix tree: only children with siblings are indexed");
        protected_children += c->protectors > 0 ? 1 : 0;
    });
    require_law(children == node->num_children, "prefix tree: children are counted");
    for (const TreeNode* severed : severed_) {
        if (severed->parent == node && severed->protectors > 0) ++protected_children;
    }
    require_law(!node->is_forgotten || node->protectors > 0,
                "prefix tree: a forgotten run without pins is dropped");
    Protection::check_node(node, protected_children);
}

void PrefixTree::check_integrity() const {
    protection_->settle();
    std::vector<const TreeNode*> stack{default_root_};
    for (const auto& entry : roots_) stack.push_back(entry.second.node);
    std::int64_t nodes = -static_cast<std::int64_t>(stack.size());
    stack.insert(stack.end(), severed_.begin(), severed_.end());
    std::int64_t cached = 0;
    std::int64_t forgotten = 0;
    std::int64_t protected_pages = 0;
    while (!stack.empty()) {
        const TreeNode* node = stack.back();
        stack.pop_back();
        check_node(node);
        ++nodes;
        cached += node->num_pages;
        forgotten += node->is_forgotten ? node->num_pages : 0;
        protected_pages += node->protectors > 0 ? node->num_pages : 0;
        for_each_child(node, [&](TreeNode* child) { stack.push_back(child); });
    }
    detail::require_law(nodes == num_nodes_, "prefix tree: nodes are counted");
    detail::require_law(cached == num_cached_, "prefix tree: cached pages are counted");
    detail::require_law(forgotten == num_forgotten_, "prefix tree: forgotten pages are counted");
    detail::require_law(protected_pages == protection_->num_protected(),
                        "prefix tree: protected pages are counted");
}

void PrefixTree::find_tokens_up_to(TokenId highest, std::vector<TokenId>& out) const {
    for (const Run& run : collect_runs()) {
        const std::int64_t n = std::int64_t{run.num_pages} * page_size_;
        for (std::int64_t i = 0; i < n; i += kScanned) {
            append_up_to(highest, run.tokens + i, std::min(kScanned, n - i), out);
        }
    }
}

std::vector<const TreeNode*> PrefixTree::runs() const {
    std::vector<const TreeNode*> runs;
    std::vector<const TreeNode*> stack{default_root_};
    for (const auto& entry : roots_) stack.push_back(entry.second.node);
    while (!stack.empty()) {
        const TreeNode* node = stack.back();
        stack.pop_back();
        if (!node->is_root()) runs.push_back(node);
        for_each_child(node, [&](TreeNode* child) { stack.push_back(child); });
    }
    return runs;
}

std::vector<PrefixTree::Run> PrefixTree::collect_runs() const {
    std::vector<Run> found;
    for (const TreeNode* node : runs()) {
        found.push_back({node->tokens, node->ids(page_size_), node->num_pages});
    }
    return found;
}

// Growth of the tree: split and insert.

namespace {

// The children of a node become sorted when their number exceeds kSortAbove, and unsorted when it
// falls to kUnsortAt.
constexpr std::uint32_t kSortAbove = 8;
constexpr std::uint32_t kUnsortAt = 4;

// Room for growth of a run that a sequence continues to write, in pages: a quarter of the pages
// above the run, within these bounds. Runs grow in place only into this room, so growth never
// copies.
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

// Writes `n` pages into a buffer of `capacity` pages, starting at page `at` of the buffer.
void copy_run(TokenId* buffer, std::int32_t capacity, std::int32_t at, const TokenId* tokens,
              const BlockId* ids, std::int32_t n, std::int32_t page_size) noexcept {
    const auto pages = static_cast<std::size_t>(n);
    std::memcpy(buffer + static_cast<std::ptrdiff_t>(at) * page_size, tokens,
                pages * static_cast<std::size_t>(page_size) * sizeof(TokenId));
    std::memcpy(buffer + static_cast<std::ptrdiff_t>(capacity) * page_size + at, ids,
                pages * sizeof(BlockId));
}

// Removes the first `n` pages of a run: moves the later pages to the start of its buffer.
void drop_front(TreeNode* node, std::int32_t n, std::int32_t page_size) noexcept {
    const auto left = static_cast<std::size_t>(node->num_pages - n);
    std::memmove(node->tokens, node->page_tokens(n, page_size),
                 left * static_cast<std::size_t>(page_size) * sizeof(TokenId));
    BlockId* ids = node->ids(page_size);
    std::memmove(ids, ids + n, left * sizeof(BlockId));
    node->num_pages -= n;
}

}  // namespace

// The nodes to visit are chained through `hash_next`, so the destructor allocates no memory.
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

// The ids follow the tokens in the buffer and move first. If realloc fails, the node keeps the
// larger buffer.
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

// The index has room for two children. Only the order of a large family can still fail; on failure
// the order does not contain the child.
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

// The head is a new node and the tail keeps the old node, so pins, children, handles and the place
// in the eviction order stay with the end of the run. The longer half keeps the buffer.
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

// A run grows in place only if its only pin is the caller's. The pin moves to the new end of the
// run.
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

// All steps that can fail run before the tree changes. If the run at `at` is split, the tail is the
// only child of the head, so the leaf needs only room in the index.
TreeNode* PrefixTree::add_leaf(TreePosition at, const TokenId* tokens, const BlockId* ids,
                               std::int32_t n, const Retention& retention) {
    // The first run of a prompt gets a buffer of exact size. A run after the caller's own run
    // belongs to a sequence that grows.
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
    // A run with a child cannot grow.
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

// Appends the pages after page `first` on the path to `at`, which were inserted again. `duplicates`
// has room.
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

// Eviction.

// The buffer and the parent of the leaf can be read until `free_leaf`.
void PrefixTree::remove_leaf(TreeNode* leaf) noexcept {
    TreeNode* parent = leaf->parent;
    detach(leaf);
    policy_->erase(leaf->id);
    --num_nodes_;
    if (!parent->is_root()) offer_if_free(parent);
}

void PrefixTree::free_leaf(TreeNode* leaf) noexcept {
    TreeNode* parent = leaf->parent;
    std::free(leaf->tokens);
    arena_->recycle(leaf);
    if (parent->is_root()) drop_root_if_unused(parent);
}

std::int64_t PrefixTree::trim(TreeNode* leaf, std::int64_t n, BlockId* out) noexcept {
    const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(n, leaf->num_pages));
    const BlockId* end = leaf->ids(page_size_) + leaf->num_pages;
    std::reverse_copy(end - count, end, out);
    num_cached_ -= count;
    leaf->num_pages -= count;
    const bool is_gone = leaf->num_pages == 0;
    if (is_gone) {
        // The tokens stay in place, so the siblings' order still finds the leaf by its first page.
        remove_leaf(leaf);
    } else {
        leaf->begin_generation();
        tell_size(leaf);
    }
    if (listener_ != nullptr) listener_->removed(leaf, leaf->end(), count);
    if (is_gone) {
        free_leaf(leaf);
    } else if (leaf->num_pages < leaf->capacity / 2) {
        shrink_buffer(leaf);
    }
    return count;
}

// In a large tree every cache line of a victim is cold, and the address of each line is read from
// another line. So a call prefetches a different stage for each of the next three victims.
void PrefixTree::prefetch_victims() const noexcept {
    std::array<NodeId, 4> victims;  // the first is the leaf
    const std::size_t n = policy_->upcoming(victims.data(), victims.size());
    if (n > 1) {
        const TreeNode* next = arena_->at(victims[1]);
        if (next->parent->is_sorted) next->parent->order->prefetch(next->tokens);
    }
    if (n > 2) {
        const TreeNode* second = arena_->at(victims[2]);
        prefetch(second->tokens);
        prefetch(second->ids(page_size_));
        index_->prefetch(second);
    }
    if (n > 3) prefetch_node(arena_->at(victims[3]));
}

// Withdraws candidates with pins or children. The tree offers such a run again when its last pin or
// child is removed.
NodeId PrefixTree::victim() noexcept {
    for (;;) {
        const NodeId victim = policy_->victim();
        if (victim == kNoNode) return kNoNode;
        TreeNode* leaf = arena_->at(victim);
        if (leaf->num_children == 0 && leaf->pins == 0) return victim;
        withdraw(leaf);
    }
}

TreeNode* PrefixTree::run(NodeId id) const noexcept { return arena_->at(id); }

PrefixTree::Victim PrefixTree::next_victim(EvictionGuard guard) noexcept {
    protection_->settle();
    Victim found;
    TreeNode* set_aside = nullptr;
    for (NodeId next = victim(); next != kNoNode; next = victim()) {
        TreeNode* leaf = arena_->at(next);
        const std::int32_t keep = leaf == guard.node ? guard.keep : 0;
        if (leaf->num_pages > keep) {
            found = {{leaf, leaf->end()}, leaf->num_pages - keep};
            break;
        }
        withdraw(leaf);
        set_aside = leaf;
    }
    if (set_aside != nullptr) offer_if_free(set_aside);
    return found;
}

std::vector<NodeId> PrefixTree::upcoming_victims(std::size_t spare) const {
    std::vector<NodeId> victims(static_cast<std::size_t>(num_nodes_) + spare);
    victims.resize(policy_->upcoming(victims.data(), victims.size()));
    return victims;
}

std::int64_t PrefixTree::evict(std::int64_t n, BlockId* out, EvictionGuard guard) noexcept {
    protection_->settle();
    std::int64_t evicted = 0;
    TreeNode* set_aside = nullptr;
    while (evicted < n) {
        const NodeId next = victim();
        if (next == kNoNode) break;
        TreeNode* leaf = arena_->at(next);
        const std::int64_t keep = leaf == guard.node ? guard.keep : 0;
        if (leaf->num_pages <= keep) {
            withdraw(leaf);
            set_aside = leaf;
        } else {
            if (leaf->num_pages - keep <= n - evicted) prefetch_victims();
            evicted += trim(leaf, std::min(n - evicted, leaf->num_pages - keep), out + evicted);
        }
    }
    if (set_aside != nullptr) offer_if_free(set_aside);
    return evicted;
}

// The pages are in the order of `evict`. When `evict` reaches a blocked candidate, it withdraws the
// candidate and evicts it directly after the run that blocked it. A candidate that `evict` has not
// reached is evicted in its own turn.
std::vector<BlockId> PrefixTree::evictable_pages() const {
    protection_->settle();
    std::vector<BlockId> pages;
    pages.reserve(static_cast<std::size_t>(num_evictable()));
    std::unordered_map<const TreeNode*, std::uint32_t> gone;  // children of a run
    std::unordered_set<const TreeNode*> met;
    for (const NodeId victim : upcoming_victims(0)) {
        const TreeNode* run = arena_->at(victim);
        met.insert(run);
        while (!run->is_root() && run->pins == 0 && gone[run] == run->num_children) {
            const std::reverse_iterator<const BlockId*> end(run->ids(page_size_));
            pages.insert(pages.end(), end - run->num_pages, end);
            run = run->parent;
            ++gone[run];
            if (run->is_candidate && met.count(run) == 0) break;
        }
    }
    return pages;
}

// Forget: removes runs from all lookups, also runs that requests hold.

bool PrefixTree::is_forgotten(const TreeNode* node) noexcept { return node->is_forgotten; }

std::int32_t PrefixTree::findable_depth(const TreeNode* node) noexcept {
    std::int32_t depth = node->end();
    for (; node->is_forgotten; node = node->parent) depth = node->start;
    return depth;
}

std::vector<TreePosition> PrefixTree::find_pages(const std::vector<bool>& asked) const {
    std::vector<TreePosition> found;
    std::vector<TreeNode*> stack{default_root_};
    for (const auto& entry : roots_) stack.push_back(entry.second.node);
    while (!stack.empty()) {
        TreeNode* node = stack.back();
        stack.pop_back();
        std::int32_t page = 0;
        if (!node->is_root()) {
            const BlockId* ids = node->ids(page_size_);
            while (page < node->num_pages && !asked[static_cast<std::size_t>(ids[page])]) ++page;
        }
        if (page < node->num_pages) {
            found.push_back({node, node->start + page + 1});
        } else {
            for_each_child(node, [&](TreeNode* child) { stack.push_back(child); });
        }
    }
    return found;
}

std::vector<TreePosition> PrefixTree::locate(const std::vector<bool>& asked) const {
    std::vector<TreePosition> found;
    std::vector<TreeNode*> stack{default_root_};
    for (const auto& entry : roots_) stack.push_back(entry.second.node);
    stack.insert(stack.end(), severed_.begin(), severed_.end());
    while (!stack.empty()) {
        TreeNode* node = stack.back();
        stack.pop_back();
        if (!node->is_root()) {
            const BlockId* ids = node->ids(page_size_);
            for (std::int32_t page = 0; page < node->num_pages; ++page) {
                if (asked[static_cast<std::size_t>(ids[page])]) {
                    found.push_back({node, node->start + page + 1});
                }
            }
        }
        for_each_child(node, [&](TreeNode* child) { stack.push_back(child); });
    }
    return found;
}

PrefixTree::Branches PrefixTree::find_branches(const std::vector<TreePosition>& ends) {
    Branches found;
    make_room(severed_, ends.size());
    for (const TreePosition& end : ends) {
        const auto [node, depth] = position(end.node, end.depth);
        if (depth - 1 > node->start) static_cast<void>(split({node, depth - 1}));
        found.tops.push_back(node);  // the tail keeps its node
        found.runs.push_back(node);
        for (std::size_t i = found.runs.size() - 1; i < found.runs.size(); ++i) {
            for_each_child(found.runs[i], [&](TreeNode* child) { found.runs.push_back(child); });
        }
    }
    return found;
}

// Drops runs from the leaves up, in the order of eviction. A run that a pin protects stays readable
// for its holder. Only the first run of a branch is detached from its parent; the branch pins the
// parent instead, so `unpin` refuses no parent.
// NOLINTNEXTLINE(bugprone-exception-escape)
void PrefixTree::forget(const Branches& branches) noexcept {
    protection_->settle();
    for (TreeNode* top : branches.tops) sever(top);
    std::for_each(branches.runs.rbegin(), branches.runs.rend(),
                  [this](TreeNode* node) { mark_forgotten(node); });
    std::for_each(branches.runs.rbegin(), branches.runs.rend(), [this](TreeNode* node) {
        if (node->protectors > 0) return;
        const bool is_top = node->is_severed;
        TreeNode* parent = drop_run(node);
        if (is_top) unpin(parent, false);
    });
}

PrefixTree::Branches PrefixTree::make_branches() {
    Branches room;
    const auto most = static_cast<std::size_t>(num_nodes_);
    make_room(severed_, most);
    room.tops.reserve(most);
    room.runs.reserve(most);
    return room;
}

void PrefixTree::forget_all(Branches& room) noexcept {
    const auto add_tops = [&](TreeNode* root) {
        for_each_child(root, [&](TreeNode* top) { room.tops.push_back(top); });
    };
    add_tops(default_root_);
    for (const auto& entry : roots_) add_tops(entry.second.node);
    room.runs = room.tops;  // there is room
    for (std::size_t i = 0; i < room.runs.size(); ++i) {
        for_each_child(room.runs[i], [&](TreeNode* child) { room.runs.push_back(child); });
    }
    forget(room);
}

void PrefixTree::mark_forgotten(TreeNode* node) noexcept {
    if (listener_ != nullptr) listener_->removed(node, node->start, node->num_pages);
    node->is_forgotten = true;
    node->begin_generation();
    num_forgotten_ += node->num_pages;
    if (node->is_candidate) withdraw(node);
    if (forgotten_ != nullptr) forgotten_->left(node->ids(page_size_), node->num_pages);
}

// `severed_` has room.
void PrefixTree::sever(TreeNode* top) noexcept {
    detach(top);
    top->next_sibling = nullptr;
    top->is_severed = true;
    severed_.push_back(top);
    protection_->pin(top->parent);
}

// Drops a run without pins and children. Returns its parent. If the run was severed, the caller
// must give back the run's pin on the parent.
TreeNode* PrefixTree::drop_run(TreeNode* node) noexcept {
    TreeNode* parent = node->parent;
    if (node->is_severed) {
        severed_.erase(std::find(severed_.begin(), severed_.end(), node));
    } else {
        detach(node);
    }
    policy_->erase(node->id);
    --num_nodes_;
    num_cached_ -= node->num_pages;
    num_forgotten_ -= node->num_pages;
    if (forgotten_ != nullptr) forgotten_->let_go(node->ids(page_size_), node->num_pages);
    std::free(node->tokens);
    arena_->recycle(node);
    return parent;
}

// Called after an unpin of a forgotten run. Drops the run if it has no pins and no children, and in
// the same way each forgotten run above it.
void PrefixTree::drop_forgotten(TreeNode* node) noexcept {
    while (node->pins == 0 && node->num_children == 0) {
        protection_->settle();  // removes the run from the unsettled nodes
        const bool is_top = node->is_severed;
        node = drop_run(node);
        if (!is_top) continue;
        protection_->unpin(node);
        if (node->is_root()) return drop_root_if_unused(node);
        if (!node->is_forgotten) return offer_if_free(node);
    }
}

std::vector<PrefixTree::Run> PrefixTree::collect_forgotten_runs() const {
    std::vector<Run> found;
    std::vector<const TreeNode*> stack(severed_.begin(), severed_.end());
    while (!stack.empty()) {
        const TreeNode* node = stack.back();
        stack.pop_back();
        found.push_back({node->tokens, node->ids(page_size_), node->num_pages});
        for_each_child(node, [&](TreeNode* child) { stack.push_back(child); });
    }
    return found;
}

// Calls to the eviction policy.

// Makes the run a candidate, even if it has other pins or children: see EvictionPolicy.
void PrefixTree::release_to_policy(TreeNode* node) noexcept {
    node->is_candidate = true;
    policy_->release(node->id, ++clock_);
    if (!interest_.recency) return;
    while (!(node = node->parent)->is_root()) policy_->pass(node->id, clock_);
}

// A leaf that is not a candidate was withdrawn while it had pins or children.
void PrefixTree::offer_if_free(TreeNode* node) noexcept {
    if (node->pins > 0 || node->num_children > 0) return;
    if (interest_.exposure) policy_->expose(node->id);
    if (node->is_candidate) return;
    node->is_candidate = true;
    policy_->offer(node->id);
}

void PrefixTree::withdraw(TreeNode* node) noexcept {
    node->is_candidate = false;
    policy_->withdraw(node->id);
}

void PrefixTree::tell_size(const TreeNode* node) noexcept {
    if (interest_.sizes) policy_->resize(node->id, node->end(), node->num_pages);
}

void PrefixTree::tell_fingerprint(const TreeNode* node) noexcept {
    if (!interest_.fingerprints) return;
    const auto depth = static_cast<std::uint64_t>(node->start);
    policy_->identify(node->id, hash_tokens(depth, node->tokens, page_size_));
}

// Counts a hit for each run after page `first` on the path to `at`.
void PrefixTree::use_between(TreePosition at, std::int32_t first) noexcept {
    const TreeNode* node = position(at.node, at.depth).node;
    for (; node->end() > first; node = node->parent) policy_->hit(node->id);
}

void PrefixTree::retain_between(TreePosition at, std::int32_t first, std::int32_t end,
                                const Retention& retention) noexcept {
    const TreeNode* node = position(at.node, std::min(at.depth, end)).node;
    for (; node->end() > first; node = node->parent) policy_->retain(node->id, retention);
}

// A run is shared if another run continues it or a later run of the prefix. Forgotten runs have
// left the policy.
void PrefixTree::expect_between(TreePosition at, std::int64_t returns) noexcept {
    const TreeNode* node = position(at.node, at.depth).node;
    bool is_shared = node->end() > at.depth || node->num_children > 0;
    for (; !node->is_root(); node = node->parent) {
        if (!node->is_forgotten) policy_->expect(node->id, returns, is_shared);
        is_shared = is_shared || node->parent->num_children > 1;
    }
}

void PrefixTree::touch(TreePosition at) {
    if (at.depth == 0) return;
    TreeNode* end = split(at);
    use(at);
    release_to_policy(end);
}

void PrefixTree::advance(std::int64_t now) noexcept {
    if (!interest_.retention || now <= now_) return;
    now_ = now;
    policy_->advance(now);
}

}  // namespace kvcore
