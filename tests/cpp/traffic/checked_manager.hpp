// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "kvcore/errors.hpp"
#include "oracle/copy_ledger.hpp"
#include "oracle/oracle.hpp"
#include "oracle/oracle_text.hpp"
#include "oracle/shared_rows.hpp"

/// A CacheManager and its oracle with one set of verbs: each verb calls both and compares their
/// results. `fetch` is in checked_fetch.hpp.
class CheckedManager {
   public:
    using Batch = std::vector<Request*>;

    CheckedManager(const kvcore::CacheConfig& config, bool copies_at_once)
        : config_(config),
          manager_(config),
          oracle_(config, copies_at_once),
          memory_(config),
          copies_(manager_, memory_, copies_at_once) {}

    [[nodiscard]] const kvcore::CacheConfig& config() const { return config_; }
    [[nodiscard]] kvcore::CacheManager& manager() { return manager_; }
    [[nodiscard]] oracle::Oracle& oracle() { return oracle_; }
    [[nodiscard]] SimulatedMemory& memory() { return memory_; }
    [[nodiscard]] CopyLedger& copies() { return copies_; }
    [[nodiscard]] std::int64_t num_calls() const { return num_calls_; }

    void claim(Request& request, std::int32_t replica) {
        begin("claim");
        request.sequence = manager_.claim(replica);
        oracle_.claim(request, replica);
        CHECK_EQ(manager_.replica_of(request.sequence), replica);
    }

    void release(const Request& request) {
        begin("release");
        copies_.forget(request.sequence);
        oracle_.release(request);
        manager_.release(request.sequence);
        CHECK(!manager_.contains(request.sequence));
    }

    /// Fork `parent`: the children start with the tokens that it has written.
    void fork(const Request& parent, const Batch& children) {
        begin("fork");
        std::vector<kvcore::RequestView> views = views_of(children);
        manager_.fork(parent.view(), in_batch(views));
        const std::int64_t written = oracle_.written(parent);
        for (std::int64_t i = 0; i < count(children); ++i) {
            Request& child = *item(children, i);
            child.sequence = item(views, i).sequence;
            child.start = written;
            if (child.active <= written) child.active = child.end();
            CHECK_EQ(item(views, i).start, child.start);
            CHECK_EQ(item(views, i).active, child.active);
            oracle_.fork(parent, child);
            copies_.inherit(parent.sequence, child.sequence, manager_.pages_of(child.sequence));
            check_row(child);
        }
    }

    void truncate(const Request& request, std::int64_t n) {
        begin("truncate");
        if (n > oracle_.most_kept(request)) {
            CHECK_THROWS(std::invalid_argument, manager_.truncate(request.sequence, n));
            return;
        }
        std::vector<BlockId> row = manager_.pages_of(request.sequence);
        manager_.truncate(request.sequence, n);
        oracle_.truncate(request, n);
        row.erase(row.begin(),
                  row.begin() + static_cast<std::ptrdiff_t>(oracle_.claim_of(request).num_pages()));
        copies_.forget(request.sequence, row);
        check_row(request);
    }

    void shared_prefixes(const Batch& batch) {
        begin("shared_prefixes");
        std::vector<kvcore::RequestView> views = views_of(batch);
        std::vector<SharedRows> actual;
        std::int64_t last = INT64_MAX;
        for (const kvcore::SharedPrefix& group : manager_.shared_prefixes(in_batch(views))) {
            CHECK(group.num_tokens <= last);
            last = group.num_tokens;
            actual.push_back({group.replica, group.rows, group.num_tokens});
        }
        std::sort(actual.begin(), actual.end());
        CHECK(actual == find_shared_rows(*this, batch));
    }

