// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "oracle/oracle_claim.hpp"

/// The expected behavior of CacheManager, in obvious code. The state is the set of cached pages,
/// each named by its whole prefix. The oracle computes every count and list of the manager by
/// looking at all pages. It gets page ids from the manager, and so checks which requests share a
/// page.
namespace oracle {

class Oracle {
   public:
    Oracle(const kvcore::CacheConfig& config, bool copies_at_once)
        : config_(config), copies_at_once_(copies_at_once) {
        for (std::int32_t i = 0; i < config.num_replicas; ++i) {
            free_.push_back(config.num_pages);
            replicas_.push_back({0, {}, Cache(config.page_size)});
        }
    }
    Oracle(const Oracle&) = delete;  // the pages refer to it

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
        const Claim& claim = of(request);
        let_go(claim.at);
        --item(replicas_, claim.replica).num_sequences;
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
    /// The holder of a prefix releases it: that is a use of all its pages.
    void let_go(CachedPage* page) {
        ++clock_;
        for (CachedPage* p = page; p != nullptr; p = p->parent) p->stamp = clock_;
        drop(page);
    }

    [[nodiscard]] std::int32_t recommend(const Request& request, std::int64_t n) {
        std::vector<std::vector<std::int64_t>> merits;
        for (std::int32_t i = 0; i < config_.num_replicas; ++i) {
            const std::int64_t hit = config_.prefix_caching ? depth_of(match(i, request, n)) : 0;
            merits.push_back({hit, stats(i).available_pages(), -num_sequences(i)});
        }
        const auto best = std::max_element(merits.begin(), merits.end());  // the first of equals
        return static_cast<std::int32_t>(best - merits.begin());
    }

    void reset() {
        for (Replica& replica : replicas_) replica.cache.reset();
    }

    // ---- reserving ----------------------------------------
    [[nodiscard]] bool can_ever_fit(const Request& request, std::int64_t num_steps) const {
        return kvcore::ceil_div(request.end(), config_.page_size) <= config_.num_pages &&
               request.end() + num_steps - 1 <= config_.max_seq_len;
    }

    /// The allowed results of a reservation; all are equally good.
    [[nodiscard]] std::vector<Option> options(const Request& request, std::int64_t num_steps,
                                              bool allow_partial = true) {
        const Claim& claim = claim_of(request);
        Option plain;
        plain.at = claim.at;
        plain.hit_tokens = claim.hit_tokens;
        plain.hit_pages = claim.committed;
        plain.start = claim.row.empty() ? 0 : request.start;
        plain.active = request.active;
        std::vector<Option> all = hits(request, plain, allow_partial && config_.partial_page_reuse);
        if (all.empty()) all.push_back(plain);
        for (Option& option : all) {
            option.declines = !allow_partial;
            weigh(option, claim, request.end() + num_steps - 1);
            if (!option.fits && option.source != nullptr) {
                option = options(request, num_steps, false).front();
            }
        }
        return all;
    }

    /// Apply an option.
    OwedCopy apply(const Request& request, const Option& option) {
        Claim& claim = of(request);
        Replica& replica = item(replicas_, claim.replica);
        if (option.takes_hit) {
            hold(option.at);
            drop(claim.at);
            claim.at = option.at;
            const auto hit_pages = static_cast<std::size_t>(option.hit_pages);
            claim.row.resize(std::max(claim.row.size(), hit_pages));
            for (; claim.committed < option.hit_pages; ++claim.committed) {
                item(claim.row, claim.committed).reset();
            }
            claim.frozen = claim.committed;
        }
        if (option.cut_to < claim.num_pages()) {
            claim.row.resize(static_cast<std::size_t>(option.cut_to));
        }
        while (item(free_, claim.replica) < option.new_pages()) {
            replica.cache.evict(option.source);
            ++replica.metrics.evicted_pages;
        }
        for (std::int64_t i = 0; i < option.appended; ++i) {
            claim.row.push_back(new_page(claim.replica));
        }
        OwedCopy owed = replace_frozen(claim, option.start);
        claim.written = option.takes_hit ? option.start : std::min(claim.written, option.start);
        if (option.source != nullptr) {
            owed = {true, option.source->id, option.hit_pages, option.copied};
        }
        if (option.declines) claim.declined = option.hit_pages;
        kvcore::Metrics& metrics = item(replicas_, claim.replica).metrics;
        claim.see(request.start, request.end());
        count_hit(claim, option, metrics);
        count_input(claim, option.start, option.active, metrics);
        note_peak(claim.replica);
        return owed;
    }

