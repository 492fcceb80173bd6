// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "traffic/checked_manager.hpp"

/// A CheckedManager with `fetch`, which reserves for several requests at once and fills tables.
class CheckedEngine : public CheckedManager {
   public:
    static constexpr std::int64_t kMaxRows = 8;
    static constexpr std::size_t kTableSets = 2;  // as if two fetches were in flight

    CheckedEngine(const kvcore::CacheConfig& config, bool copies_at_once)
        : CheckedManager(config, copies_at_once),
          stride_(kvcore::ceil_div(config.max_seq_len, config.page_size)),
          no_page_(static_cast<std::uint32_t>(config.num_pages)) {
        const std::size_t cells = static_cast<std::size_t>(kMaxRows * stride_);
        for (std::size_t i = 0; i < kTableSets * static_cast<std::size_t>(config.num_replicas);
             ++i) {
            tables_.push_back(std::make_unique<Table>(cells, stride_, no_page_));
        }
    }

    /// Fetch a batch; check its pages, its tables, and the contents up to `start`. Return false if
    /// the pages do not fit. `set`: the number of the tables to fill. `too_small`: offer smaller
    /// tables first.
    bool fetch(const Batch& batch, std::int64_t num_steps, std::size_t set, bool too_small) {
        begin("fetch");
        std::vector<kvcore::RequestView> views = views_of(batch);
        std::vector<kvcore::FetchTarget> targets = targets_of(set);
        if (!can_ever_fit(batch, num_steps)) {
            CHECK_THROWS(kvcore::CapacityError, manager_.fetch(in_batch(views), num_steps,
                                                               targets.data(), copies_.begin()));
            end_copies();
            return false;
        }
        std::vector<kvcore::FetchTarget> none(targets.size());
        kvcore::FetchTarget* first = too_small ? none.data() : targets.data();
        kvcore::FetchResult result =
            manager_.fetch(in_batch(views), num_steps, first, copies_.begin());
        const bool fits = accept_missing(batch, views, num_steps, result);
        const bool waits = copies_.waits();
        end_copies();
        if (!fits) return false;
        const auto again = [&](kvcore::FetchTarget* to) {
            result = manager_.fetch(in_batch(views), num_steps, to, copies_.begin());
            end_copies();
        };
        CHECK_EQ(waits, result.status == kvcore::FetchStatus::kPending);
        if (waits) again(first);
        if (too_small) {
            CHECK_EQ(result.status, kvcore::FetchStatus::kGrow);
            again(targets.data());
        }
        CHECK_EQ(result.status, kvcore::FetchStatus::kOk);
        copies_.do_copies();
        for (const Request* request : batch) oracle_.seal(*request);
        check_targets(batch, targets);
        return true;
    }

    /// One step of the model: write positions start .. active - 1 of each request.
    void run(const Batch& batch) {
        for (const Request* request : batch) {
            memory_.write(oracle_.claim_of(*request).replica, manager_.pages_of(request->sequence),
                          *request, request->start, request->active);
        }
    }

   private:
    struct Table {
        Table(std::size_t cells, std::int64_t stride, std::uint32_t no_page)
            : pages(cells, 0xdeadbeef),
              lengths(static_cast<std::size_t>(kMaxRows)),
              table(pages.data(), kMaxRows, stride, no_page) {}
        std::vector<std::uint32_t> pages;
        std::vector<std::uint32_t> lengths;
        kvcore::LookupTable table;
    };

    Table& table(std::size_t set, std::int32_t replica) {
        return *tables_[set * static_cast<std::size_t>(config_.num_replicas) +
                        static_cast<std::size_t>(replica)];
    }
    std::vector<kvcore::FetchTarget> targets_of(std::size_t set) {
        std::vector<kvcore::FetchTarget> targets(static_cast<std::size_t>(config_.num_replicas));
        for (std::int32_t i = 0; i < config_.num_replicas; ++i) {
            item(targets, i).table = &table(set, i).table;
            item(targets, i).cache_lengths = table(set, i).lengths.data();
        }
        last_set_ = set;
        return targets;
    }

    bool accept_missing(const Batch& batch, const std::vector<kvcore::RequestView>& views,
                        std::int64_t num_steps, const kvcore::FetchResult& result) {
        std::vector<std::int64_t> missing;
        for (std::int64_t i = 0; i < count(batch); ++i) {
            if (!oracle_.is_reserved(*item(batch, i), num_steps)) {
                missing.push_back(i);
            } else {
                CHECK_EQ(item(views, i).start, item(batch, i)->start);
                CHECK_EQ(item(views, i).active, item(batch, i)->active);
            }
        }
        const bool fits = result.status != kvcore::FetchStatus::kNoSpace;
        if (missing.size() == 1) {
            Request& request = *item(batch, missing[0]);
            const kvcore::RequestView& view = item(views, missing[0]);
            const oracle::Option option =
                explain(request, view, oracle_.options(request, num_steps), fits);
            if (fits) accept(request, view, option);
            if (!fits) check_refusal(result, missing[0], option.new_pages(), option.available);
            return fits;
        }
        // Compute all options against the state before the call.
        std::vector<std::vector<oracle::Option>> options;
        for (const std::int64_t row : missing) {
            options.push_back(oracle_.options(*item(batch, row), num_steps));
            oracle_.note_leaving(*item(batch, row), options.back().front());
        }
        oracle_.forget_leaving();
        if (must_evict(batch, missing, options)) {
            return accept_evicting(batch, views, missing, num_steps, result);
        }
        CHECK(fits);
        for (const auto& each : options) oracle::hold(hit_of(each.front()));
        for (const std::size_t k : order_of(batch, missing)) {
            Request& request = *item(batch, missing[k]);
            const kvcore::RequestView& view = item(views, missing[k]);
            for (oracle::Option& option : options[k]) option.fits = true;
            accept(request, view, explain(request, view, options[k], true));
        }
        for (const auto& each : options) oracle::drop(hit_of(each.front()));
        return true;
    }

