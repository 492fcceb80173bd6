// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/eviction.hpp"
#include "support/check.hpp"
#include "support/request.hpp"

/// A CacheManager with groups, and the memory of its pages: the content that a bundle's layers
/// write for a position represents the tokens up to it. Running a request checks that every page
/// that it may read is present, and that no other page is.
class GroupScene {
   public:
    static constexpr std::uint32_t kUnassigned = ~0U;
    static constexpr std::int64_t kRows = 16;

    explicit GroupScene(const kvcore::CacheConfig& config, kvcore::EvictionOrder order = {})
        : manager(config, [=] { return kvcore::make_policy({order}, config.page_size); }) {
        const kvcore::CacheConfig& given = manager.config();
        for (const kvcore::CacheGroup& group : given.groups) {
            kvcore::CacheGroup rule = group;
            if (rule.page_size == 0) rule.page_size = given.page_size;
            for (std::int32_t b = 0; b < group.num_bundles; ++b) bundles.push_back(rule);
        }
        stride_ = kvcore::ceil_div(given.max_seq_len, 1) + 64;
        lengths_.resize(static_cast<std::size_t>(kRows));
        memory_.resize(static_cast<std::size_t>(given.num_pages * given.page_size));
        for (std::size_t b = 0; b < bundles.size(); ++b) {
            cells_.emplace_back(static_cast<std::size_t>(kRows * stride_));
            tables_.push_back(std::make_unique<kvcore::LookupTable>(cells_.back().data(), kRows,
                                                                    stride_, kUnassigned));
            if (b > 0) more_.push_back(tables_.back().get());
        }
    }
    ~GroupScene() { manager.check_integrity(); }
    GroupScene(const GroupScene&) = delete;
    GroupScene& operator=(const GroupScene&) = delete;

    static kvcore::CacheConfig config(std::int32_t page_size, std::int64_t num_pages,
                                      std::vector<kvcore::CacheGroup> groups) {
        kvcore::CacheConfig config;
        config.page_size = page_size;
        config.num_pages = num_pages;
        config.max_sequences = kRows;
        config.max_seq_len = 2000;
        config.groups = std::move(groups);
        return config;
    }

    kvcore::CacheManager manager;
    std::vector<kvcore::CacheGroup> bundles;  // group of each bundle
    std::vector<kvcore::PageSwap> swaps;      // of the last step
    std::int64_t num_checked = 0;             // positions that were read

    Request claim(const std::vector<TokenId>& tokens, const std::string& name = "") {
        Request request(name, tokens);
        request.sequence = manager.claim();
        return request;
    }
    /// `transfers`: the caller copies and finishes them; without `transfers`, copies are made at
    /// once.
    kvcore::ReserveStatus reserve(Request& request, std::int64_t num_steps = 1,
                                  kvcore::Transfers* transfers = nullptr) {
        kvcore::RequestView view = request.view();
        const kvcore::ReserveStatus status = manager.reserve(view, num_steps, transfers);
        request.start = view.start;
        request.active = view.active;
        if (transfers == nullptr) copy();
        return status;
    }
    /// Make the copies of `transfers`, or report that they failed.
    void finish(const kvcore::Transfers& transfers, bool done = true) {
        if (transfers.empty()) return;
        if (done) copy(transfers.copies);
        manager.finish(transfers.ticket, done);
    }
    /// Make the owed copies of a request that no other caller is making.
    void settle(const Request& request) {
        kvcore::Transfers transfers;
        if (manager.take_owed(request.sequence, transfers) == kvcore::OwedStatus::kTaken) {
            finish(transfers);
        }
    }
    /// Fetch a batch and, if it fits, run it up to each active end. `copies_at_once`: use
    /// transfers.
    bool run(const std::vector<Request*>& batch, bool copies_at_once = false) {
        std::vector<kvcore::RequestView> views = views_of(batch);
        kvcore::FetchTarget target;
        target.table = tables_[0].get();
        target.more = more_.data();
        target.cache_lengths = lengths_.data();
        const auto n = static_cast<std::int64_t>(views.size());
        kvcore::FetchResult result;
        do {
            kvcore::Transfers transfers;
            result =
                manager.fetch({views.data(), n}, 1, &target, copies_at_once ? &transfers : nullptr);
            finish(transfers);
            if (transfers.empty() && result.status == kvcore::FetchStatus::kPending) {
                settle(*batch[static_cast<std::size_t>(result.row)]);
            }
        } while (result.status == kvcore::FetchStatus::kPending);
        if (result.status == kvcore::FetchStatus::kNoSpace) return false;
        CHECK_EQ(result.status, kvcore::FetchStatus::kOk);
        copy();
        for (std::size_t i = 0; i < batch.size(); ++i) {
            batch[i]->start = views[i].start;
            batch[i]->active = views[i].active;
            for (std::size_t b = 0; b < bundles.size(); ++b) {
                read(*batch[i], b, static_cast<std::int64_t>(i));
            }
        }
        for (std::size_t i = 0; i < batch.size(); ++i) {
            for (std::size_t b = 0; b < bundles.size(); ++b) {
                write(*batch[i], b, static_cast<std::int64_t>(i));
            }
        }
        return true;
    }
    /// Finish a model step: the positions are written, and the last one samples a token.
    void step(const std::vector<Request*>& batch, TokenId next) {
        for (Request* request : batch) {
            request->start = request->active;
            if (request->start == request->end()) request->append(next);
            request->active = request->end();
        }
        commit(batch);
    }
    void commit(const std::vector<Request*>& batch) {
        std::vector<kvcore::RequestView> views = views_of(batch);
        manager.commit({views.data(), static_cast<std::int64_t>(views.size())}, swaps);
    }
    /// Run a request in chunks; the last sampled token is not run.
    void complete(Request& request, std::int64_t chunk = 1 << 20) {
        const std::int64_t end = request.end();
        while (request.start < end) {
            request.active = std::min(end, request.start + chunk);
            CHECK(run({&request}));
            step({&request}, 7);
            if (request.start < end) request.active = end;
        }
    }
    /// Leave a prompt in the cache.
    void put(const std::vector<TokenId>& tokens, std::int64_t chunk = 1 << 20) {
        Request request = claim(tokens);
        complete(request, chunk);
        manager.release(request.sequence);
    }
    std::int64_t match(const std::vector<TokenId>& tokens) {
        return manager.match(0, "", tokens.data(), count(tokens)) * manager.config().page_size;
    }
    /// The number of entries of a bundle that have a page.
    std::int64_t live(const Request& request, std::int32_t bundle) {
        const std::vector<BlockId> pages = manager.pages_of(request.sequence, bundle);
        return std::count_if(pages.begin(), pages.end(), [](BlockId page) { return page >= 0; });
    }
    std::int64_t used() {
        const kvcore::PoolStats stats = manager.stats(0);
        return stats.total_pages - stats.available_pages();
    }
    /// Apply the copies that are due to the memory.
    void copy() { copy(manager.take_copies()); }
    void copy(const std::vector<kvcore::PageMove>& moves) {
        for (const kvcore::PageMove& move : moves) {
            for (std::int32_t t = 0; t < move.num_tokens; ++t) {
                slot(move.destination, t) = slot(move.source, t);
            }
        }
    }