    // ---- checks for fetch ------------------------------------------
    [[nodiscard]] bool is_reserved(const Request& request, std::int64_t num_steps) const {
        const Claim& claim = claim_of(request);
        return claim.num_pages() * config_.page_size >= request.end() + num_steps - 1 &&
               request.start >= claim.frozen * config_.page_size;
    }
    void seal(const Request& request) {
        of(request).sealed = true;
        of(request).written = std::min(of(request).written, request.start);
        Claim& claim = of(request);
        count_input(claim, request.start, request.active, item(replicas_, claim.replica).metrics);
    }

    /// The row gives up pages before a fetch reserves the rows after it.
    void note_leaving(const Request& request, const Option& option) {
        const std::int64_t kept = option.start % config_.page_size;
        departures_.note(claim_of(request), option.start / config_.page_size, kept,
                         copies_at_once_ ? kept : 0);
    }
    void forget_leaving() { departures_.forget_leaving(); }
    /// The immediate copies of a call are done.
    void finish_copies() { departures_.let_go_of_sources(); }

    /// Store the ids that the manager gave to new pages.
    void learn(const Request& request, const std::vector<BlockId>& row) {
        Claim& claim = of(request);
        for (std::int64_t c = 0; c < claim.num_pages(); ++c) {
            const Own& page = item(claim.row, c);
            if (page != nullptr && *page < 0) *page = item(row, c);
        }
    }

    // ---- forking and truncating ----------------------------------------
    /// The number of tokens that a fork of the request starts with.
    [[nodiscard]] std::int64_t written(const Request& request) const {
        return std::min(claim_of(request).written, request.start);
    }
    /// `child` already names its sequence, and starts with the tokens that `parent` has written.
    void fork(const Request& parent, const Request& child) {
        claim(child, claim_of(parent).replica);
        Claim& from = of(parent);
        Claim& to = of(child);
        to.written = to.counted_from = to.counted_end = written(parent);
        const bool is_sample = to.written > 0 && child.end() == to.written + 1;
        to.prompt_end = is_sample ? to.written : child.end();
        to.frozen = kvcore::ceil_div(to.written, config_.page_size);
        if (to.frozen == 0) return;
        to.row.assign(from.row.begin(), from.row.begin() + static_cast<std::ptrdiff_t>(to.frozen));
        to.committed = std::min(from.committed, to.frozen);
        to.at = up_to(from.at, to.committed);
        hold(to.at);
        from.frozen = std::max(from.frozen, to.frozen);
        from.sealed = to.sealed = true;
    }
    /// The largest number of tokens that a truncation may keep.
    [[nodiscard]] std::int64_t most_kept(const Request& request) const {
        const Claim& claim = claim_of(request);
        return claim.sealed ? std::max(claim.counted_end, claim.written) : 0;
    }
    void truncate(const Request& request, std::int64_t n) {
        Claim& claim = of(request);
        claim.written = std::min(claim.written, n);
        const std::int64_t pages = kvcore::ceil_div(n, config_.page_size);
        if (pages >= claim.num_pages()) return;
        claim.row.resize(static_cast<std::size_t>(pages));
        claim.frozen = std::min(claim.frozen, pages);
        move_back(claim, pages);
    }

    // ---- committing ----------------------------------------
    /// `row`: the request's page ids before the commit; the call replaces them by the ids after it.
    void commit(const Request& request, std::int32_t batch_row, std::vector<BlockId>& row,
                std::vector<kvcore::PageSwap>& swaps) {
        Claim& claim = of(request);
        claim.written = request.start;
        if (request.start != claim.hit_tokens) claim.sealed = true;
        if (!config_.prefix_caching) return;
        const std::int64_t page = config_.page_size;
        for (; (claim.committed + 1) * page <= request.start; ++claim.committed) {
            const std::int64_t column = claim.committed;
            CachedPage* cached = item(replicas_, claim.replica)
                                     .cache.enter(request, claim.at, column, item(row, column));
            hold(cached);
            drop(claim.at);
            claim.at = cached;
            Own& page = item(claim.row, column);
            if (cached->page == nullptr) {
                cached->page = std::move(page);
                entrust(column, cached);
            } else if (config_.dedup) {
                item(row, column) = cached->id;
                swaps.push_back({batch_row, static_cast<std::int32_t>(column), cached->id});
                page.reset();
            }
        }
        claim.frozen = std::max(claim.frozen, claim.committed);
        note_peak(claim.replica);
    }

