// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvcore/eviction.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

struct TreeNode;

/// Is called when pages enter and leave a PrefixTree, in order. Exactly one call reports each entry
/// and each exit of a page, so a listener can mirror the tree.
///
/// The pages of a call are first .. first + n - 1 on the path to `node`, counted from the root of
/// its namespace. `copy_pages` and `tokens_of` read them with the arguments `{node, first + n}` and
/// `first`; `name_of` returns the namespace. The tree calls the listener after the change is
/// complete; a listener may read the tree but must not change it. A page enters after its
/// predecessors and leaves before them. The tree does not call it for pages that it already has,
/// for runs that are cut in two, or in its destructor.
///
/// The calls do not say why pages leave. The trees of a CacheManager have no TreeListener: no call
/// of CacheManager takes one.
///
/// Owns: nothing.
/// Threads: called on the thread that changes the tree; a CacheManager changes its trees under its
/// mutex.
/// Cost: one call for a run that grows or shrinks, never one per page. A tree without a listener
/// pays a branch.
class TreeListener {
   public:
    TreeListener() = default;
    TreeListener(const TreeListener&) = delete;
    TreeListener& operator=(const TreeListener&) = delete;
    virtual ~TreeListener() = default;

    /// Pages entered the tree.
    virtual void stored(TreeNode* node, std::int32_t first, std::int32_t n) noexcept = 0;
    /// Pages left the tree: no search finds them any more, but they can be read during the call. If
    /// the whole run left, the node must not be used after the call.
    virtual void removed(TreeNode* node, std::int32_t first, std::int32_t n) noexcept = 0;
};

/// Is called for the pages that PrefixTree::forget takes out of a tree.
///
/// The tree calls `left` once for each page, and `let_go` once: in the same `forget` if the page
/// has no holder, otherwise in the `unpin` of its last holder.
///
/// Owns: nothing. Threads: as TreeListener. Cost: a call per run.
class ForgottenListener {
   public:
    ForgottenListener() = default;
    ForgottenListener(const ForgottenListener&) = delete;
    ForgottenListener& operator=(const ForgottenListener&) = delete;
    virtual ~ForgottenListener() = default;

    /// No search finds these pages [n] any more. The call must not change the tree.
    virtual void left(const BlockId* ids, std::int32_t n) noexcept = 0;
    /// These pages have no holder any more: the tree gives up its reference to them. The call must
    /// not use the tree.
    virtual void let_go(const BlockId* ids, std::int32_t n) noexcept = 0;
};

struct TreeNode;
class NodeArena;
class Protection;
class ProtectionListener;
class OrderArena;
class ChildIndex;

/// A prefix found in the tree: the run it ends in and its length. A position stays right when runs
/// are split, and becomes invalid when pages are evicted; PrefixHandle is its checked form.
struct TreePosition {
    TreeNode* node = nullptr;
    std::int32_t depth = 0;  // pages from the namespace's root
};

/// The result of `match`.
struct PrefixMatch {
    TreePosition at;  // the longest cached prefix in whole pages
    // The cached page that continues the prefix by the most tokens, if the caller wanted it.
    TreePosition partial;             // partial.depth counts that page
    std::int32_t partial_tokens = 0;  // 0: no page does
};

/// A cached page that continues a prefix by some tokens.
struct PartialPage {
    TreePosition at;  // its depth counts the page
    std::int32_t tokens = 0;
};

/// A position to keep: `resolve` rejects it as stale after pages of its run were evicted.
struct PrefixHandle {
    std::uint32_t node = 0;
    std::uint32_t generation = 0;
    std::int32_t depth = 0;
};

/// A page that the tree already had when `insert` was called.
struct DuplicatePage {
    std::int32_t index;  // which of the inserted pages
    BlockId cached;      // the id the tree has for the same tokens
};

/// Pages that eviction must keep: the first `keep` of a run.
struct EvictionGuard {
    const TreeNode* node = nullptr;
    std::int32_t keep = 0;
};

