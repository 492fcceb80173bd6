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
    std::vector<Own> row;  // nullptr: the page is the cache's
    std::int64_t committed = 0;
    std::int64_t frozen = 0;     // columns in front are the cache's or were given to forks
    CachedPage* at = nullptr;    // the last committed page
    bool sealed = false;         // fetched or written: no more prefix reuse
    std::int64_t written = 0;    // tokens that a fork would get
    std::int64_t declined = -1;  // pages of a hit whose partial page was not taken
    std::int64_t hit_tokens = 0;
    std::int64_t counted_from = 0;  // positions counted as input since the last reset
    std::int64_t counted_end = 0;
    std::int64_t known_end = 0;    // positions below ran in an earlier claim
    std::int64_t prompt_end = -1;  // -1: it has had no page yet

    /// A reservation of a request with `end` tokens that stands at `start`.
    void see(std::int64_t start, std::int64_t end) {
        if (prompt_end >= 0) return;
        prompt_end = end;
        known_end = start;
    }
    /// Positions of its prompt that did not run before.
    [[nodiscard]] std::int64_t in_prompt(std::int64_t first, std::int64_t end) const {
        return std::max<std::int64_t>(0, std::min(end, prompt_end) - std::max(first, known_end));
    }

    [[nodiscard]] std::int64_t num_pages() const { return count(row); }
};

/// One thing that reserving a request may do. There are several where equally good pages could be
/// the source of a partial hit.
struct Option {
    bool takes_hit = false;
    CachedPage* at = nullptr;      // where the whole pages of the hit end
    CachedPage* source = nullptr;  // of a partial hit
    std::int64_t copied = 0;
    bool declines = false;  // a partial page that may be there stays untouched
    std::int64_t hit_tokens = 0;
    std::int64_t hit_pages = 0;
    std::int64_t start = 0;
    std::int64_t active = 0;
    std::int64_t replaced = 0;  // pages of others that would be written into
    std::int64_t appended = 0;
    std::int64_t cut_to = 0;    // pages of the row that stay where some are replaced
    std::int64_t returned = 0;  // own pages that become superfluous
    std::int64_t evicted = 0;
    std::int64_t available = 0;
    bool fits = false;

    [[nodiscard]] std::int64_t new_pages() const { return appended + replaced; }
};

/// A hit counts what it adds to the one before; what was counted as input moves.
inline void count_hit(Claim& claim, const Option& option, kvcore::Metrics& metrics) {
    metrics.input_tokens -= claim.in_prompt(std::max(claim.counted_from, claim.hit_tokens),
                                            std::min(claim.counted_end, option.hit_tokens));
    metrics.cache_tokens +=
        std::max<std::int64_t>(0, option.hit_tokens - std::max(claim.hit_tokens, claim.known_end));
    metrics.copied_tokens += option.copied;
    claim.hit_tokens = option.hit_tokens;
}

/// All that it can need is more pages; a fetch reserves such rows behind the others.
[[nodiscard]] inline bool only_grows(const Claim& claim, std::int64_t start,
                                     std::int64_t page_size) {
    return claim.sealed && !claim.row.empty() && start >= claim.frozen * page_size;
}

/// Every position of a prompt counts once.
inline void count_input(Claim& claim, std::int64_t start, std::int64_t active,
                        kvcore::Metrics& metrics) {
    if (active <= claim.counted_end) return;
    metrics.input_tokens += claim.in_prompt(std::max(start, claim.counted_end), active);
    claim.counted_end = active;
}

/// A page copy that falls due: into the request's own page at `column`.
struct OwedCopy {
    bool is_owed = false;
    BlockId source = 0;
    std::int64_t column = 0;
    std::int64_t tokens = 0;
};

/// Holders of pages that do not count any more: forks that will have let go once a call is done.
class Departures {
   public:
    /// The claim gives up what it shares from column `first` on, of whose page it stands behind
    /// `kept` tokens: it copies `copied` of them while others may go on writing.
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
    /// Keeps the source of a copy from being free until the call is over.
    void hold_source(const Own& page, std::int64_t tokens) { sources_.push_back({page, tokens}); }
    void let_go_of_sources() { sources_.clear(); }

    /// Neither the cache nor another claim has it as well, nor does a copy read more than the first
    /// `kept` tokens.
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