    /// Call `plan` and check its result. The caller passes the result to `reserve`.
    kvcore::ReservePlan plan(const Request& request, std::int64_t num_steps) {
        begin("plan");
        const kvcore::ReservePlan plan = manager_.plan(request.view(), num_steps);
        bool expected = false;
        for (const oracle::Option& option : oracle_.options(request, num_steps)) {
            expected = expected || is_as_planned(request, num_steps, plan, option);
        }
        if (!expected) {
            check::fail(__FILE__, __LINE__,
                        "plan answers " + to_text(plan) + ", expected " +
                            to_text(oracle_.options(request, num_steps)));
        }
        return plan;
    }

    /// Return the number of reserved requests of the batch. `plan`: the plan of the first request.
    /// With immediate copies, the call ends before a request that has to evict pages, because the
    /// copies may hold these pages.
    std::int64_t reserve(const Batch& batch, std::int64_t num_steps,
                         const std::optional<kvcore::ReservePlan>& plan) {
        begin("reserve");
        std::vector<kvcore::RequestView> views = views_of(batch);
        if (!can_ever_fit(batch, num_steps)) {
            CHECK_THROWS(kvcore::CapacityError,
                         manager_.reserve_batch(in_batch(views), num_steps, copies_.begin()));
            end_copies();
            return 0;
        }
        const kvcore::BatchReserve result =
            manager_.reserve_batch(in_batch(views), num_steps, copies_.begin());
        const std::int64_t done = result.reserved;
        CHECK_EQ(result.status == kvcore::ReserveStatus::kOk, done == count(batch));
        for (std::int64_t i = 0; i < count(batch); ++i) {
            Request& request = *item(batch, i);
            const std::vector<oracle::Option> options = oracle_.options(request, num_steps);
            const bool waits = copies_.waits() && options.front().evicted > 0;
            CHECK_EQ(waits, i == done && result.status == kvcore::ReserveStatus::kPending);
            if (waits) break;
            const oracle::Option option = explain(request, item(views, i), options, i < done);
            if (i == 0 && plan) CHECK(is_as_planned(request, num_steps, *plan, option));
            if (i == done) break;
            accept(request, item(views, i), option);
        }
        end_copies();
        for (std::int64_t i = 0; i < done; ++i) check_row(*item(batch, i));
        return done;
    }

    void commit(const Batch& batch) {
        begin("commit");
        std::vector<kvcore::RequestView> views = views_of(batch);
        std::vector<kvcore::PageSwap> swaps;
        std::vector<kvcore::PageSwap> expected;
        std::vector<std::vector<BlockId>> rows;
        for (const Request* request : batch) rows.push_back(manager_.pages_of(request->sequence));
        manager_.commit(in_batch(views), swaps);
        for (std::int64_t i = 0; i < count(batch); ++i) {
            oracle_.commit(*item(batch, i), static_cast<std::int32_t>(i), item(rows, i), expected);
            CHECK_EQ(manager_.pages_of(item(batch, i)->sequence), item(rows, i));
        }
        CHECK_EQ(swaps.size(), expected.size());
        for (std::size_t i = 0; i < swaps.size(); ++i) {
            CHECK_EQ(swaps[i].row, expected[i].row);
            CHECK_EQ(swaps[i].column, expected[i].column);
            CHECK_EQ(swaps[i].page, expected[i].page);
        }
    }

    void match(std::int32_t replica, const Request& request, std::int64_t n) {
        begin("match");
        std::vector<BlockId> pages;
        const std::int64_t depth =
            manager_.match(replica, request.name_space(), request.tokens().data(), n, &pages);
        CHECK_EQ(depth, oracle::depth_of(oracle_.match(replica, request, n)));
        CHECK_EQ(pages, oracle::ids_to(oracle_.match(replica, request, n)));
        CHECK_EQ(manager_.recommend_replica(request.name_space(), request.tokens().data(), n),
                 oracle_.recommend(request, n));
    }

