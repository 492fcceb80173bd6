// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <unordered_map>
#include <vector>

#include "oracle_cache.hpp"

/// What CacheManager has to do, written to be obvious. Its state is the set of cached pages, each
/// named by its whole prefix; whatever the manager keeps counts or lists of is worked out from it
/// by looking at all of them. It learns page ids from the manager, and so knows who must share
/// what.
namespace oracle {

struct Claim {
    std::int32_t replica = 0;
    std::int64_t num_pages = 0;
    std::int64_t committed = 0;
    CachedPage* at = nullptr;     // the last committed page
    std::set<std::int64_t> kept;  // committed columns whose page is the sequence's own twin
    bool sealed = false;          // fetched or written: no more prefix reuse
    std::int64_t hit_tokens = 0;
    std::int64_t counted_from = 0;  // positions counted as input since the last reset
    std::int64_t counted_end = 0;
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
    std::int64_t replaced = 0;  // committed pages that would be written into
    std::int64_t appended = 0;
    std::int64_t cut_to = 0;    // pages of the row that stay where committed ones are replaced
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

class Oracle {
   public:
    explicit Oracle(const kvcore::CacheConfig& config) : config_(config) {
        for (std::int32_t i = 0; i < config.num_replicas; ++i) {
            replicas_.push_back({config.num_blocks, 0, {}, Cache(config.page_size)});
        }
    }

    void claim(const Request& request, std::int32_t replica) {
        claims_[request.sequence.index] = {};
        claims_[request.sequence.index].replica = replica;
        ++item(replicas_, replica).num_sequences;
    }
    [[nodiscard]] const Claim& claim_of(const Request& request) const {
        return claims_.at(request.sequence.index);
    }
    [[nodiscard]] std::int64_t num_sequences(std::int32_t replica) const {
        return item(replicas_, replica).num_sequences;
    }

    void release(const Request& request) {
        Claim& claim = of(request);
        Replica& replica = item(replicas_, claim.replica);
        replica.free += claim.num_pages - claim.committed + count_kept(claim);
        let_go(claim.at);
        --replica.num_sequences;
        claims_.erase(request.sequence.index);
    }

    // ---- looking up and pinning ----------------------------------------
    [[nodiscard]] CachedPage* match(std::int32_t replica, const Request& request, std::int64_t n) {
        return item(replicas_, replica).cache.match(request, n);
    }
    void pin(std::int32_t replica, CachedPage* page) {
        hold(page);
        note_peak(replica);
    }
    /// Whoever held the prefix lets it go: that is a use of all its pages.
    void let_go(CachedPage* page) {
        ++clock_;
        for (CachedPage* p = page; p != nullptr; p = p->parent) p->stamp = clock_;
        drop(page);
    }

    [[nodiscard]] std::int32_t recommend(const Request& request, std::int64_t n) {
        std::int32_t best = 0;
        std::vector<std::int64_t> most;
        for (std::int32_t i = 0; i < config_.num_replicas; ++i) {
            const std::int64_t hit = config_.prefix_caching ? depth_of(match(i, request, n)) : 0;
            const std::int64_t available = stats(i).available_pages();
            const std::vector<std::int64_t> merit{hit, available, -num_sequences(i)};
            if (i == 0 || merit > most) {
                most = merit;
                best = i;
            }
        }
        return best;
    }

    void reset() {
        for (Replica& replica : replicas_) replica.free += replica.cache.reset();
    }

    // ---- reserving ----------------------------------------
    [[nodiscard]] bool can_ever_fit(const Request& request, std::int64_t num_steps) const {
        return kvcore::ceil_div(request.end(), config_.page_size) <= config_.num_blocks &&
               request.end() + num_steps - 1 <= config_.max_seq_len;
    }

    /// What reserving may do now, each as good as the other.
    [[nodiscard]] std::vector<Option> options(const Request& request, std::int64_t num_steps,
                                              bool allow_partial = true) {
        const Claim& claim = claim_of(request);
        Option plain;
        plain.at = claim.at;
        plain.hit_tokens = claim.hit_tokens;
        plain.hit_pages = claim.committed;
        plain.start = claim.num_pages == 0 ? 0 : request.start;
        plain.active = request.active;
        std::vector<Option> all = hits(request, plain, allow_partial && config_.partial_page_reuse);
        if (all.empty()) all.push_back(plain);
        for (Option& option : all) {
            weigh(option, claim, request.end() + num_steps - 1);
            if (!option.fits && option.source != nullptr) {
                option = options(request, num_steps, false).front();
            }
        }
        return all;
    }

