// SPDX-License-Identifier: Apache-2.0
// Reading, pinning and checking; what changes the shape of the tree is in prefix_tree_edit.cpp.
#include "kvcore/prefix_tree.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <limits>
#include <stdexcept>

#include "kvcore/errors.hpp"
#include "tree/child_index.hpp"
#include "tree/children.hpp"
#include "tree/policies/lru.hpp"
#include "tree/protection.hpp"
#include "tree/sibling_order.hpp"
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

// Tokens that are looked at together for whether there is anything to find: most have none.
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

// Whole pages at which two runs agree. memcmp says only "differs somewhere", so the runs are
// compared in ever smaller pieces; a full hit costs what comparing the bytes costs.
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
    roots_.erase(roots_.find(*root->name));  // by the place, since the key goes with it
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
    // Should the index not have the page, its neighbours are wanted: both searches miss at once.
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

// The page that follows the match in its run or, at the end of a run, one of the children's first.
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
                    "prefix tree: a child hangs where its parent ends");
        require_law(find_child(node, c->tokens) == c, "prefix tree: a child is found by its page");
        require_law(c->is_indexed == (node->num_children > 1),
                    "prefix tree: children are indexed exactly where there are several");
        protected_children += c->protectors > 0 ? 1 : 0;
    });
    require_law(children == node->num_children, "prefix tree: children are counted");
    for (const TreeNode* severed : severed_) {
        if (severed->parent == node && severed->protectors > 0) ++protected_children;
    }
    require_law(!node->is_forgotten || node->protectors > 0,
                "prefix tree: what was forgotten and nobody holds is gone");
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

}  // namespace kvcore
