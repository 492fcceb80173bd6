// SPDX-License-Identifier: Apache-2.0
// The hit rates that a cache of another size would have had. Plain values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcore {

/// The prompt tokens of one tenant, or of all requests, in the window of an Advice.
///
/// The tokens that other sizes and the optimum would have found are estimates: see AdviceLog.
struct AdviceTokens {
    /// The sizes, as factors of the pages of the cache.
    static constexpr std::array<double, 4> kFactors{0.5, 1.0, 2.0, 4.0};

    std::int64_t prompt_tokens = 0;
    std::int64_t cached_tokens = 0;  // that the cache had
    std::array<double, kFactors.size()> found_tokens{};
    double optimum_tokens = 0;  // that the optimum finds at factor 1

    AdviceTokens& operator+=(const AdviceTokens& other) noexcept {
        prompt_tokens += other.prompt_tokens;
        cached_tokens += other.cached_tokens;
        optimum_tokens += other.optimum_tokens;
        for (std::size_t i = 0; i < found_tokens.size(); ++i) {
            found_tokens[i] += other.found_tokens[i];
        }
        return *this;
    }
};

/// The hit rates of other sizes of the cache, by tenant.
struct Advice {
    std::vector<AdviceTokens> tenants;  // [0]: requests without a tenant; [1 + i]: of quota i
    double seconds = 0;                 // the length of the window
    std::int64_t sample = 0;            // one page in this many is sampled
    std::int64_t admissions = 0;
    std::int64_t sampled_uses = 0;  // uses of sampled pages by prompts
    std::int64_t lost_uses = 0;     // uses that memory was too short to record
};

}  // namespace kvcore