   private:
    static std::vector<kvcore::RequestView> views_of(const std::vector<Request*>& batch) {
        std::vector<kvcore::RequestView> views;
        for (const Request* request : batch) views.push_back(request->view());
        return views;
    }
    Digest& slot(std::int64_t page, std::int64_t token) {
        return item(memory_, page * manager.config().page_size + token);
    }
    [[nodiscard]] std::uint32_t cell(std::size_t bundle, std::int64_t row,
                                     std::int64_t column) const {
        return item(cells_[bundle], row * stride_ + column);
    }
    static Digest content(const Request& request, std::int64_t position, std::size_t bundle) {
        return scramble(request.digest(position + 1) + bundle);
    }
    void read(const Request& request, std::size_t bundle, std::int64_t row) {
        const kvcore::CacheGroup& rule = bundles[bundle];
        const std::int64_t page_size = rule.page_size;
        const std::int64_t first = rule.skipped_tokens(request.start);
        for (std::int64_t p = first; p < request.start; ++p) {
            const std::uint32_t page = cell(bundle, row, p / page_size);
            CHECK(page != kUnassigned);
            CHECK_EQ(slot(page, p % page_size), content(request, p, bundle));
            ++num_checked;
        }
        // Columns that no layer may read have no page in the table.
        const std::int64_t drafts = manager.config().max_draft_tokens;
        const std::int64_t column = manager.config().page_size;
        const std::int64_t kept =
            rule.skipped_tokens(std::max<std::int64_t>(0, request.start - drafts));
        for (std::int64_t c = 0; c < kept / column * column / page_size; ++c) {
            if (drafts == 0) CHECK_EQ(cell(bundle, row, c), kUnassigned);
        }
    }
    void write(const Request& request, std::size_t bundle, std::int64_t row) {
        const std::int64_t page_size = bundles[bundle].page_size;
        for (std::int64_t p = request.start; p < request.active; ++p) {
            const std::uint32_t page = cell(bundle, row, p / page_size);
            CHECK(page != kUnassigned);
            slot(page, p % page_size) = content(request, p, bundle);
        }
    }

    std::int64_t stride_ = 0;
    std::vector<std::uint32_t> lengths_;
    std::vector<Digest> memory_;  // [pages, page_size]
    std::vector<std::vector<std::uint32_t>> cells_;
    std::vector<std::unique_ptr<kvcore::LookupTable>> tables_;
    std::vector<kvcore::LookupTable*> more_;
};