/// Maps tokens to pages: a radix tree over runs of whole pages, with a root for each namespace.
///
/// Owns: nodes and token buffers, but no pages; `insert` puts page ids in and `evict` returns them.
/// Invariants: siblings differ in their first page; a page is evictable exactly when neither its
/// run nor a run below is pinned; every node without child and pin is a candidate of the eviction
/// policy; evictable + protected == cached.
/// Memory: a method that cannot get memory throws std::bad_alloc and changes nothing. The noexcept
/// methods and `unpin` need no memory.
/// Threads: no locks of its own; CacheManager locks around it.
/// Cost: `match` compares the tokens and does one look-up per run; `insert` copies the new tokens;
/// `evict` is O(1) amortised per page or run; `pin` and `unpin` are O(1): the tree counts the pages
/// that they protect when that count is next needed.
class PrefixTree {
   public:
    /// Uses LRU unless a policy is given. Throws std::invalid_argument unless page_size >= 1.
    explicit PrefixTree(std::int32_t page_size, std::unique_ptr<EvictionPolicy> policy = nullptr);
    PrefixTree(const PrefixTree&) = delete;
    PrefixTree& operator=(const PrefixTree&) = delete;
    ~PrefixTree();

    /// Sets the listener for pages that enter and leave from now on; nullptr for no listener. The
    /// tree does not own it.
    void set_listener(TreeListener* listener) noexcept { listener_ = listener; }
    [[nodiscard]] TreeListener* listener() const noexcept { return listener_; }
    /// Sets the listener for protected pages. The tree calls the listener when it counts protected
    /// pages.
    void set_protection_listener(ProtectionListener* listener) noexcept;
    /// Sets the current time for the priorities of runs, in a unit that the caller chooses. An
    /// earlier time changes nothing.
    void advance(std::int64_t now) noexcept;
    /// Sets the listener for forgotten pages; nullptr for no listener. The tree does not own it.
    void set_forgotten_listener(ForgottenListener* listener) noexcept { forgotten_ = listener; }
    /// The policy that decides the order of eviction.
    [[nodiscard]] const EvictionPolicy& policy() const noexcept { return *policy_; }

    /// Tokens per page.
    [[nodiscard]] std::int32_t page_size() const noexcept { return page_size_; }
    /// Pages in the tree. O(1).
    [[nodiscard]] std::int64_t num_cached() const noexcept { return num_cached_ - num_forgotten_; }
    /// Cached pages that neither a pin nor a pinned descendant protects. O(pins changed since the
    /// last count), each up to the next protected node.
    [[nodiscard]] std::int64_t num_evictable() const noexcept;
    /// Runs, not counting the roots. O(1).
    [[nodiscard]] std::int64_t num_nodes() const noexcept { return num_nodes_; }

    /// Root of a namespace; "" is the default namespace. `find_namespace` returns nullptr for a
    /// namespace without pages and holders, `open_namespace` creates it. The tree drops an empty,
    /// unpinned namespace by itself.
    [[nodiscard]] TreeNode* find_namespace(std::string_view name) const noexcept;
    [[nodiscard]] TreeNode* open_namespace(std::string_view name);

    /// Longest cached continuation of `root` (or of any node) by `tokens` [n], in whole pages.
    /// `want_partial`: also the cached page that shares most of the tokens after it, found in O(log
    /// siblings). Changes nothing.
    [[nodiscard]] PrefixMatch match(TreeNode* root, const TokenId* tokens, std::int64_t n,
                                    bool want_partial = false) const noexcept;

    /// True if there is a namespace other than the default namespace.
    [[nodiscard]] bool has_namespaces() const noexcept { return !roots_.empty(); }
    /// Pages of the longest cached prefix of `tokens` [n] in other namespaces than `name`. Searches
    /// `most` namespaces, the default namespace first.
    [[nodiscard]] std::int32_t match_elsewhere(std::string_view name, const TokenId* tokens,
                                               std::int64_t n, std::int32_t most) const noexcept;

    /// Writes the ids of pages first .. at.depth - 1 on the path to `at` to `out` [at.depth -
    /// first].
    void copy_pages(TreePosition at, std::int32_t first, BlockId* out) const noexcept;
    /// Tokens of the same pages. Copies them.
    [[nodiscard]] std::vector<TokenId> tokens_of(TreePosition at, std::int32_t first) const;
    /// Adds every token in the tree that is at most `highest` to `out`, in any order. O(tokens).
    void find_tokens_up_to(TokenId highest, std::vector<TokenId>& out) const;
    /// Pages on the path to `at` that no pin protects.
    [[nodiscard]] std::int64_t num_unprotected(TreePosition at) const noexcept;
    /// True if a pin protects the run that `at` ends in.
    [[nodiscard]] bool is_protected(TreePosition at) const noexcept;