    struct Pin {
        kvcore::PinHandle handle;
        oracle::CachedPage* page = nullptr;
    };
    Pin pin(std::int32_t replica, const Request& request, std::int64_t n) {
        begin("pin");
        Pin pin{manager_.pin(replica, request.name_space(), request.tokens().data(), n),
                oracle_.match(replica, request, n)};
        CHECK_EQ(pin.handle.num_tokens, oracle::depth_of(pin.page) * config_.page_size);
        oracle_.pin(replica, pin.page);
        return pin;
    }
    void unpin(const Pin& pin) {
        begin("unpin");
        manager_.unpin(pin.handle);
        oracle_.let_go(pin.page);
        CHECK_THROWS(kvcore::InvalidHandleError, manager_.unpin(pin.handle));
    }

    /// Reset only if all pages are available: a page that is held across a reset is no longer
    /// found.
    void reset() {
        for (std::int32_t i = 0; i < config_.num_replicas; ++i) {
            const kvcore::PoolStats stats = manager_.stats(i);
            if (stats.num_sequences > 0 || stats.available_pages() < stats.total_pages) return;
        }
        begin("reset");
        manager_.reset_prefix_cache();
        oracle_.reset();
    }
    void reset_metrics() {
        begin("reset_metrics");
        manager_.reset_metrics();
        oracle_.reset_metrics();
    }

    // ---- comparing ----------------------------------------
    void compare() {
        for (std::int32_t i = 0; i < config_.num_replicas; ++i) {
            const kvcore::PoolStats actual = manager_.stats(i);
            const kvcore::PoolStats expected = oracle_.stats(i);
            CHECK_EQ(actual.free_pages, expected.free_pages);
            CHECK_EQ(actual.cached_pages, expected.cached_pages);
            CHECK_EQ(actual.evictable_pages, expected.evictable_pages);
            CHECK_EQ(actual.num_sequences, expected.num_sequences);
        }
        const kvcore::Metrics actual = manager_.metrics();
        const kvcore::Metrics expected = oracle_.metrics();
        CHECK_EQ(actual.input_tokens, expected.input_tokens);
        CHECK_EQ(actual.cache_tokens, expected.cache_tokens);
        CHECK_EQ(actual.copied_tokens, expected.copied_tokens);
        CHECK_EQ(actual.evicted_pages, expected.evicted_pages);
        // During an immediate copy, the page is also held.
        CHECK(actual.peak_used_pages >= expected.peak_used_pages);
        if (!copies_.at_once()) CHECK_EQ(actual.peak_used_pages, expected.peak_used_pages);
    }

    /// Check the laws of the manager: the same pages are cached, with the content of their
    /// prefixes.
    void check_integrity() {
        manager_.check_integrity();
        oracle_.for_each_page([this](std::int32_t replica, const oracle::CachedPage& page) {
            const Digest* slots = memory_.page(replica, page.id);
            Digest digest = page.before;
            for (std::int64_t i = 0; i < config_.page_size; ++i) {
                digest = digest_after(digest, item(page.tokens, i));
                CHECK_EQ(slots[i], digest);
            }
            if (page.children == 0) check_is_cached(replica, page);
        });
    }
    void check_is_cached(std::int32_t replica, const oracle::CachedPage& page) {
        const std::vector<TokenId> tokens = oracle::tokens_to(&page);
        std::vector<BlockId> ids;
        CHECK_EQ(manager_.match(replica, page.name_space, tokens.data(), count(tokens), &ids),
                 page.depth);
        CHECK_EQ(ids, oracle::ids_to(&page));
    }

    /// Check that a request has exactly the pages of its claim, shared with the same requests.
    void check_row(const Request& request) {
        const oracle::Claim& claim = oracle_.claim_of(request);
        const std::vector<BlockId> row = manager_.pages_of(request.sequence);
        CHECK_EQ(row.size(), claim.num_pages());
        const std::vector<BlockId> cached = oracle::ids_to(claim.at);
        CHECK_EQ(cached.size(), claim.committed);
        for (std::int64_t column = 0; column < claim.num_pages(); ++column) {
            const oracle::Own& own = item(claim.row, column);
            CHECK_EQ(item(row, column), own != nullptr ? *own : item(cached, column));
            if (own != nullptr && column < claim.committed) CHECK(*own != item(cached, column));
        }
    }

