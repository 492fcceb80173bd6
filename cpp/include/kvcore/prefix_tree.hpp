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

/// Told which pages enter and leave a PrefixTree: whoever mirrors them hears of each page once for
/// each time that it comes and goes, in the order in which that happens.
///
/// What is told are the pages first .. first + n - 1 on the way to `node`, counted from the root of
/// its namespace: `copy_pages` and `tokens_of` read them from `{node, first + n}` and `first`,
/// `name_of` tells the namespace. The change is complete; a listener may read the tree, but change
/// nothing. Pages enter behind those in front of them and leave before those. Pages that are there
/// already, and runs that are cut in two, are no news; a tree that is taken down tells nothing.
///
/// It is not told why pages leave. The trees of a CacheManager have none: it has no call that takes
/// one.
///
/// Owns: nothing.
/// Threads: called by whoever changes the tree, so that of a CacheManager under its mutex.
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
    /// Pages left the tree: nothing finds them any more, but they can be read during the call.
    /// Where it was the whole run, the node is gone behind it.
    virtual void removed(TreeNode* node, std::int32_t first, std::int32_t n) noexcept = 0;
};

/// Told of pages that PrefixTree::forget took out of a tree.
///
/// Each page is told of once by `left`, and once by `let_go`: in the same call where nobody holds
/// it, else when the last holder lets go, in that one's `unpin`.
///
/// Owns: nothing. Threads: as TreeListener. Cost: a call per run.
class ForgottenListener {
   public:
    ForgottenListener() = default;
    ForgottenListener(const ForgottenListener&) = delete;
    ForgottenListener& operator=(const ForgottenListener&) = delete;
    virtual ~ForgottenListener() = default;

    /// Nothing finds these pages [n] any more. It must not change the tree.
    virtual void left(const BlockId* ids, std::int32_t n) noexcept = 0;
    /// Nobody holds them any more: the tree gives up its reference to them. It must not use the
    /// tree.
    virtual void let_go(const BlockId* ids, std::int32_t n) noexcept = 0;
};

struct TreeNode;
class NodeArena;
class Protection;
class ProtectionListener;
class OrderArena;
class ChildIndex;

/// A prefix found in the tree: the run it ends in and its length. A position stays right when runs
/// are split, and is void as soon as pages are evicted; PrefixHandle is its checked form.
struct TreePosition {
    TreeNode* node = nullptr;
    std::int32_t depth = 0;  // pages from the namespace's root
};

/// What `match` found.
struct PrefixMatch {
    TreePosition at;  // the longest cached prefix in whole pages
    // The cached page that continues the prefix by the most tokens, where that was asked for.
    TreePosition partial;             // partial.depth counts that page
    std::int32_t partial_tokens = 0;  // 0: there is none
};

/// A cached page that continues a prefix by some tokens.
struct PartialPage {
    TreePosition at;  // its depth counts the page
    std::int32_t tokens = 0;
};

/// A position to keep: recognised as stale once pages of its run have been evicted.
struct PrefixHandle {
    std::uint32_t node = 0;
    std::uint32_t generation = 0;
    std::int32_t depth = 0;
};

/// A page that `insert` found in the tree already.
struct DuplicatePage {
    std::int32_t index;  // which of the inserted pages
    BlockId cached;      // the id the tree has for the same tokens
};

/// Pages that eviction must leave alone: the first `keep` of a run.
struct EvictionGuard {
    const TreeNode* node = nullptr;
    std::int32_t keep = 0;
};