    /// Returns the node that ends exactly at `at`; cuts the run in two if it continues after `at`.
    /// Copies the shorter half. Pins, positions and handles stay right.
    [[nodiscard]] TreeNode* split(TreePosition at);
    /// Protects a node and all its ancestors until `unpin` was called as often as `pin`. O(1).
    void pin(TreeNode* node) noexcept;
    /// Removes a pin. `touch`: the holder releases the prefix, which counts as a use. Pass false if
    /// the holder moves on to a node below, or held the pages only for a moment. Throws
    /// InvalidHandleError for a node without pins and changes nothing.
    void unpin(TreeNode* node, bool touch);

    /// Counts a use of every run after page `first` on the path to `at`, for policies that count
    /// uses: O(runs) for them, free for others. The recency of a run changes only when a user
    /// releases it.
    void use(TreePosition at, std::int32_t first = 0) noexcept {
        if (interest_.hits) use_between(at, first);
    }
    /// Applies `retention` to every run that has a page of first .. end - 1 on the path to `at`,
    /// for policies that use priorities. Cost as `use`.
    void retain(TreePosition at, std::int32_t first, std::int32_t end,
                const Retention& retention) noexcept {
        if (interest_.retention) retain_between(at, first, end, retention);
    }
    /// The session of the prefix at `at`, the end of a run, returns at the time `returns`, which
    /// may also be a value of ReturnTime. The caller unpins the holder of the prefix after this
    /// call. For policies that use return times. O(runs) for them, free for others.
    void expect(TreePosition at, std::int64_t returns) noexcept {
        if (interest_.returns) expect_between(at, returns);
    }
    /// Takes a prefix and releases it at once: counts as a use, also by recency. Ends a run at
    /// `at`, so it may throw std::bad_alloc. O(runs).
    void touch(TreePosition at);

    /// Puts `n` pages below `at`, the end of a run that the caller has pinned once (or a root). The
    /// tree does not take pages whose tokens it already has: it reports them in `duplicates` and
    /// counts a use of their runs. Applies `retention` to all runs of these pages.
    /// Returns the node where the last page ends. If it throws, it adds nothing to `duplicates`
    /// either.
    [[nodiscard]] TreeNode* insert(TreeNode* at, const TokenId* tokens, const BlockId* ids,
                                   std::int32_t n, std::vector<DuplicatePage>& duplicates,
                                   const Retention& retention = {});
    /// Frees the buffer space that an unpinned node kept for growth.
    void shrink(TreeNode* node) noexcept;

    /// The run whose last page is evicted next, ignoring any guard; kNoNode if no page is
    /// evictable. O(1) amortised.
    [[nodiscard]] NodeId victim() noexcept;
    /// The run with an id that the policy was given.
    [[nodiscard]] TreeNode* run(NodeId id) const noexcept;
    /// The pages that `evict` takes next under this guard: their number and their run, whose last
    /// page is the end of the prefix. The node is nullptr if no page is evictable. O(1) amortised.
    struct Victim {
        TreePosition end;
        std::int64_t num_pages = 0;
    };
    [[nodiscard]] Victim next_victim(EvictionGuard guard = {}) noexcept;
    /// Returns the runs that the policy may name as victims, the next victim first. `spare`: number
    /// of ids that the policy lists but that are not runs of this tree. Throws std::bad_alloc.
    /// O(runs log runs).
    [[nodiscard]] std::vector<NodeId> upcoming_victims(std::size_t spare) const;
    /// Evicts the `n` least valuable evictable pages, tail before head, and writes their ids to
    /// `out` [n] in that order: for a run of pages 1, 2, 3 it writes 3, 2, 1. Evicts fewer if fewer
    /// are evictable. Returns the number of evicted pages.
    std::int64_t evict(std::int64_t n, BlockId* out, EvictionGuard guard = {}) noexcept;
    /// Returns the pages that `evict` would take without a guard, in that order, but evicts
    /// nothing. A run comes directly after the last run that continues it: LRU evicts it at that
    /// point, other policies may evict it later. A candidate is listed only if `upcoming_victims`
    /// returns it. Throws std::bad_alloc. O(runs log runs + pages).
    [[nodiscard]] std::vector<BlockId> evictable_pages() const;

