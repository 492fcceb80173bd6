// SPDX-License-Identifier: Apache-2.0
// The order in which cached runs go: what a policy is, and the policies that come with kvcore.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string_view>

namespace kvcore {

/// Names a run of cached pages to a policy: a small number, used again when the run is gone.
using NodeId = std::uint32_t;

/// No run. A tree's node 0 is a root. Those of other namespaces have ids too; no policy is told of
/// any.
constexpr NodeId kNoNode = 0;

/// Priority of a run that nobody gave one, 0 .. 100.
constexpr std::int32_t kDefaultPriority = 50;

/// What a user of a run asks for it.
struct Retention {
    static constexpr std::int64_t kForever = std::numeric_limits<std::int64_t>::max();

    // NOLINTNEXTLINE(google-explicit-constructor,hicpp-explicit-conversions): a priority is one
    Retention(std::int32_t wanted = kDefaultPriority, std::int64_t end = kForever) noexcept
        : priority(wanted), until(end) {}

    std::int32_t priority;
    std::int64_t until;  // when the priority ends, in the unit of `advance`
};

/// What a policy wants to hear of beside where runs enter, are let go and leave. A tree asks once,
/// so that nobody pays for what is not wanted.
struct PolicyInterest {
    bool hits = true;           // `hit`
    bool recency = false;       // `pass`
    bool growth = false;        // `joins`
    bool sizes = false;         // `resize`
    bool retention = false;     // `retain`, `advance`
    bool fingerprints = false;  // `identify`
    bool exposure = false;      // `expose`
};

/// The order in which cached runs go.
///
/// A policy is told by the tree what happens to runs, and asked for a victim when pages are needed.
/// It sees no tokens, no pages and no tree. A tree owns the one that its constructor was given, and
/// has LRU without; so have each replica of a CacheManager and its host tier. `make_policy` makes
/// the policies of kvcore. "An eviction policy of your own" in docs/eviction.md shows how to write
/// another policy.
///
/// Owns: what it knows of each run, in arrays of its own by node id.
/// Invariant: candidates are the runs released or offered since they were inserted or withdrawn. A
/// candidate may be in use again or have children: the tree withdraws it where it meets it as a
/// victim, and offers it when it can go after all. So a policy need not know what is pinned.
/// Memory: `make_room` alone asks for any.
/// Threads: none of its own, those of the tree.
/// Cost: each verb O(1) or O(log n) of the candidates; nothing is rebuilt per call. All are called
/// once per run, never per page, and `pin` and `match` call none. So a virtual call, a nanosecond
/// beside the cache misses of a run, buys that policies can be written outside of this library.
class EvictionPolicy {
   public:
    EvictionPolicy() = default;
    EvictionPolicy(const EvictionPolicy&) = delete;
    EvictionPolicy& operator=(const EvictionPolicy&) = delete;
    virtual ~EvictionPolicy() = default;

    /// What it wants to hear. The same whenever it is asked.
    [[nodiscard]] virtual PolicyInterest interest() const noexcept { return {}; }

    /// Node ids up to `last` may come from now on. Called with 0, 1, 2 and so on, before any other
    /// verb names them. Throws std::bad_alloc and has changed nothing; then it is called with the
    /// same number again.
    virtual void make_room(NodeId last) = 0;

    /// A run of `pages` pages entered the tree, its first use. It ends `depth` pages below its
    /// root. The id may be that of a run that is gone: forget what was known of that one.
    virtual void insert(NodeId node, std::int32_t depth, std::int32_t pages,
                        std::int32_t priority) noexcept = 0;
    /// The run was used once more: `insert` found its pages in the tree, or a reservation took
    /// them. Those of a prefix come from its end to its start. A pin is no hit, nor is a run that
    /// grows in place.
    virtual void hit(NodeId node) noexcept = 0;
    /// A user let go of the run that its prefix ends with: a candidate, and perhaps one already.
    /// `time` grows from call to call.
    virtual void release(NodeId node, std::uint64_t time) noexcept = 0;
    /// A user let go of a prefix that goes on behind the run, at a time that `release` tells of its
    /// end.
    virtual void pass(NodeId node, std::uint64_t time) noexcept {
        static_cast<void>(node), static_cast<void>(time);
    }
    /// The run was cut in two: `upper` is new, has been used as often as `lower`, and is none of
    /// the candidates; `lower` stays what it is.
    virtual void split(NodeId upper, NodeId lower) noexcept = 0;
    /// The run is gone, whether it was a candidate or not.
    virtual void erase(NodeId node) noexcept = 0;

