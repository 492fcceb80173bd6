// SPDX-License-Identifier: Apache-2.0
// The order in which cached runs are evicted: the interface of a policy, and the policies of
// kvcore.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string_view>

namespace kvcore {

/// The id of a run of cached pages for a policy: a small number, used again after the run was
/// removed.
using NodeId = std::uint32_t;

/// Stands for no run. A tree's node 0 is a root. Other namespaces' roots also have ids; a policy
/// never gets the id of a root.
constexpr NodeId kNoNode = 0;

/// Priority of a run if no user set its priority, 0 .. 100.
constexpr std::int32_t kDefaultPriority = 50;

/// Values for the time when the session of a run is expected to return. All other values are times
/// in the unit of `advance`. The larger the value, the less a run is worth.
struct ReturnTime {
    static constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
    static constexpr std::int64_t kUnknown = kNever - 1;
    static constexpr std::int64_t kLatest = kUnknown - 1;
};

/// The priority that a user wants for a run, and how long; and when its session returns.
struct Retention {
    static constexpr std::int64_t kForever = std::numeric_limits<std::int64_t>::max();

    // NOLINTNEXTLINE(google-explicit-constructor,hicpp-explicit-conversions): implicit
    Retention(std::int32_t wanted = kDefaultPriority, std::int64_t end = kForever,
              std::int64_t back = ReturnTime::kUnknown) noexcept
        : priority(wanted), until(end), returns(back) {}

    std::int32_t priority;
    std::int64_t until;    // when the priority ends, in the unit of `advance`
    std::int64_t returns;  // a time, or one of ReturnTime
};

/// The calls that a policy wants in addition to the calls for runs that enter, are released and
/// leave. A tree asks the policy once and skips the other calls, so they cost nothing.
struct PolicyInterest {
    bool hits = true;           // `hit`
    bool recency = false;       // `pass`
    bool growth = false;        // `joins`
    bool sizes = false;         // `resize`
    bool retention = false;     // `retain`, `advance`
    bool fingerprints = false;  // `identify`
    bool exposure = false;      // `expose`
    bool returns = false;       // `expect`, together with `retention`
};

/// The order in which cached runs are evicted.
///
/// The tree calls its policy when something happens to a run, and when it needs a victim. A policy
/// has no access to tokens, pages or the tree. A tree owns the policy that its constructor was
/// given, and uses LRU by default. Each replica of a CacheManager has its own policy, and so does
/// its host tier. `make_policy` makes the policies of kvcore. "An eviction policy of your own" in
/// docs/eviction.md shows how to write another policy.
///
/// Owns: its data about each run, in its own arrays by node id.
/// Invariant: candidates are the runs released or offered since they were inserted or withdrawn. A
/// candidate may be in use again or have children: the tree withdraws it when the policy names it
/// as a victim, and offers it when it becomes evictable. So a policy need not track pins.
/// Memory: only `make_room` allocates.
/// Threads: no threads or locks of its own; called on the threads of the tree.
/// Cost: each method is O(1) or O(log n) of the candidates; no call rebuilds anything. The tree
/// calls a method once per run, never per page, and `pin` and `match` call no method. So users can
/// write policies outside of this library for the cost of a virtual call, a nanosecond next to the
/// cache misses of a run.
class EvictionPolicy {
   public:
    EvictionPolicy() = default;
    EvictionPolicy(const EvictionPolicy&) = delete;
    EvictionPolicy& operator=(const EvictionPolicy&) = delete;
    virtual ~EvictionPolicy() = default;

    /// The calls that this policy wants. Returns the same every time.
    [[nodiscard]] virtual PolicyInterest interest() const noexcept { return {}; }

    /// Makes room for node ids up to `last`. Called with 0, 1, 2 and so on, before any other method
    /// gets that id. Throws std::bad_alloc and changes nothing; the tree calls it again later with
    /// the same number.
    virtual void make_room(NodeId last) = 0;

    /// A run of `pages` pages entered the tree, which is its first use. It ends `depth` pages below
    /// its root. If the id belonged to a removed run, the policy must drop its data about that run.
    virtual void insert(NodeId node, std::int32_t depth, std::int32_t pages,
                        std::int32_t priority) noexcept = 0;
    /// The run was used again: `insert` found its pages in the tree, or a reservation took them.
    /// The runs of a prefix come from its end to its start. A pin is not a hit, and neither is
    /// growth in place.
    virtual void hit(NodeId node) noexcept = 0;
    /// A user released a prefix that ends with this run, so the run becomes a candidate if it is
    /// not a candidate already. `time` grows from call to call.
    virtual void release(NodeId node, std::uint64_t time) noexcept = 0;
    /// A user released a longer prefix that contains this run; `release` got the same time for the
    /// last run of that prefix.
    virtual void pass(NodeId node, std::uint64_t time) noexcept {
        static_cast<void>(node), static_cast<void>(time);
    }
    /// The run was cut in two: `upper` is new, has the use count of `lower`, and is not a
    /// candidate; `lower` stays as it is.
    virtual void split(NodeId upper, NodeId lower) noexcept = 0;
    /// The run left the tree, whether it was a candidate or not.
    virtual void erase(NodeId node) noexcept = 0;

