// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "oracle_cache.hpp"

namespace oracle {

struct Claim {
    std::int32_t replica = 0;
    std::vector<Own> row;  // nullptr: the page is the cache's
    std::int64_t committed = 0;
    std::int64_t frozen = 0;   // columns in front are the cache's or were given to forks
    CachedPage* at = nullptr;  // the last committed page
    bool sealed = false;       // fetched or written: no more prefix reuse
    std::int64_t written = 0;  // tokens that a fork would get
    std::int64_t hit_tokens = 0;
    std::int64_t counted_from = 0;  // positions counted as input since the last reset
    std::int64_t counted_end = 0;

    [[nodiscard]] std::int64_t num_pages() const { return count(row); }
};

/// One thing that reserving a request may do. There are several where equally good pages could be
/// the source of a partial hit.
struct Option {
    bool takes_hit = false;
    CachedPage* at = nullptr;      // where the whole pages of the hit end
    CachedPage* source = nullptr;  // of a partial hit
    std::int64_t copied = 0;
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
    /// The claim gives up what it shares from `first` on.
    void note(const Claim& claim, std::int64_t first) {
        for (std::int64_t c = first; c < claim.frozen; ++c) {
            const Own& page = item(claim.row, c);
            if (page != nullptr && !is_sole(page)) ++leaving_[page.get()];
        }
    }
    void forget_leaving() { leaving_.clear(); }
    /// Keeps the source of a copy from being free until the call is over.
    void hold_source(const Own& page) { sources_.push_back(page); }
    void let_go_of_sources() { sources_.clear(); }

    /// Neither the cache nor another claim has it as well.
    [[nodiscard]] bool is_sole(const Own& page) const {
        if (page == nullptr) return false;
        const auto left = leaving_.find(page.get());
        return page.use_count() - std::count(sources_.begin(), sources_.end(), page) -
                   (left == leaving_.end() ? 0 : left->second) ==
               1;
    }

   private:
    std::map<const BlockId*, long> leaving_;
    std::vector<Own> sources_;
};

}  // namespace oracle