    /// Positions of the cached pages with `asked[id]` set; each position ends with its page. Omits
    /// pages below another page in the result. Throws std::bad_alloc. O(cached pages).
    [[nodiscard]] std::vector<TreePosition> find_pages(const std::vector<bool>& asked) const;
    /// As `find_pages`, but omits no page and includes the pages of forgotten runs.
    [[nodiscard]] std::vector<TreePosition> locate(const std::vector<bool>& asked) const;
    /// The runs that `forget` takes out, parents before children.
    struct Branches {
        std::vector<TreeNode*> tops;
        std::vector<TreeNode*> runs;
    };
    /// Returns the last page of each of these prefixes and all pages below it in the tree; no
    /// prefix may continue another. Cuts runs before these pages. Throws std::bad_alloc. O(runs).
    [[nodiscard]] Branches find_branches(const std::vector<TreePosition>& ends);
    /// Takes these runs out of the tree; no search finds them any more. The tree must not have
    /// changed since `find_branches`. Runs that a pin protects, and their path up to the root, stay
    /// as they are for the holder until the last pin is removed. A holder may still pin, split and
    /// copy from a position in these runs, but must not insert pages at it. O(runs).
    void forget(const Branches& branches) noexcept;
    /// Makes room for all runs that the tree now has. Throws std::bad_alloc. O(runs).
    [[nodiscard]] Branches make_branches();
    /// Takes every run out of the tree, as `forget`. The tree must not have gained runs since
    /// `room` was made.
    void forget_all(Branches& room) noexcept;
    /// True if `forget` took out the run.
    [[nodiscard]] static bool is_forgotten(const TreeNode* node) noexcept;
    /// Pages on the path to `node` before the first forgotten run; its depth if no run on the path
    /// is forgotten. O(forgotten runs).
    [[nodiscard]] static std::int32_t findable_depth(const TreeNode* node) noexcept;
    /// Pages of forgotten runs that still have a holder. O(1).
    [[nodiscard]] std::int64_t num_forgotten() const noexcept { return num_forgotten_; }
    /// Calls visit(ids, n) with the page ids of every forgotten run that still has a holder.
    template <class Visit>
    void for_each_forgotten_run(Visit&& visit) const {
        for (const auto& [tokens, ids, n] : collect_forgotten_runs()) visit(ids, n);
    }

    /// Finds cached pages that continue a prefix by some of its next tokens, `rest` [limit], but
    /// not by a whole page. Writes at most `n` of them to `out`, the longest first, and returns
    /// their number. O(log children + n), or O(children) for few children.
    std::size_t find_partials(TreePosition at, const TokenId* rest, std::int32_t limit,
                              PartialPage* out, std::size_t n) const noexcept;

    /// Prefetch the memory that `insert` below the end of a run reads: first the node, then the end
    /// of its run.
    static void prefetch_node(const TreeNode* node) noexcept;
    void prefetch_end(const TreeNode* node) const noexcept;

    /// A handle that can be kept across changes of the tree. O(1).
    [[nodiscard]] PrefixHandle handle(TreePosition at) const noexcept;
    /// The position of a handle. Throws InvalidHandleError if the prefix may have changed since.
    [[nodiscard]] TreePosition resolve(PrefixHandle handle) const;

    /// Depth of the prefix that ends with this node, in pages.
    [[nodiscard]] static std::int32_t depth_of(const TreeNode* node) noexcept;
    /// Pages before a node's run, from the root of its namespace.
    [[nodiscard]] static std::int32_t start_of(const TreeNode* node) noexcept;
    /// The node whose run a node continues; nullptr if that is the root.
    [[nodiscard]] static const TreeNode* parent_of(const TreeNode* node) noexcept;
    /// Name of the namespace that a node is in; valid while that namespace has pages or holders.
    [[nodiscard]] static std::string_view name_of(const TreeNode* node) noexcept;
    /// The prefix of `depth` pages on the path to `node`.
    [[nodiscard]] static TreePosition position(TreeNode* node, std::int32_t depth) noexcept;