/// Which pages hold which tokens: a radix tree over runs of whole pages, one root per namespace.
///
/// Owns: nodes and token buffers, not the pages; ids go in by `insert` and come out by `evict`.
/// Invariants: siblings differ in their first page; a page is evictable exactly when no pin lies at
/// or below it; every node without child and pin is a candidate of the eviction policy;
/// evictable + protected == cached.
/// Memory: a verb that cannot get it throws std::bad_alloc and has changed nothing. Those that are
/// noexcept, and `unpin`, work without any.
/// Threads: none of its own; CacheManager locks around it.
/// Cost: `match` costs comparing the tokens plus one look-up per run; `insert` copying the new
/// tokens; `evict` O(1) amortised per page or run; `pin` and `unpin` O(1): what they protect is
/// counted when it is next asked for.
class PrefixTree {
   public:
    /// LRU unless another policy is given. Throws std::invalid_argument unless page_size >= 1.
    explicit PrefixTree(std::int32_t page_size, std::unique_ptr<EvictionPolicy> policy = nullptr);
    PrefixTree(const PrefixTree&) = delete;
    PrefixTree& operator=(const PrefixTree&) = delete;
    ~PrefixTree();

    /// Whom to tell from now on what enters and leaves; nullptr for nobody. The tree does not own
    /// it.
    void set_listener(TreeListener* listener) noexcept { listener_ = listener; }
    /// The same for which pages are protected, told when that is counted.
    void set_protection_listener(ProtectionListener* listener) noexcept;
    /// It is `now` for the priorities of runs, in a unit of the caller's; a time before is no news.
    void advance(std::int64_t now) noexcept;
    /// Whom to tell of forgotten pages; nullptr for nobody. The tree does not own it.
    void set_forgotten_listener(ForgottenListener* listener) noexcept { forgotten_ = listener; }
    /// What decides the order of eviction.
    [[nodiscard]] const EvictionPolicy& policy() const noexcept { return *policy_; }

    /// Tokens of a page.
    [[nodiscard]] std::int32_t page_size() const noexcept { return page_size_; }
    /// Pages in the tree. O(1).
    [[nodiscard]] std::int64_t num_cached() const noexcept { return num_cached_ - num_forgotten_; }
    /// Cached pages that neither a pin nor a pinned descendant protects. O(pins changed since it
    /// was asked last), each up to the next protected node.
    [[nodiscard]] std::int64_t num_evictable() const noexcept;
    /// Runs, without the roots. O(1).
    [[nodiscard]] std::int64_t num_nodes() const noexcept { return num_nodes_; }

    /// Root of a namespace; "" is the default one. `find` returns nullptr for one with no pages and
    /// no holders, `open` makes it. An empty, unpinned namespace disappears by itself.
    [[nodiscard]] TreeNode* find_namespace(std::string_view name) const noexcept;
    [[nodiscard]] TreeNode* open_namespace(std::string_view name);

    /// Longest cached continuation of `root` (or of any node) by `tokens` [n], in whole pages.
    /// `want_partial`: also the cached page that shares the most of the tokens after it, found in
    /// O(log siblings). Changes nothing.
    [[nodiscard]] PrefixMatch match(TreeNode* root, const TokenId* tokens, std::int64_t n,
                                    bool want_partial = false) const noexcept;

    /// Ids of pages first .. at.depth - 1 on the way to `at`, to `out` [at.depth - first].
    void copy_pages(TreePosition at, std::int32_t first, BlockId* out) const noexcept;
    /// Tokens of those pages. Costs copying them.
    [[nodiscard]] std::vector<TokenId> tokens_of(TreePosition at, std::int32_t first) const;
    /// Adds the tokens of the whole tree that are at most `highest` to `out`, in any order.
    /// O(tokens).
    void find_tokens_up_to(TokenId highest, std::vector<TokenId>& out) const;
    /// Pages on the way to `at` that no pin protects.
    [[nodiscard]] std::int64_t num_unprotected(TreePosition at) const noexcept;
    /// True when `page` of the run that `at` ends in is protected.
    [[nodiscard]] bool is_protected(TreePosition at) const noexcept;

    /// The node that ends exactly at `at`; cuts the run in two where it goes on. Copies the shorter
    /// half. Pins, positions and handles stay right.
    [[nodiscard]] TreeNode* split(TreePosition at);
    /// Protects a node and all above it until unpinned as often. O(1).
    void pin(TreeNode* node) noexcept;
    /// `touch`: the holder let go, which is a use. False where it moves on to a node below, or held
    /// the pages for a moment only. Throws InvalidHandleError for a node without pins; then nothing
    /// has changed.
    void unpin(TreeNode* node, bool touch);

