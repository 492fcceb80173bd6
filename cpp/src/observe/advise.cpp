// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <queue>
#include <vector>

#include "observe/advice_log.hpp"

namespace kvcore {
namespace {

using Index = std::uint32_t;
constexpr Index kNever = ~Index{0};

/// The records of a replica, and for each record the next use of its page.
struct Timeline {
    const std::vector<AdviceRecord>& records;
    std::vector<Index> next_uses;  // kNever: the page leaves the cache before its next use
    std::vector<bool> is_first;    // the first record of its page
};

Timeline timeline(const std::vector<AdviceRecord>& records) {
    std::vector<Index> order(records.size());
    std::iota(order.begin(), order.end(), Index{0});
    std::sort(order.begin(), order.end(), [&](Index a, Index b) {
        return records[a].page != records[b].page ? records[a].page < records[b].page : a < b;
    });
    Timeline made{records, std::vector<Index>(records.size(), kNever),
                  std::vector<bool>(records.size(), true)};
    for (std::size_t i = 1; i < order.size(); ++i) {
        const AdviceRecord& next = records[order[i]];
        if (next.page != records[order[i - 1]].page) continue;
        made.is_first[order[i]] = false;
        if (next.is_use()) made.next_uses[order[i - 1]] = order[i];
    }
    return made;
}

/// The cached pages without a holder, in the order in which the optimum evicts them: the page with
/// the farthest next use first (Belady, IBM Systems Journal 1966). A page without a next use is
/// evicted at once.
class FarthestFirst {
   public:
    explicit FarthestFirst(std::size_t records) : is_cached_(records) {}

    void add(Index next_use) {
        if (next_use == kNever) return;
        is_cached_[next_use] = true;
        next_uses_.push(next_use);
        ++num_pages_;
    }
    /// Takes out the page of a use. Returns false if the cache does not have the page.
    bool take(Index use) noexcept {
        if (!is_cached_[use]) return false;
        is_cached_[use] = false;
        --num_pages_;
        return true;
    }
    void evict_to(std::int64_t room) {
        while (num_pages_ > std::max<std::int64_t>(0, room)) {
            static_cast<void>(take(next_uses_.top()));
            next_uses_.pop();
        }
    }

   private:
    std::vector<bool> is_cached_;  // by next use
    std::priority_queue<Index> next_uses_;
    std::int64_t num_pages_ = 0;
};

// Adds the tokens of the uses that the optimum finds. It begins with the pages that LRU finds at
// their first use.
void count_optimum(const Timeline& time, std::vector<std::int64_t>& tokens) {
    const std::vector<AdviceRecord>& records = time.records;
    FarthestFirst cache(records.size());
    for (Index i = 0; i < records.size(); ++i) {
        const AdviceRecord& record = records[i];
        const bool was_cached = record.kind == AdviceRecord::kUse && record.is_found_by_lru;
        if (was_cached && time.is_first[i]) cache.add(i);
    }
    for (Index i = 0; i < records.size(); ++i) {
        const AdviceRecord& record = records[i];
        switch (record.kind) {
            case AdviceRecord::kUse:
            case AdviceRecord::kUseOfHeld:
                if (cache.take(i) || record.kind == AdviceRecord::kUseOfHeld) {
                    tokens[record.owner] += record.tokens;
                }
                cache.evict_to(record.room);
                break;
            case AdviceRecord::kLeft:
                cache.evict_to(record.room);
                cache.add(time.next_uses[i]);
                break;
            case AdviceRecord::kForgotten:
                break;  // the page has no next use
            case AdviceRecord::kReset:
                cache.evict_to(0);
                break;
        }
    }
}

/// Estimates the tokens of all pages from the tokens of sampled pages.
///
/// The sample has too many or too few uses of pages that are used often. With LRU, the tokens that
/// the cache had are known: the sample only estimates the difference between the sizes. With
/// another policy, all sizes find the tokens that the sample lacks (SHARDS-adj of Waldspurger et
/// al., FAST 2015).
double estimated(std::int64_t sampled_tokens, const AdviceSums& sums, const AdviceCopy& copy) {
    constexpr std::size_t kFactor1 = 1;
    static_assert(AdviceTokens::kFactors[kFactor1] == 1);
    const std::int64_t known = copy.is_lru ? sums.device_tokens : sums.use_tokens;
    const std::int64_t sampled = copy.is_lru ? sums.found_tokens[kFactor1] : sums.sampled_tokens;
    const std::int64_t found = known + copy.sample * (sampled_tokens - sampled);
    return static_cast<double>(std::clamp<std::int64_t>(found, 0, sums.use_tokens) +
                               sums.partial_tokens);
}

}  // namespace

Advice advise(const AdviceCopy& copy) {
    std::vector<std::int64_t> optimum(copy.sums.size());
    for (const auto& records : copy.records) count_optimum(timeline(records), optimum);
    Advice made;
    made.seconds = copy.seconds;
    made.sample = copy.sample;
    made.lost_uses = copy.lost_uses;
    for (std::size_t owner = 0; owner < copy.sums.size(); ++owner) {
        const AdviceSums& sums = copy.sums[owner];
        AdviceTokens tokens;
        tokens.prompt_tokens = sums.prompt_tokens;
        tokens.cached_tokens = sums.cached_tokens;
        for (std::size_t i = 0; i < tokens.found_tokens.size(); ++i) {
            tokens.found_tokens[i] = estimated(sums.found_tokens[i], sums, copy);
        }
        tokens.optimum_tokens = estimated(optimum[owner], sums, copy);
        made.tenants.push_back(tokens);
        made.admissions += sums.admissions;
        made.sampled_uses += sums.sampled_uses;
    }
    return made;
}

}  // namespace kvcore