    /// The run now has `pages` pages and ends `depth` pages below its root: it grew in place, pages
    /// left its end, or it was cut in two. After a cut the tree calls this for both halves.
    virtual void resize(NodeId node, std::int32_t depth, std::int32_t pages) noexcept {
        static_cast<void>(node), static_cast<void>(depth), static_cast<void>(pages);
    }
    /// Reports a hash of the run's first page, of its tokens and its depth: the same tokens at the
    /// same depth always get the same number, but different pages may share a number. Called after
    /// `insert`, and after `split` for the lower half.
    virtual void identify(NodeId node, std::uint64_t fingerprint) noexcept {
        static_cast<void>(node), static_cast<void>(fingerprint);
    }
    /// A user wants this retention for the run. Called after `insert` (with the same priority), at
    /// each use, and when the run grows.
    virtual void retain(NodeId node, const Retention& retention) noexcept {
        static_cast<void>(node), static_cast<void>(retention);
    }
    /// The retention that the users of the run now want, if the policy uses priorities; otherwise
    /// the default.
    [[nodiscard]] virtual Retention retention(NodeId node) const noexcept {
        static_cast<void>(node);
        return {};
    }
    /// Returns true if new pages with this retention may lengthen the run; otherwise they become a
    /// separate run.
    [[nodiscard]] virtual bool joins(NodeId node, const Retention& retention) const noexcept {
        static_cast<void>(node), static_cast<void>(retention);
        return true;
    }
    /// A user released a prefix that contains the run, and its session returns at this time, or
    /// one of ReturnTime. `is_shared`: other cached runs continue the run, or a later run of the
    /// prefix. Called before `release`, from the end of the prefix to its start.
    virtual void expect(NodeId node, std::int64_t returns, bool is_shared) noexcept {
        static_cast<void>(node), static_cast<void>(returns), static_cast<void>(is_shared);
    }
    /// Sets the current time, which never decreases, and ends priorities and hints whose time is
    /// over. O(log n) for each of them.
    virtual void advance(std::int64_t now) noexcept { static_cast<void>(now); }

    /// No pin or later run protects the end of the run any more: its last user released it, whether
    /// that counted as a use or not, or the last run that continued it left. Called after `release`
    /// and before `offer`.
    virtual void expose(NodeId node) noexcept { static_cast<void>(node); }
    /// The run is evictable but not a candidate: the last run that continued it was just evicted,
    /// or it was withdrawn and is free again. By recency it is worth no more than the run that was
    /// evicted last.
    virtual void offer(NodeId node) noexcept = 0;
    /// The candidate is not evictable now. `victim` must not return it next: `evict` keeps calling
    /// `victim`.
    virtual void withdraw(NodeId node) noexcept = 0;
    /// The least valuable candidate, which stays a candidate; kNoNode if there are no candidates.
    /// The tree evicts pages from the end of its run, and calls `erase` after the last page.
    [[nodiscard]] virtual NodeId victim() noexcept = 0;
    /// Writes the next victims in the current order, at most `n`, to `out`, and returns their
    /// number. For small `n` this is a hint: the tree prefetches these runs. For large `n` this is
    /// the order in which CacheManager::cached_tree ranks runs.
    [[nodiscard]] virtual std::size_t upcoming(NodeId* out, std::size_t n) const noexcept {
        static_cast<void>(out);
        static_cast<void>(n);
        return 0;
    }
};

/// Cached pages that were evicted, by reason.
struct EvictionCounts {
    std::int64_t policy = 0;       // for new pages: the next in the order of the policy
    std::int64_t window = 0;       // for new pages: the windows of requests had moved past them
    std::int64_t unreachable = 0;  // for new pages: no hit could end at them
    std::int64_t reset = 0;        // the cache was reset

    EvictionCounts& operator+=(const EvictionCounts& other) noexcept {
        policy += other.policy;
        window += other.window;
        unreachable += other.unreachable;
        reset += other.reset;
        return *this;
    }
};

/// The order of eviction. A use is a reservation or an insertion that walks the run, including the
/// first insertion.
enum class EvictionOrder : std::uint8_t {
    kLru,       // least recently released
    kLfu,       // fewest uses, then least recently released
    kSlru,      // runs used once before runs used again, each by recency
    kFifo,      // entered first
    kPriority,  // lowest priority, then least recently released
    kCost,      // least prefill time saved per byte, with ageing
    kArc,       // by recency or by frequency, adapted when an evicted run returns
    kHinted,    // sessions that do not return, then least recently released, then latest return
};

/// An order and its parameters.
struct EvictionConfig {
    EvictionOrder order = EvictionOrder::kLru;
    // kCost: the number of preceding tokens at which attention takes as long as all other
    // computation for a token; at least 1.
    std::int32_t attention_tokens = 24'576;
    // kHinted: how long after its return time a run still has the worth of that time, in the unit
    // of `advance`, at least 0. 5 seconds for a caller that counts nanoseconds.
    std::int64_t return_grace = 5'000'000'000;
};

/// The order with this name: lru, lfu, slru, fifo, priority, cost, arc or hinted. Throws
/// std::invalid_argument for another name.
[[nodiscard]] EvictionOrder eviction_order(std::string_view name);

/// Is called once per tree and makes its policy.
using PolicyFactory = std::function<std::unique_ptr<EvictionPolicy>()>;

/// Makes a policy for a tree with this page size in tokens. Throws std::invalid_argument unless
/// page_size and attention_tokens are at least 1 and return_grace is at least 0, and for an unknown
/// order.
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_policy(const EvictionConfig& config,
                                                          std::int32_t page_size);

}  // namespace kvcore