    /// Counts a use of every run behind page `first` on the way to `at`, for policies that go by
    /// that: O(runs) for them, nothing for others. The order by recency changes where the user lets
    /// go.
    void use(TreePosition at, std::int32_t first = 0) noexcept {
        if (interest_.hits) use_between(at, first);
    }
    /// Keeps every run that has one of the pages first .. end - 1 on the way to `at` as `retention`
    /// says, for policies that go by that. As `use` otherwise.
    void retain(TreePosition at, std::int32_t first, std::int32_t end,
                const Retention& retention) noexcept {
        if (interest_.retention) retain_between(at, first, end, retention);
    }
    /// What a user does who takes a prefix and lets go of it at once: a use of it, also by recency.
    /// Ends a run there, so it may throw std::bad_alloc. O(runs).
    void touch(TreePosition at);

    /// Puts `n` pages below `at`, an end that the caller has pinned once (or a root). Pages that
    /// the tree has already are not taken but reported in `duplicates`; it is a use of their runs.
    /// All runs of these pages are kept as `retention` says.
    /// Returns where the last one ends. Where it throws, nothing was added to `duplicates` either.
    [[nodiscard]] TreeNode* insert(TreeNode* at, const TokenId* tokens, const BlockId* ids,
                                   std::int32_t n, std::vector<DuplicatePage>& duplicates,
                                   const Retention& retention = {});
    /// Gives back buffer space of an unpinned node that was kept for growth.
    void shrink(TreeNode* node) noexcept;

    /// The run whose end goes next, whatever a guard keeps; kNoNode where nothing is evictable.
    /// O(1) amortised.
    [[nodiscard]] NodeId victim() noexcept;
    /// The run of an id that the policy was told of.
    [[nodiscard]] TreeNode* run(NodeId id) const noexcept;
    /// What `evict` takes next with that guard: how many pages of which run, whose last page is the
    /// end of the prefix. No node where nothing is evictable. O(1) amortised.
    struct Victim {
        TreePosition end;
        std::int64_t num_pages = 0;
    };
    [[nodiscard]] Victim next_victim(EvictionGuard guard = {}) noexcept;
    /// Returns the runs that the policy may name as victims, the next victim first. `spare`: number
    /// of ids that the policy lists and that are no runs of this tree. Throws std::bad_alloc.
    /// O(runs log runs).
    [[nodiscard]] std::vector<NodeId> upcoming_victims(std::size_t spare) const;
    /// Forgets the `n` least valuable evictable pages, tail before head, and writes their ids to
    /// `out` [n] in that order: of a run of pages 1, 2, 3 it is 3, 2, 1. Fewer where fewer are
    /// evictable. Returns how many.
    std::int64_t evict(std::int64_t n, BlockId* out, EvictionGuard guard = {}) noexcept;
    /// What `evict` would take without a guard, in that order, and takes nothing. A run that
    /// another one follows comes as soon as that is gone: with LRU it goes then, other policies may
    /// have it wait. Of those only runs are listed that the policy tells of (`upcoming_victims`).
    /// Throws std::bad_alloc. O(runs log runs + pages).
    [[nodiscard]] std::vector<BlockId> evictable_pages() const;