    // The order in which the rows of a fetch get their pages: rows that only grow are last.
    std::vector<std::size_t> order_of(const Batch& batch,
                                      const std::vector<std::int64_t>& rows) const {
        std::vector<std::size_t> order;
        for (const bool growing : {false, true}) {
            for (std::size_t k = 0; k < rows.size(); ++k) {
                const Request& request = *item(batch, rows[k]);
                const oracle::Claim& claim = oracle_.claim_of(request);
                const bool grows = oracle::only_grows(claim, request.start, config_.page_size);
                if (grows == growing) order.push_back(k);
            }
        }
        return order;
    }

    // A fetch holds all hits before it takes the first one.
    static oracle::CachedPage* hit_of(const oracle::Option& option) {
        return option.takes_hit ? option.at : nullptr;
    }

    // Return true if the free pages are not enough.
    bool must_evict(const Batch& batch, const std::vector<std::int64_t>& rows,
                    const std::vector<std::vector<oracle::Option>>& options) const {
        std::vector<std::int64_t> free;
        for (std::int32_t i = 0; i < config_.num_replicas; ++i) {
            free.push_back(oracle_.stats(i).free_pages);
        }
        bool evicts = false;
        for (std::size_t k = 0; k < rows.size(); ++k) {
            const oracle::Option& option = options[k].front();
            std::int64_t& left = item(free, oracle_.claim_of(*item(batch, rows[k])).replica);
            left -= option.new_pages() - option.returned;
            evicts = evicts || left < 0;
        }
        return evicts;
    }

    // For several requests, the call must evict pages: it drops partial hits and keeps the pages of
    // every whole hit.
    bool accept_evicting(const Batch& batch, const std::vector<kvcore::RequestView>& views,
                         const std::vector<std::int64_t>& rows, std::int64_t num_steps,
                         const kvcore::FetchResult& result) {
        std::vector<oracle::Option> options;
        for (const std::int64_t i : rows) {
            options.push_back(oracle_.options(*item(batch, i), num_steps, false).front());
            oracle_.note_leaving(*item(batch, i), options.back());
        }
        oracle_.forget_leaving();
        for (const oracle::Option& option : options) oracle::hold(hit_of(option));
        std::vector<std::int64_t> left;
        for (std::int32_t i = 0; i < config_.num_replicas; ++i) {
            left.push_back(oracle_.stats(i).available_pages());
        }
        bool fits = true;
        for (std::size_t k = 0; fits && k < rows.size(); ++k) {
            const Request& request = *item(batch, rows[k]);
            std::int64_t& available = item(left, oracle_.claim_of(request).replica);
            const std::int64_t needed = options[k].new_pages() - options[k].returned;
            fits = needed <= available;
            if (!fits) check_refusal(result, rows[k], needed, available);
            available -= needed;
        }
        for (const std::size_t k : order_of(batch, rows)) {
            if (!fits) break;
            Request& request = *item(batch, rows[k]);
            const kvcore::RequestView& view = item(views, rows[k]);
            options[k].fits = true;
            accept(request, view, explain(request, view, {options[k]}, true));
        }
        for (const oracle::Option& option : options) oracle::drop(hit_of(option));
        return fits;
    }

    static void check_refusal(const kvcore::FetchResult& result, std::int64_t row,
                              std::int64_t needed, std::int64_t available) {
        CHECK_EQ(result.status, kvcore::FetchStatus::kNoSpace);
        CHECK_EQ(result.row, row);
        CHECK_EQ(result.needed, needed);
        CHECK_EQ(result.available, available);
    }

    void check_targets(const Batch& batch, const std::vector<kvcore::FetchTarget>& targets) {
        for (std::int32_t replica = 0; replica < config_.num_replicas; ++replica) {
            const kvcore::FetchTarget& target = item(targets, replica);
            std::int64_t rows = 0;
            std::int64_t width = 0;
            std::int64_t longest_new = 0;
            std::int64_t longest_active = 0;
            for (const Request* request : batch) {
                if (oracle_.claim_of(*request).replica != replica) continue;
                check_row_of_table(replica, rows++, target.width, *request);
                width = std::max(width, oracle_.claim_of(*request).num_pages());
                longest_new = std::max(longest_new, request->active - request->start);
                longest_active = std::max(longest_active, request->active);
            }
            CHECK_EQ(target.rows, rows);
            CHECK_EQ(target.width, width);
            CHECK_EQ(target.longest_new, longest_new);
            CHECK_EQ(target.longest_active, longest_active);
        }
    }

    void check_row_of_table(std::int32_t replica, std::int64_t row, std::int64_t width,
                            const Request& request) {
        const Table& filled = table(last_set_, replica);
        CHECK_EQ(item(filled.lengths, row), request.start);
        const std::vector<BlockId> pages = manager_.pages_of(request.sequence);
        for (std::int64_t column = 0; column < width; ++column) {
            const std::uint32_t expected =
                column < count(pages) ? static_cast<std::uint32_t>(item(pages, column)) : no_page_;
            CHECK_EQ(item(filled.pages, row * stride_ + column), expected);
        }
        check_row(request);
        memory_.check_contents(replica, pages, request, request.start);
    }

    std::int64_t stride_;
    std::uint32_t no_page_;
    std::size_t last_set_ = 0;
    std::vector<std::unique_ptr<Table>> tables_;
};
