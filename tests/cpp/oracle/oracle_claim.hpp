// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "oracle/oracle_cache.hpp"

namespace oracle {

struct Claim {
    std::int32_t replica = 0;
    std::vector<Own> row;  // nullptr: the cache owns the page
    std::int64_t committed = 0;
    std::int64_t frozen = 0;     // the first columns, which the cache or forks share
    CachedPage* at = nullptr;    // last committed page
    bool sealed = false;         // fetched or written: no more prefix reuse
    std::int64_t written = 0;    // tokens that a fork would get
    std::int64_t declined = -1;  // pages of a hit whose partial page was declined
    std::int64_t hit_tokens = 0;
    std::int64_t counted_from = 0;  // positions counted as input since the last reset
    std::int64_t counted_end = 0;
    std::int64_t known_end = 0;    // positions below ran in an earlier claim
    std::int64_t prompt_end = -1;  // -1: the claim has had no page yet

    /// Note the first reservation: a request with `end` tokens whose context ends at `start`.
    void see(std::int64_t start, std::int64_t end) {
        if (prompt_end >= 0) return;
        prompt_end = end;
        known_end = start;
    }
    /// The number of positions of the prompt that did not run before.
    [[nodiscard]] std::int64_t in_prompt(std::int64_t first, std::int64_t end) const {
        return std::max<std::int64_t>(0, std::min(end, prompt_end) - std::max(first, known_end));
    }

    [[nodiscard]] std::int64_t num_pages() const { return count(row); }
};

/// One allowed result of a reservation. There are several if a partial hit has several equally good
/// sources.
struct Option {
    bool takes_hit = false;
    CachedPage* at = nullptr;      // end of the whole pages of the hit
    CachedPage* source = nullptr;  // of a partial hit
    std::int64_t copied = 0;
    bool declines = false;  // does not use a partial page, which may exist
    std::int64_t hit_tokens = 0;
    std::int64_t hit_pages = 0;
    std::int64_t start = 0;
    std::int64_t active = 0;
    std::int64_t replaced = 0;  // shared pages that would be written to
    std::int64_t appended = 0;
    std::int64_t cut_to = 0;    // pages of the row that stay if some are replaced
    std::int64_t returned = 0;  // own pages that become superfluous
    std::int64_t evicted = 0;
    std::int64_t available = 0;
    bool fits = false;

    [[nodiscard]] std::int64_t new_pages() const { return appended + replaced; }
};

/// Count the tokens that a hit adds to the previous hit. Tokens counted as input move to the hit.
inline void count_hit(Claim& claim, const Option& option, kvcore::Metrics& metrics) {
    metrics.input_tokens -= claim.in_prompt(std::max(claim.counted_from, claim.hit_tokens),
                                            std::min(claim.counted_end, option.hit_tokens));
    metrics.cache_tokens +=
        std::max<std::int64_t>(0, option.hit_tokens - std::max(claim.hit_tokens, claim.known_end));
    metrics.copied_tokens += option.copied;
    claim.hit_tokens = option.hit_tokens;
}

/// Return true if the row can only need more pages. A fetch reserves such rows after the others.
[[nodiscard]] inline bool only_grows(const Claim& claim, std::int64_t start,
                                     std::int64_t page_size) {
    return claim.sealed && !claim.row.empty() && start >= claim.frozen * page_size;
}

/// Count every position of a prompt once.
inline void count_input(Claim& claim, std::int64_t start, std::int64_t active,
                        kvcore::Metrics& metrics) {
    if (active <= claim.counted_end) return;
    metrics.input_tokens += claim.in_prompt(std::max(start, claim.counted_end), active);
    claim.counted_end = active;
}

/// A page copy that becomes due: into the request's own page at `column`.
struct OwedCopy {
    bool is_owed = false;
    BlockId source = 0;
    std::int64_t column = 0;
    std::int64_t tokens = 0;
};

/// Holders that no longer count: forks that will have released their pages at the end of a call.
class Departures {
   public:
    /// The claim gives up its shared pages from column `first` on. It has written `kept` tokens of
    /// the first page and copies `copied` of them, while other forks may continue to write.
    void note(const Claim& claim, std::int64_t first, std::int64_t kept, std::int64_t copied) {
        for (std::int64_t c = first; c < claim.frozen; ++c) {
            const Own& page = item(claim.row, c);
            if (page == nullptr || is_sole(page, c == first ? kept : 0)) continue;
            Leaving& leaving = leaving_[page.get()];
            ++leaving.count;
            if (c == first) leaving.reach = std::max(leaving.reach, copied);
        }
    }
    void forget_leaving() { leaving_.clear(); }
    /// Keep the source of a copy in use until the call ends.
    void hold_source(const Own& page, std::int64_t tokens) { sources_.push_back({page, tokens}); }
    void let_go_of_sources() { sources_.clear(); }

    /// Return true if neither the cache nor another claim shares the page, and no copy reads more
    /// than the first `kept` tokens.
    [[nodiscard]] bool is_sole(const Own& page, std::int64_t kept) const {
        if (page == nullptr) return false;
        const auto left = leaving_.find(page.get());
        Leaving gone = left == leaving_.end() ? Leaving{} : left->second;
        for (const Source& source : sources_) {
            if (source.page != page) continue;
            ++gone.count;
            gone.reach = std::max(gone.reach, source.tokens);
        }
        return page.use_count() == 1 || (page.use_count() - gone.count == 1 && gone.reach <= kept);
    }

   private:
    struct Leaving {
        long count = 0;
        std::int64_t reach = 0;  // tokens of the longest copy
    };
    struct Source {
        Own page;
        std::int64_t tokens;
    };
    std::map<const BlockId*, Leaving> leaving_;
    std::vector<Source> sources_;
};

}  // namespace oracle
