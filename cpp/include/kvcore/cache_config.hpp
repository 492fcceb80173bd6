// SPDX-License-Identifier: Apache-2.0
// What a CacheManager is built for. Plain values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kvcore/block_pool.hpp"
#include "kvcore/eviction.hpp"
#include "kvcore/extra_keys.hpp"
#include "kvcore/types.hpp"

namespace kvcore {

/// What the layers of a group read of the tokens behind them.
enum class GroupKind : std::uint8_t {
    kFull,     // all of them
    kSliding,  // the token itself and the `span` - 1 in front of it
    kChunked,  // those of its own chunk of `span` tokens, counted from the first token
};

/// Layers that read the same tokens. They are cut into bundles, each of which has pages of its own;
/// all bundles of all groups take them from one pool.
struct CacheGroup {
    GroupKind kind = GroupKind::kFull;
    std::int64_t span = 0;         // tokens of the window or chunk; unused by kFull
    std::int32_t num_bundles = 1;  // pages that each run of `page_size` tokens takes
    std::int32_t page_size = 0;    // tokens of its pages; divides CacheConfig's; 0: the same

    /// With `n` tokens written, those below this one are never read again.
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
    /// So many tokens have to be written before those below `first` >= 1 are never read again.
    /// Not asked of kFull.
    [[nodiscard]] std::int64_t least_skipping(std::int64_t first) const noexcept {
        return kind == GroupKind::kChunked ? (first + span - 1) / span * span : first + span - 1;
    }
};

/// Layers with a state. All such groups of a model share the numbers of their slots: a slot has a
/// place in the arrays of each of them.
struct StateGroup {
    // Tokens between two checkpoints, a multiple of CacheConfig::page_size; 0: none but those at
    // the end of a prompt and where prompts branch.
    std::int64_t interval = 0;
};

/// When a cached page is copied to the tier below.
enum class WritePolicy : std::uint8_t {
    kWriteThrough,  // when it enters the cache
    kSelective,     // once it was used often enough
    kWriteBack,     // when it is about to be evicted
};

/// By its name: write_through, write_through_selective or write_back. Throws std::invalid_argument
/// for another one.
[[nodiscard]] WritePolicy write_policy(std::string_view name);

/// What a CacheManager is built for. Its constructor checks the numbers. New fields come last, so
/// that those who list values by their order go on compiling: there is one of these for a manager.
// NOLINTNEXTLINE(clang-analyzer-optin.performance.Padding)
struct CacheConfig {
    std::int64_t num_pages = 0;      // of each replica
    std::int32_t page_size = 128;    // tokens
    std::int64_t max_sequences = 0;  // claimed at a time, in each replica
    std::int64_t max_seq_len = 0;    // tokens
    std::int32_t num_replicas = 1;
    bool prefix_caching = true;
    bool dedup = true;  // commit swaps a page for an equal cached one
    // A hit may end inside a page, whose start is then copied, from so many tokens on; 0: never.
    std::int32_t partial_page_reuse = 1;
    // Of the tier below each replica, with groups for any bundle; 0: there is none.
    std::int64_t host_pages = 0;
    // Layers that do not all keep everything; none: every page is one of all layers.
    std::vector<CacheGroup> groups = {};
    // Every group gets pages for what runs next alone; else those that keep everything get them for
    // the whole request at once.
    bool reserve_chunks = false;
    // With groups or states: so many tokens of those written last may be truncated.
    std::int64_t max_draft_tokens = 0;
    // Of tenants, by number: see RequestTerms. Reservations are no more than the pages in all.
    std::vector<TenantQuota> quotas = {};
    // Layers with a state beside those with pages, and how many slots they share in each replica:
    // one for each sequence at least, those beyond are checkpoints.
    std::vector<StateGroup> states = {};
    std::int64_t num_state_slots = 0;
    // Of the tier below each replica, for checkpoints; 0: those stay on the device.
    std::int64_t num_host_state_slots = 0;
    // What arrives in the host tier has keys, and waits to be written to stores below it.
    bool has_stores = false;
    std::string key_seed = {};            // of keys, one item of CBOR; "" is nil
    const StandIns* stand_ins = nullptr;  // names of tokens with extra keys, outlive the manager
    // Pages of which events wait to be taken, at most; 0: there are no events.
    std::int64_t event_pages = 0;
    EvictionConfig eviction = {};       // of cached pages, in each replica
    EvictionConfig host_eviction = {};  // of those of the host tier
    // When a cached page goes to the host tier; kSelective: once it was used so often, 1 .. 255.
    WritePolicy write_policy = WritePolicy::kWriteThrough;
    std::int32_t write_threshold = 2;
    // With eviction by priority: the lowest priority whose runs the host tier takes. The tier takes
    // no page of a run below it, and no page behind that run.
    std::int32_t host_min_priority = 0;
    // Where ids of pages begin: those in front, of memory that is there too, are the caller's.
    BlockId first_page = 0;
    // With groups: `commit` gives back no page that a window has passed; `leave_windows` does. For
    // engines that commit tokens when they schedule them, while steps before still read the pages.
    bool keep_windows = false;
};

}  // namespace kvcore
