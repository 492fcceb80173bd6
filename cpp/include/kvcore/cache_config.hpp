// SPDX-License-Identifier: Apache-2.0
// The configuration of a CacheManager. Plain values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/eviction.hpp"
#include "kvcore/extra_keys.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// The tokens that the layers of a group read.
enum class GroupKind : std::uint8_t {
    kFull,     // all of them
    kSliding,  // the token itself and the `span` - 1 tokens before it
    kChunked,  // tokens of its own chunk of `span` tokens, counted from the first token
};

/// Layers that read the same tokens. A group's layers are divided into bundles. Each bundle has its
/// own pages; all bundles of all groups take their pages from one pool.
struct CacheGroup {
    GroupKind kind = GroupKind::kFull;
    std::int64_t span = 0;         // tokens of the window or chunk; unused by kFull
    std::int32_t num_bundles = 1;  // pages that each run of `page_size` tokens takes
    std::int32_t page_size = 0;    // tokens per page; divides CacheConfig::page_size; 0: the same

    /// With `n` tokens written, tokens below the returned index are never read again.
    [[nodiscard]] std::int64_t skipped_tokens(std::int64_t n) const noexcept {
        switch (kind) {
            case GroupKind::kSliding:
                return std::max<std::int64_t>(0, n - span + 1);
            case GroupKind::kChunked:
                return n / span * span;
            case GroupKind::kFull:
                break;
        }
        return 0;
    }
    /// Number of tokens that must be written before tokens below `first` >= 1 are never read again.
    /// Do not call this for kFull.
    [[nodiscard]] std::int64_t least_skipping(std::int64_t first) const noexcept {
        return kind == GroupKind::kChunked ? (first + span - 1) / span * span : first + span - 1;
    }
};

/// Layers with a state. All state groups of a model share slot numbers: a slot has a place in the
/// arrays of each group.
struct StateGroup {
    // Tokens between two checkpoints, a multiple of CacheConfig::page_size; 0: checkpoints only at
    // the end of a prompt and where prompts branch.
    std::int64_t interval = 0;
};

/// The event at which a cached page is copied to the host tier.
enum class WritePolicy : std::uint8_t {
    kWriteThrough,  // when it enters the cache
    kSelective,     // after it was used often enough
    kWriteBack,     // when it is about to be evicted
};

/// The policy with a name: write_through, write_through_selective or write_back. Throws
/// std::invalid_argument for another name.
[[nodiscard]] WritePolicy write_policy(std::string_view name);

/// The configuration of a CacheManager, whose constructor checks the numbers. New fields come last,
/// so that code that lists values in order continues to compile. `for_each_option` lists each
/// field. The padding does not matter: each manager has only one configuration.
// NOLINTNEXTLINE(clang-analyzer-optin.performance.Padding)
struct CacheConfig {
    std::int64_t num_pages = 0;      // of each replica
    std::int32_t page_size = 128;    // tokens
    std::int64_t max_sequences = 0;  // claimed at a time, in each replica
    std::int64_t max_seq_len = 0;    // tokens
    std::int32_t num_replicas = 1;
    bool prefix_caching = true;
    bool dedup = true;  // commit swaps a page for an equal cached one
    // Smallest number of tokens that a hit copies from the start of a partly equal page; 0: hits
    // end only between pages.
    std::int32_t partial_page_reuse = 1;
    // Pages of the host tier below each replica, with groups for any bundle; 0: no host tier.
    std::int64_t host_pages = 0;
    // Groups of layers that read different tokens; empty: every page has all layers.
    std::vector<CacheGroup> groups = {};
    // Reserve pages only for the tokens that run next. By default, full-attention groups get pages
    // for the whole request at once.
    bool reserve_chunks = false;
    // With groups or states: number of last written tokens that may be truncated.
    std::int64_t max_draft_tokens = 0;
    // Quotas of tenants, by number: see RequestPriority. The sum of reserved pages is at most
    // num_pages.
    std::vector<TenantQuota> quotas = {};
    // Layers with a state in addition to layers with pages, and the number of slots that they share
    // in each replica: at least one slot for each sequence; the other slots hold checkpoints and,
    // with drafts, kept states.
    std::vector<StateGroup> states = {};
    std::int64_t num_state_slots = 0;
    // Slots of the host tier below each replica, for checkpoints; 0: checkpoints stay on the
    // device.
    std::int64_t num_host_state_slots = 0;
    // Pages that arrive in the host tier get keys and wait to be written to stores below it.
    bool has_stores = false;
    std::string key_seed = {};            // seed of keys, one item of CBOR; "" is nil
    const StandIns* stand_ins = nullptr;  // names of tokens with extra keys; outlive the manager
    // Maximum number of pages whose events wait for `take_events`; 0: the manager records no
    // events.
    std::int64_t event_pages = 0;
    EvictionConfig eviction = {};       // of cached pages, in each replica
    EvictionConfig host_eviction = {};  // of cached pages in the host tier
    // When a cached page is copied to the host tier; with kSelective, after `write_threshold` uses,
    // 1 .. 255.
    WritePolicy write_policy = WritePolicy::kWriteThrough;
    std::int32_t write_threshold = 2;
    // With eviction by priority: the lowest priority of runs that the host tier takes. The tier
    // takes no page of a run with a lower priority, and no page that continues that run.
    std::int32_t host_min_priority = 0;
    // Number of page ids reserved for the caller, from 0. The memory has these pages in addition to
    // num_pages. vLLM's null block is `first_page = 1`.
    BlockId first_page = 0;
    // With groups: `commit` keeps the pages that a window has passed until `leave_windows` gives
    // them back. For engines that commit tokens when they schedule them, while earlier steps still
    // read the pages.
    bool keep_windows = false;
    // Pages that left the cache and whose tokens are remembered, to find out why prompts miss the
    // cache; 0: the manager does not find it out.
    std::int64_t explain_pages = 0;
    // One page in this many is sampled for `advice`: a power of two; 0: there is no advice.
    std::int64_t advice_sample = 0;
};