    // ---- counters ----------------------------------------
    [[nodiscard]] kvcore::PoolStats stats(std::int32_t index) const {
        const Replica& replica = item(replicas_, index);
        return {config_.num_pages, item(free_, index), replica.cache.size(),
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
        std::int64_t num_sequences = 0;
        kvcore::Metrics metrics;
        Cache cache;
    };

    Claim& of(const Request& request) { return claims_.at(request.sequence.index); }
    // The page is free again when its last holder drops it.
    Own new_page(std::int32_t replica) {
        std::int64_t& free = item(free_, replica);
        --free;
        return {new BlockId(-1), [&free](BlockId* id) {
                    ++free;
                    delete id;
                }};
    }
    void move_back(Claim& claim, std::int64_t committed) {
        if (claim.committed <= committed) return;
        CachedPage* old = claim.at;
        claim.at = up_to(old, committed);
        claim.committed = committed;
        hold(claim.at);
        let_go(old);
    }
    // The cache now owns the page that ends `column`. Forks that share the page hold it in the
    // cache.
    void entrust(std::int64_t column, CachedPage* cached) {
        for (auto& [index, other] : claims_) {
            if (column >= other.num_pages() || item(other.row, column) != cached->page) continue;
            CHECK_EQ(other.committed, column);
            hold(cached);
            drop(other.at);
            other.at = cached;
            other.committed = column + 1;
            item(other.row, column).reset();
        }
        CHECK_EQ(cached->page.use_count(), 1);
    }

    // The longest hits that the rules allow, if they are longer than the claim's prefix.
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
        if (allow_partial && hit.hit_pages > claim.declined) {
            hit.copied =
                item(replicas_, claim.replica).cache.find_sources(request, hit.hit_pages, sources);
        }
        if (hit.copied < config_.partial_page_reuse) {
            hit.copied = 0;
            sources = {nullptr};
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
        const std::int64_t page = config_.page_size;
        const std::int64_t needed = kvcore::ceil_div(tokens, page);
        const std::int64_t first_written = option.start / page;
        const std::int64_t held = std::max(claim.num_pages(), option.hit_pages);
        option.appended = std::max<std::int64_t>(0, needed - held);
        option.returned = std::min(claim.num_pages(), option.hit_pages) - claim.committed;
        option.cut_to = held;
        if (claim.frozen > first_written) {
            option.cut_to = claim.frozen > needed ? needed : held;
            const std::int64_t end = std::min(claim.frozen, needed);
            option.replaced = end - first_written;
            for (std::int64_t c = first_written; c < end; ++c) {
                const std::int64_t kept = std::max<std::int64_t>(0, option.start - c * page);
                option.replaced -= departures_.is_sole(item(claim.row, c), kept) ? 1 : 0;
            }
            for (std::int64_t c = option.cut_to; c < held; ++c) {
                option.returned += item(claim.row, c).use_count() == 1 ? 1 : 0;
            }
        }
        const std::int64_t evictable = replica.cache.num_evictable(option.at, option.source);
        const std::int64_t free = item(free_, claim.replica) + option.returned;
        option.evicted = std::max<std::int64_t>(0, option.new_pages() - free);
        option.available = free + evictable;
        option.fits = option.evicted <= evictable;
    }

    // Replace shared pages by new pages, from the page of position `start` on.
    OwedCopy replace_frozen(Claim& claim, std::int64_t start) {
        const std::int64_t first = start / config_.page_size;
        OwedCopy owed;
        if (claim.frozen <= first) return owed;
        const std::vector<BlockId> cached = ids_to(claim.at);
        for (std::int64_t c = first; c < std::min(claim.frozen, claim.num_pages()); ++c) {
            Own& page = item(claim.row, c);
            const std::int64_t kept = c == first ? start % config_.page_size : 0;
            if (departures_.is_sole(page, kept)) continue;
            const BlockId source = page != nullptr ? *page : item(cached, c);
            if (kept > 0) {
                owed = {true, source, c, kept};
                if (copies_at_once_ && page != nullptr) departures_.hold_source(page, kept);
            }
            page = new_page(claim.replica);
        }
        claim.frozen = first;
        move_back(claim, first);
        return owed;
    }

    void note_peak(std::int32_t replica) {
        const kvcore::PoolStats now = stats(replica);
        std::int64_t& peak = item(replicas_, replica).metrics.peak_used_pages;
        peak = std::max(peak, now.total_pages - now.available_pages());
    }

    kvcore::CacheConfig config_;
    bool copies_at_once_;
    std::vector<std::int64_t> free_;  // pages of each replica
    std::vector<Replica> replicas_;
    std::unordered_map<std::uint32_t, Claim> claims_;  // by the index of the sequence's handle
    Departures departures_;
    std::uint64_t clock_ = 0;
};

}  // namespace oracle