    /// Does it.
    OwedCopy apply(const Request& request, const Option& option) {
        Claim& claim = of(request);
        Replica& replica = item(replicas_, claim.replica);
        if (option.takes_hit) {
            hold(option.at);
            drop(claim.at);
            claim.at = option.at;
            claim.committed = option.hit_pages;
            claim.num_pages = std::max(claim.num_pages, option.hit_pages);
        }
        claim.num_pages = std::min(claim.num_pages, option.cut_to);
        replica.free += option.returned;
        while (replica.free < option.new_pages()) {
            replica.cache.evict(option.source);
            ++replica.free;
            ++replica.metrics.evicted_pages;
        }
        replica.free -= option.new_pages();
        claim.num_pages += option.appended;
        OwedCopy owed = replace_committed(claim, option.start);
        if (option.source != nullptr) {
            owed = {true, option.source->id, option.hit_pages, option.copied};
        }
        count_hit(claim, option);
        count_input(claim, option.start, option.active);
        note_peak(claim.replica);
        return owed;
    }

    // ---- what fetch asks ----------------------------------------
    [[nodiscard]] bool is_reserved(const Request& request, std::int64_t num_steps) const {
        const Claim& claim = claim_of(request);
        return claim.num_pages * config_.page_size >= request.end() + num_steps - 1 &&
               request.start >= claim.committed * config_.page_size;
    }
    void seal(const Request& request) {
        of(request).sealed = true;
        count_input(of(request), request.start, request.active);
    }

    // ---- committing ----------------------------------------
    /// `row` are the request's page ids before the commit; it is changed to those after.
    void commit(const Request& request, std::int32_t batch_row, std::vector<BlockId>& row,
                std::vector<kvcore::PageSwap>& swaps) {
        Claim& claim = of(request);
        if (request.start != claim.hit_tokens) claim.sealed = true;
        if (!config_.prefix_caching) return;
        const std::int64_t page = config_.page_size;
        for (; (claim.committed + 1) * page <= request.start; ++claim.committed) {
            const std::int64_t column = claim.committed;
            CachedPage* cached = item(replicas_, claim.replica)
                                     .cache.enter(request, claim.at, column, item(row, column));
            const bool repeats = cached->id != item(row, column);
            hold(cached);
            drop(claim.at);
            claim.at = cached;
            if (!repeats) continue;
            if (config_.dedup) {
                item(row, column) = cached->id;
                swaps.push_back({batch_row, static_cast<std::int32_t>(column), cached->id});
                ++item(replicas_, claim.replica).free;
            } else {
                claim.kept.insert(column);
            }
        }
        note_peak(claim.replica);
    }

    // ---- counters ----------------------------------------
    [[nodiscard]] kvcore::PoolStats stats(std::int32_t index) const {
        const Replica& replica = item(replicas_, index);
        return {config_.num_blocks, replica.free, replica.cache.size(),
                replica.cache.num_evictable(), replica.num_sequences};
    }
    [[nodiscard]] kvcore::Metrics metrics() const {
        kvcore::Metrics sum;
        for (const Replica& replica : replicas_) sum += replica.metrics;
        return sum;
    }
    void reset_metrics() {
        for (auto& [index, claim] : claims_) claim.counted_from = claim.counted_end;
        for (std::int32_t i = 0; i < config_.num_replicas; ++i) {
            item(replicas_, i).metrics = {};
            note_peak(i);
        }
    }
    template <class Visit>
    void for_each_page(Visit&& visit) const {
        for (std::int32_t i = 0; i < config_.num_replicas; ++i) {
            for (const auto& entry : item(replicas_, i).cache.pages()) visit(i, entry.second);
        }
    }

   private:
    struct Replica {
        std::int64_t free = 0;
        std::int64_t num_sequences = 0;
        kvcore::Metrics metrics;
        Cache cache;
    };

    Claim& of(const Request& request) { return claims_.at(request.sequence.index); }
    static std::int64_t count_kept(const Claim& claim) {
        return static_cast<std::int64_t>(claim.kept.size());
    }

