// SPDX-License-Identifier: Apache-2.0
// Why tokens of a prompt were not in the cache. Plain values.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace kvcore {

/// The tokens of a prompt at its admission: taken from the cache, or not cached, by reason.
///
/// Invariant: cached_tokens + the sum of `tokens` == prompt_tokens.
struct Misses {
    enum Reason : std::uint8_t {
        kNeverSeen,       // not in the cache as far as the record of evicted pages goes back
        kEvicted,         // evicted from the device for new pages, and in no tier
        kHostFull,        // last evicted from the host tier for new pages
        kForgotten,       // taken out of the cache by `forget`
        kReset,           // taken out of the cache by a reset
        kUnreachable,     // cached, but a checkpoint or the pages of another group were missing
        kOtherNamespace,  // cached in another namespace
        kPartialPage,     // of a page that a hit cannot end in: see docs/metrics.md
        kLate,            // a store had the page, but it did not arrive in the host tier
        kDeclined,        // cached, but the reservation did not take the page
        kNumReasons
    };

    std::int64_t prompt_tokens = 0;
    std::int64_t cached_tokens = 0;
    std::array<std::int64_t, kNumReasons> tokens{};
    // Seconds between the evictions of the lost pages and the admission; -1: no page was evicted.
    double newest_eviction = -1;
    double oldest_eviction = -1;

    [[nodiscard]] std::int64_t uncached_tokens() const noexcept {
        return prompt_tokens - cached_tokens;
    }
    /// Adds the tokens of an admission, with `sign` -1 subtracts them. The times stay.
    void add(const Misses& other, std::int64_t sign = 1) noexcept {
        prompt_tokens += sign * other.prompt_tokens;
        cached_tokens += sign * other.cached_tokens;
        for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] += sign * other.tokens[i];
    }
    /// Records the age of an eviction.
    void note_eviction(double seconds) noexcept {
        newest_eviction = newest_eviction < 0 ? seconds : std::min(newest_eviction, seconds);
        oldest_eviction = std::max(oldest_eviction, seconds);
    }
};

/// The misses of all admissions since construction or the last reset of metrics.
struct MissCounts {
    Misses sum;
    std::int64_t admissions = 0;
    std::int64_t remembered_pages = 0;  // evicted pages that the record has now
    std::int64_t lost_pages = 0;        // evicted pages that memory was too short to record
};

}  // namespace kvcore