/// The bounds of an option that is a number. They are ignored for other options.
struct OptionBounds {
    std::int64_t least = std::numeric_limits<std::int64_t>::min();
    std::int64_t most = std::numeric_limits<std::int64_t>::max();
};

/// Calls `visit(name, member, bounds)` for each option of CacheConfig, in the order of the fields.
/// Bindings read options by this list, and the constructor of CacheManager checks the bounds.
template <class Visitor>
void for_each_option(Visitor&& visit) {
    constexpr std::int64_t kMostInt16 = std::numeric_limits<std::int16_t>::max();
    constexpr std::int64_t kMostInt32 = std::numeric_limits<std::int32_t>::max();
    visit("num_pages", &CacheConfig::num_pages, OptionBounds{1, kMostInt32});
    visit("page_size", &CacheConfig::page_size, OptionBounds{1, kMostInt32});
    visit("max_sequences", &CacheConfig::max_sequences, OptionBounds{1});
    visit("max_seq_len", &CacheConfig::max_seq_len, OptionBounds{1});
    visit("num_replicas", &CacheConfig::num_replicas, OptionBounds{1, kMostInt16});
    visit("prefix_caching", &CacheConfig::prefix_caching, OptionBounds{});
    visit("dedup", &CacheConfig::dedup, OptionBounds{});
    visit("partial_page_reuse", &CacheConfig::partial_page_reuse, OptionBounds{0});
    visit("host_pages", &CacheConfig::host_pages, OptionBounds{0, kMostInt32});
    visit("groups", &CacheConfig::groups, OptionBounds{});
    visit("reserve_chunks", &CacheConfig::reserve_chunks, OptionBounds{});
    visit("max_draft_tokens", &CacheConfig::max_draft_tokens, OptionBounds{0, kMostInt32});
    visit("quotas", &CacheConfig::quotas, OptionBounds{});
    visit("states", &CacheConfig::states, OptionBounds{});
    visit("num_state_slots", &CacheConfig::num_state_slots, OptionBounds{});
    visit("num_host_state_slots", &CacheConfig::num_host_state_slots, OptionBounds{});
    visit("has_stores", &CacheConfig::has_stores, OptionBounds{});
    visit("key_seed", &CacheConfig::key_seed, OptionBounds{});
    visit("stand_ins", &CacheConfig::stand_ins, OptionBounds{});
    visit("event_pages", &CacheConfig::event_pages, OptionBounds{0});
    visit("eviction", &CacheConfig::eviction, OptionBounds{});
    visit("host_eviction", &CacheConfig::host_eviction, OptionBounds{});
    visit("write_policy", &CacheConfig::write_policy, OptionBounds{});
    visit("write_threshold", &CacheConfig::write_threshold, OptionBounds{1, 255});
    visit("host_min_priority", &CacheConfig::host_min_priority, OptionBounds{0, 100});
    visit("first_page", &CacheConfig::first_page, OptionBounds{0, kMostInt32 - 1});
    visit("keep_windows", &CacheConfig::keep_windows, OptionBounds{});
    visit("explain_pages", &CacheConfig::explain_pages, OptionBounds{0, kMostInt32});
    visit("advice_sample", &CacheConfig::advice_sample, OptionBounds{0, 1 << 20});
}

}  // namespace kvcore