    // The longest hits that the rules allow and that are longer than what the claim has.
    std::vector<Option> hits(const Request& request, const Option& plain, bool allow_partial) {
        const Claim& claim = claim_of(request);
        const bool is_open = config_.prefix_caching && !claim.sealed &&
                             plain.start == claim.hit_tokens && plain.active - plain.start > 1;
        if (!is_open) return {};
        Option hit = plain;
        hit.takes_hit = true;
        hit.at = match(claim.replica, request, request.end() - 1);
        hit.hit_pages = depth_of(hit.at);
        std::vector<CachedPage*> sources{nullptr};
        if (allow_partial) {
            hit.copied =
                item(replicas_, claim.replica).cache.find_sources(request, hit.hit_pages, sources);
        }
        hit.hit_tokens = hit.start = hit.hit_pages * config_.page_size + hit.copied;
        if (hit.hit_tokens <= claim.hit_tokens) return {};
        if (hit.start >= plain.active) {
            hit.active = std::min(request.end(), hit.start + plain.active - plain.start);
        }
        std::vector<Option> all(sources.size(), hit);
        for (std::size_t i = 0; i < all.size(); ++i) all[i].source = sources[i];
        return all;
    }

    void weigh(Option& option, const Claim& claim, std::int64_t tokens) const {
        const Replica& replica = item(replicas_, claim.replica);
        const std::int64_t needed = kvcore::ceil_div(tokens, config_.page_size);
        const std::int64_t first_written = option.start / config_.page_size;
        const std::int64_t held = std::max(claim.num_pages, option.hit_pages);
        option.appended = std::max<std::int64_t>(0, needed - held);
        option.returned = std::min(claim.num_pages, option.hit_pages) - claim.committed;
        option.cut_to = held;
        if (first_written < option.hit_pages && needed < option.hit_pages) option.cut_to = needed;
        for (std::int64_t column = first_written; column < option.hit_pages; ++column) {
            const bool is_own = claim.kept.count(column) > 0;
            option.replaced += column < option.cut_to && !is_own ? 1 : 0;
            option.returned += column >= option.cut_to && is_own ? 1 : 0;
        }
        if (option.cut_to < held) option.returned += held - option.hit_pages;
        const std::int64_t evictable = replica.cache.num_evictable(option.at, option.source);
        const std::int64_t free = replica.free + option.returned;
        option.evicted = std::max<std::int64_t>(0, option.new_pages() - free);
        option.available = free + evictable;
        option.fits = option.evicted <= evictable;
    }

    // Own pages for committed ones from the one that holds position `start` on.
    OwedCopy replace_committed(Claim& claim, std::int64_t start) {
        const std::int64_t first = start / config_.page_size;
        OwedCopy owed;
        if (claim.committed <= first) return owed;
        CachedPage* old = claim.at;
        for (; claim.committed > first; --claim.committed) {
            const std::int64_t column = claim.committed - 1;
            const bool is_own = claim.kept.erase(column) > 0;
            if (column == first && !is_own && start % config_.page_size > 0) {
                owed = {true, claim.at->id, column, start % config_.page_size};
            }
            claim.at = claim.at->parent;
        }
        hold(claim.at);
        let_go(old);
        return owed;
    }

    void count_hit(Claim& claim, const Option& option) {
        kvcore::Metrics& metrics = item(replicas_, claim.replica).metrics;
        const std::int64_t moved = std::min(claim.counted_end, option.hit_tokens) -
                                   std::max(claim.counted_from, claim.hit_tokens);
        metrics.input_tokens -= std::max<std::int64_t>(0, moved);
        metrics.cache_tokens += option.hit_tokens - claim.hit_tokens;
        metrics.copied_tokens += option.copied;
        claim.hit_tokens = option.hit_tokens;
    }
    void count_input(Claim& claim, std::int64_t start, std::int64_t active) {
        if (active <= claim.counted_end) return;
        item(replicas_, claim.replica).metrics.input_tokens +=
            active - std::max(start, claim.counted_end);
        claim.counted_end = active;
    }
    void note_peak(std::int32_t replica) {
        const kvcore::PoolStats now = stats(replica);
        std::int64_t& peak = item(replicas_, replica).metrics.peak_used_pages;
        peak = std::max(peak, now.total_pages - now.available_pages());
    }

    kvcore::CacheConfig config_;
    std::vector<Replica> replicas_;
    std::unordered_map<std::uint32_t, Claim> claims_;  // by the index of the sequence's handle
    std::uint64_t clock_ = 0;
};

}  // namespace oracle