   protected:
    void begin(const char* verb) {
        ++num_calls_;
        check::verb = verb;
    }
    void end_copies() {
        copies_.end();
        oracle_.finish_copies();
    }
    static std::vector<kvcore::RequestView> views_of(const Batch& batch) {
        std::vector<kvcore::RequestView> views;
        for (const Request* request : batch) views.push_back(request->view());
        return views;
    }
    /// Return the views as an array or, in every second call, as pointers.
    kvcore::RequestBatch in_batch(std::vector<kvcore::RequestView>& views) {
        if (num_calls_ % 2 == 0) return {views.data(), count(views)};
        rows_.clear();
        for (kvcore::RequestView& view : views) rows_.push_back(&view);
        return {rows_.data(), count(rows_)};
    }
    [[nodiscard]] bool can_ever_fit(const Batch& batch, std::int64_t num_steps) const {
        bool fits = true;
        for (const Request* request : batch) {
            fits = fits && oracle_.can_ever_fit(*request, num_steps);
        }
        return fits;
    }
    /// Return the option that matches the manager's action. If several pages are possible copy
    /// sources, the owed copy determines the source.
    oracle::Option explain(const Request& request, const kvcore::RequestView& view,
                           const std::vector<oracle::Option>& options, bool fits) {
        for (const oracle::Option& option : options) {
            bool is_it = option.fits == fits;
            if (is_it && fits) is_it = option.start == view.start && option.active == view.active;
            if (is_it && fits && options.size() > 1 && option.source != nullptr) {
                const kvcore::PageMove* copy = copies_.find(request.sequence);
                is_it = copy != nullptr && copy->source == option.source->id;
            }
            if (is_it) return option;
        }
        check::fail(__FILE__, __LINE__,
                    "the manager says fits " + check::text(fits) + ", start " +
                        std::to_string(view.start) + ", active " + std::to_string(view.active) +
                        "; the oracle " + to_text(options));
    }

    /// The manager took this option: apply it to the oracle and advance the request.
    void accept(Request& request, const kvcore::RequestView& view, const oracle::Option& option) {
        const oracle::OwedCopy owed = oracle_.apply(request, option);
        request.start = view.start;
        request.active = view.active;
        const std::vector<BlockId> row = manager_.pages_of(request.sequence);
        oracle_.learn(request, row);
        if (!owed.is_owed) return;
        kvcore::PageMove copy;
        copy.replica = oracle_.claim_of(request).replica;
        copy.source = owed.source;
        copy.destination = item(row, owed.column);
        copy.num_tokens = static_cast<std::int32_t>(owed.tokens);
        copy.sequence = request.sequence;
        copies_.expect(copy);
    }

    [[nodiscard]] bool is_as_planned(const Request& request, std::int64_t num_steps,
                                     const kvcore::ReservePlan& plan,
                                     const oracle::Option& option) const {
        const bool fits = option.fits && oracle_.can_ever_fit(request, num_steps);
        if (!fits || !plan.fits) return fits == plan.fits;
        const std::int64_t had = oracle_.claim_of(request).hit_tokens;
        return plan.hit_tokens == option.hit_tokens - had && plan.new_pages == option.new_pages() &&
               plan.evicted_pages == option.evicted && plan.copied_tokens == option.copied;
    }

    kvcore::CacheConfig config_;
    kvcore::CacheManager manager_;
    oracle::Oracle oracle_;
    SimulatedMemory memory_;
    CopyLedger copies_;
    std::vector<kvcore::RequestView*> rows_;
    std::int64_t num_calls_ = 0;
};