    /// The run has `pages` pages now and ends `depth` pages below its root: it grew in place, pages
    /// left its end, or it was cut in two, which is told of both halves.
    virtual void resize(NodeId node, std::int32_t depth, std::int32_t pages) noexcept {
        static_cast<void>(node), static_cast<void>(depth), static_cast<void>(pages);
    }
    /// A number for the tokens of the run's first page and its depth: the same whenever these
    /// return, if perhaps that of another page too. Told behind `insert`, and behind `split` of the
    /// lower half.
    virtual void identify(NodeId node, std::uint64_t fingerprint) noexcept {
        static_cast<void>(node), static_cast<void>(fingerprint);
    }
    /// One of its users asks this of the run: behind `insert`, whose priority is the same, with
    /// uses, and where it grows.
    virtual void retain(NodeId node, const Retention& retention) noexcept {
        static_cast<void>(node), static_cast<void>(retention);
    }
    /// What its users ask of the run now, of a policy that goes by that; else what nobody asked
    /// for.
    [[nodiscard]] virtual Retention retention(NodeId node) const noexcept {
        static_cast<void>(node);
        return {};
    }
    /// Whether pages that are used for the first time, and of which this is asked, may lengthen the
    /// run; else they become a run of their own.
    [[nodiscard]] virtual bool joins(NodeId node, const Retention& retention) const noexcept {
        static_cast<void>(node), static_cast<void>(retention);
        return true;
    }
    /// It is `now`, never less than it was; priorities end. O(log n) for each that does.
    virtual void advance(std::int64_t now) noexcept { static_cast<void>(now); }

    /// Nothing protects the end of the run from now on: the last of its users let go of it, whether
    /// that was a use or not, or the last run behind it went. Behind `release`, in front of
    /// `offer`.
    virtual void expose(NodeId node) noexcept { static_cast<void>(node); }
    /// The run can go, and is no candidate: what followed it went just now, or it was withdrawn and
    /// is free again. By recency it is worth no more than what went last.
    virtual void offer(NodeId node) noexcept = 0;
    /// The candidate cannot go now. It must not be the next victim: `evict` goes on asking.
    virtual void withdraw(NodeId node) noexcept = 0;
    /// The least valuable candidate, which stays one; kNoNode when there is none. Pages go from the
    /// end of its run; `erase` tells when none is left.
    [[nodiscard]] virtual NodeId victim() noexcept = 0;
    /// Writes the next victims as it stands, at most `n`, to `out`, and returns how many. A hint:
    /// what it names is asked for ahead of its use. Asked for more than a few, what it names is the
    /// order in which CacheManager::cached_tree ranks runs.
    [[nodiscard]] virtual std::size_t upcoming(NodeId* out, std::size_t n) const noexcept {
        static_cast<void>(out);
        static_cast<void>(n);
        return 0;
    }
};

/// Cached pages that went, by why it was these.
struct EvictionCounts {
    std::int64_t policy = 0;       // for new ones: the next in the order of the policy
    std::int64_t window = 0;       // for new ones: requests had left them behind their windows
    std::int64_t unreachable = 0;  // for new ones: no hit could end where they are
    std::int64_t reset = 0;        // the cache was reset

    EvictionCounts& operator+=(const EvictionCounts& other) noexcept {
        policy += other.policy;
        window += other.window;
        unreachable += other.unreachable;
        reset += other.reset;
        return *this;
    }
};

/// What goes first. A use is a reservation or an insertion that walks the run, the first included.
enum class EvictionOrder : std::uint8_t {
    kLru,       // least recently released
    kLfu,       // fewest uses, then least recently used
    kSlru,      // used once before those used again, each by recency
    kFifo,      // entered first
    kPriority,  // lowest priority, then least recently used
    kCost,      // least prefill time saved per byte, with ageing
    kArc,       // by recency or by frequency, as what returns after its eviction tells
};

/// An order and what it is told beforehand.
struct EvictionConfig {
    EvictionOrder order = EvictionOrder::kLru;
    // kCost: tokens in front of one for which attention takes as long as all else that is computed
    // for it; at least 1.
    std::int32_t attention_tokens = 24'576;
};

/// By its name: lru, lfu, slru, fifo, priority, cost or arc. Throws std::invalid_argument for
/// another one.
[[nodiscard]] EvictionOrder eviction_order(std::string_view name);

/// Makes a policy for each tree that asks.
using PolicyFactory = std::function<std::unique_ptr<EvictionPolicy>()>;

/// A policy for a tree whose pages have so many tokens. Throws std::invalid_argument unless
/// page_size and attention_tokens are at least 1, and for an order that there is not.
[[nodiscard]] std::unique_ptr<EvictionPolicy> make_policy(const EvictionConfig& config,
                                                          std::int32_t page_size);

}  // namespace kvcore