    /// Where those pages are cached that `asked` [ids] names, but none behind another one: each
    /// the last one of its prefix. Throws std::bad_alloc. O(cached pages).
    [[nodiscard]] std::vector<TreePosition> find_pages(const std::vector<bool>& asked) const;
    /// The same of every one, those of forgotten runs too.
    [[nodiscard]] std::vector<TreePosition> locate(const std::vector<bool>& asked) const;
    /// What `forget` takes out: runs, each behind the one that it continues.
    struct Branches {
        std::vector<TreeNode*> tops;
        std::vector<TreeNode*> runs;
    };
    /// The last pages of these prefixes, none of which continues another one, and all behind them:
    /// runs are cut in front of them. Throws std::bad_alloc. O(runs).
    [[nodiscard]] Branches find_branches(const std::vector<TreePosition>& ends);
    /// Takes these out of the tree, which must not have changed since: nothing finds them any more.
    /// What a pin protects stays as it is for whoever has that, the way up to the root with it, and
    /// goes with the last pin. So a position below may be held, split and copied from, but nothing
    /// is to be inserted there. O(runs).
    void forget(const Branches& branches) noexcept;
    /// Room for all runs that the tree has now. Throws std::bad_alloc. O(runs).
    [[nodiscard]] Branches make_branches();
    /// Takes every run out of the tree, as `forget`; the tree has got none since `room` was made.
    void forget_all(Branches& room) noexcept;
    /// True for a run that was forgotten.
    [[nodiscard]] static bool is_forgotten(const TreeNode* node) noexcept;
    /// Pages on the way to `node` in front of the first forgotten run; its depth where there is
    /// none. O(forgotten runs).
    [[nodiscard]] static std::int32_t findable_depth(const TreeNode* node) noexcept;
    /// Pages of forgotten runs that are held still. O(1).
    [[nodiscard]] std::int64_t num_forgotten() const noexcept { return num_forgotten_; }
    /// Calls visit(ids, n) with the page ids of every forgotten run that is still held.
    template <class Visit>
    void for_each_forgotten_run(Visit&& visit) const {
        for (const auto& [tokens, ids, n] : collect_forgotten_runs()) visit(ids, n);
    }

    /// Cached pages that continue a prefix by some of its next tokens, `rest` [limit], but not by
    /// a whole page: at most `n` of them to `out`, the longest first. Returns how many.
    /// O(log children + n), or O(children) where those are few.
    std::size_t find_partials(TreePosition at, const TokenId* rest, std::int32_t limit,
                              PartialPage* out, std::size_t n) const noexcept;

    /// Ask for what `insert` below the end of a run reads: first the node, then where it ends.
    static void prefetch_node(const TreeNode* node) noexcept;
    void prefetch_end(const TreeNode* node) const noexcept;

    /// A position to keep beyond the next change of the tree. O(1).
    [[nodiscard]] PrefixHandle handle(TreePosition at) const noexcept;
    /// The position again. Throws InvalidHandleError when the prefix may have changed since.
    [[nodiscard]] TreePosition resolve(PrefixHandle handle) const;

    /// Depth of the prefix that ends with this node, in pages.
    [[nodiscard]] static std::int32_t depth_of(const TreeNode* node) noexcept;
    /// Pages in front of a node's run.
    [[nodiscard]] static std::int32_t start_of(const TreeNode* node) noexcept;
    /// The node whose run a node continues; nullptr where that is the root.
    [[nodiscard]] static const TreeNode* parent_of(const TreeNode* node) noexcept;
    /// Name of the namespace that a node is in; valid as long as that has pages or holders.
    [[nodiscard]] static std::string_view name_of(const TreeNode* node) noexcept;
    /// The prefix of `depth` pages on the way to `node`.
    [[nodiscard]] static TreePosition position(TreeNode* node, std::int32_t depth) noexcept;

    /// Throws IntegrityError naming the law that does not hold. O(nodes + pages).
    void check_integrity() const;

    /// Every run, each behind the one that it continues. Throws std::bad_alloc. O(runs).
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
        std::unique_ptr<const std::string> name;  // what the key is a view of
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
    PolicyInterest interest_;  // the policy's
    std::unique_ptr<NodeArena> arena_;
    std::unique_ptr<OrderArena> order_arena_;
    std::unique_ptr<ChildIndex> index_;
    std::unique_ptr<Protection> protection_;
    TreeNode* default_root_;
    std::unordered_map<std::string_view, NamedRoot> roots_;  // all but the default one
    std::vector<TreeNode*> severed_;  // forgotten runs that none of their kind is in front of
    std::int64_t num_cached_ = 0;     // with those forgotten
    std::int64_t num_forgotten_ = 0;  // pages
    std::int64_t num_nodes_ = 0;      // without roots
    std::uint64_t clock_ = 0;         // counts releases
    std::int64_t now_ = std::numeric_limits<std::int64_t>::min();
};

}  // namespace kvcore