    /// Throws IntegrityError with the law that is broken. O(nodes + pages).
    void check_integrity() const;

    /// Every run, parents before children. Throws std::bad_alloc. O(runs).
    [[nodiscard]] std::vector<const TreeNode*> runs() const;
    /// Calls visit(ids, n) with the page ids of every run.
    template <class Visit>
    void for_each_run(Visit&& visit) const {
        for (const auto& [tokens, ids, n] : collect_runs()) visit(ids, n);
    }

   private:
    struct Run {
        const TokenId* tokens;
        const BlockId* ids;
        std::int32_t num_pages;
    };
    struct NamedRoot {
        std::unique_ptr<const std::string> name;  // the key in `roots_` is a view of it
        TreeNode* node;
    };

    [[nodiscard]] TreeNode* find_child(const TreeNode* node, const TokenId* page) const noexcept;
    void find_partial(PrefixMatch& match, const TokenId* rest, std::int32_t limit) const noexcept;
    void attach(TreeNode* parent, TreeNode* child);
    void detach(TreeNode* child) noexcept;
    void replace_child(TreeNode* child, TreeNode* head) noexcept;
    void sort_children(TreeNode* parent);
    void unsort_children(TreeNode* parent) noexcept;
    void shrink_buffer(TreeNode* node) noexcept;
    [[nodiscard]] bool extend(TreeNode* leaf, const TokenId* tokens, const BlockId* ids,
                              std::int32_t n, const Retention& retention) noexcept;
    [[nodiscard]] TreeNode* add_leaf(TreePosition at, const TokenId* tokens, const BlockId* ids,
                                     std::int32_t n, const Retention& retention);
    void use_between(TreePosition at, std::int32_t first) noexcept;
    void retain_between(TreePosition at, std::int32_t first, std::int32_t end,
                        const Retention& retention) noexcept;
    void expect_between(TreePosition at, std::int64_t returns) noexcept;
    void tell_size(const TreeNode* node) noexcept;
    void tell_fingerprint(const TreeNode* node) noexcept;
    void report_pages(TreePosition at, std::int32_t first,
                      std::vector<DuplicatePage>& duplicates) const noexcept;
    [[nodiscard]] std::int64_t trim(TreeNode* leaf, std::int64_t n, BlockId* out) noexcept;
    void release_to_policy(TreeNode* node) noexcept;
    void offer_if_free(TreeNode* node) noexcept;
    void withdraw(TreeNode* node) noexcept;
    void remove_leaf(TreeNode* leaf) noexcept;
    void free_leaf(TreeNode* leaf) noexcept;
    void prefetch_victims() const noexcept;
    void drop_root_if_unused(TreeNode* root) noexcept;
    [[nodiscard]] std::vector<Run> collect_runs() const;
    [[nodiscard]] std::vector<Run> collect_forgotten_runs() const;
    void mark_forgotten(TreeNode* node) noexcept;
    void sever(TreeNode* top) noexcept;
    TreeNode* drop_run(TreeNode* node) noexcept;
    void drop_forgotten(TreeNode* node) noexcept;
    void check_node(const TreeNode* node) const;

    std::int32_t page_size_;
    TreeListener* listener_ = nullptr;
    ForgottenListener* forgotten_ = nullptr;
    std::unique_ptr<EvictionPolicy> policy_;
    PolicyInterest interest_;  // of the policy
    std::unique_ptr<NodeArena> arena_;
    std::unique_ptr<OrderArena> order_arena_;
    std::unique_ptr<ChildIndex> index_;
    std::unique_ptr<Protection> protection_;
    TreeNode* default_root_;
    std::unordered_map<std::string_view, NamedRoot> roots_;  // all except the default root
    std::vector<TreeNode*> severed_;  // forgotten runs whose parent is not forgotten
    std::int64_t num_cached_ = 0;     // includes forgotten pages
    std::int64_t num_forgotten_ = 0;  // pages
    std::int64_t num_nodes_ = 0;      // without roots
    std::uint64_t clock_ = 0;         // counts releases
    std::int64_t now_ = std::numeric_limits<std::int64_t>::min();
};

}  // namespace kvcore
