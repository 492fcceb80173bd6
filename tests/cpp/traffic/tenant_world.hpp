// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvcore/cache_manager.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/request.hpp"
#include "oracle/tenant_oracle.hpp"
#include "support/random.hpp"
#include "support/request.hpp"

/// Random traffic of several tenants, while other calls hold pages by their ids, pin and forget
/// prefixes, and export and import columns. After every call the world counts each tenant's held
/// pages from scratch. No tenant is above its ceiling, and every reservation can be filled. A page
/// changes its owner only if it was not held before, and a held page is never handed out.
class TenantWorld {
   public:
    TenantWorld(const kvcore::CacheConfig& config, bool copies_later, std::uint64_t seed)
        : manager_(config), random_(seed), copies_later_(copies_later) {
        live_.reserve(16);  // rows of a batch must not move while others are forked
        for (int i = 0; i < 4; ++i) prompts_.push_back(tokens(random_.between(1, 40)));
    }

    void operate() {
        const std::int64_t verb = random_.below(120);
        verb_ = verb;
        try {
            act(verb);
            check_state();
        } catch (const std::exception& error) {
            check::fail(__FILE__, __LINE__,
                        std::string(error.what()) + ", after verb " + std::to_string(verb));
        }
    }
    [[nodiscard]] const kvcore::CacheManager& manager() const { return manager_; }
    std::int64_t num_fits = 0;
    std::int64_t num_refused = 0;
    std::int64_t num_held = 0;      // calls of `hold`
    std::int64_t num_imported = 0;  // imports that were published
    // Pages that another tenant took over.
    [[nodiscard]] std::int64_t num_given() const { return oracle_.num_given; }
    void end() {
        hit_.reset();
        holds_.clear();
        imports_.clear();
        exports_.clear();
        while (!open_.empty()) finish();
        while (!live_.empty()) drop(live_.back());
        while (!pins_.empty()) unpin();
        check_state();
        for (std::int32_t r = 0; r < config().num_replicas; ++r) {
            for (const kvcore::TenantStats& stats : manager_.tenant_stats(r)) {
                CHECK_EQ(stats.held_pages, 0);
            }
        }
    }

   private:
    struct Row {
        Request request;
        std::int32_t replica;
        std::int32_t tenant;  // -1: no tenant
    };
    static constexpr std::int64_t kRows = 16;
    static constexpr std::int64_t kMostRounds = 100;  // of a fetch that waits for stores
    /// Tables with room for all rows, of each bundle and replica.
    class Tables {
       public:
        Tables(std::int32_t num_replicas, std::int32_t num_bundles)
            : cells_(static_cast<std::size_t>(num_bundles) * kRows * kColumns), lengths_(kRows) {
            for (std::int32_t r = 0; r < num_replicas; ++r) {
                kvcore::FetchTarget target;
                more_.emplace_back();
                for (std::int32_t b = 0; b < num_bundles; ++b) {
                    tables_.push_back(std::make_unique<kvcore::LookupTable>(
                        cells_.data() + std::ptrdiff_t{b} * kRows * kColumns, kRows, kColumns,
                        ~0U));
                    if (b > 0) more_.back().push_back(tables_.back().get());
                    if (b == 0) target.table = tables_.back().get();
                }
                target.more = more_.back().data();
                target.cache_lengths = lengths_.data();
                targets.push_back(target);
            }
        }
        std::vector<kvcore::FetchTarget> targets;

       private:
        static constexpr std::int64_t kColumns = 512;

        std::vector<std::uint32_t> cells_;
        std::vector<std::uint32_t> lengths_;
        std::vector<std::unique_ptr<kvcore::LookupTable>> tables_;
        std::vector<std::vector<kvcore::LookupTable*>> more_;
    };

    void act(std::int64_t verb) {
        if (verb < 18) return claim();
        if (verb < 42) return step();
        if (verb < 50) return release();
        if (verb < 56) return fork();
        if (verb < 61) return truncate();
        if (verb < 65) return pin();
        if (verb < 68) return unpin();
        if (verb < 71) return hold();
        if (verb < 74) return allocate();
        if (verb < 75) return static_cast<void>(manager_.reset_prefix_cache());
        if (verb < 79) return finish();
        if (verb < 81) return begin_again();
        if (verb < 100) return reserve_any();
        if (verb < 105) return hold_pages();
        if (verb < 108) return drop_one(holds_);
        if (verb < 112) return begin_import();
        if (verb < 115) return end_import();
        if (verb < 117) return begin_export();
        if (verb < 119) return drop_one(exports_);
        forget();
    }
    void reserve_any() {
        if (!live_.empty()) reserve(random_.pick(live_));
    }

    [[nodiscard]] const kvcore::CacheConfig& config() const { return manager_.config(); }
    [[nodiscard]] bool is_plain() const {
        return kvcore::CacheManagerProbe::grouping(manager_).is_plain();
    }
    std::vector<TokenId> tokens(std::int64_t n) {
        std::vector<TokenId> tokens;
        while (count(tokens) < n) tokens.push_back(static_cast<TokenId>(random_.below(2)));
        return tokens;
    }
    std::vector<TokenId> prompt() {
        std::vector<TokenId> prompt = random_.pick(prompts_);
        prompt.resize(static_cast<std::size_t>(random_.between(1, count(prompt))));
        for (const TokenId token : tokens(random_.below(10))) prompt.push_back(token);
        return prompt;
    }
    std::int32_t any_tenant() {
        return static_cast<std::int32_t>(random_.below(count(config().quotas) + 1)) - 1;
    }
    void tell(Row& row, std::int32_t tenant) {
        kvcore::RequestPriority terms;
        terms.tenant = row.tenant = tenant;
        manager_.set_priority(row.request.sequence, terms);
    }
    void claim() {
        if (live_.size() >= 6) return release();
        const auto replica = static_cast<std::int32_t>(random_.below(config().num_replicas));
        live_.push_back({Request(random_.chance(10) ? "other" : "", prompt()), replica, -1});
        Row& row = live_.back();
        row.request.sequence = manager_.claim(replica);
        if (random_.chance(90)) tell(row, any_tenant());
        if (random_.chance(40)) {
            row.request.active = random_.between(row.request.start + 1, row.request.end());
        }
    }

    [[nodiscard]] kvcore::TenantStats stats(const Row& row) const {
        if (row.tenant < 0) return {};
        return item(manager_.tenant_stats(row.replica), row.tenant);
    }
    // A request within its tenant's reservation, or without other requests, is never refused.
    void check_refusal(const Row& row, std::int64_t steps, const kvcore::TenantStats& before) {
        const std::int64_t lanes =
            std::max(1, kvcore::CacheManagerProbe::grouping(manager_).num_lanes());
        const std::int64_t pages =
            kvcore::ceil_div(row.request.end() + steps - 1, config().page_size) * lanes;
        CHECK(before.held_pages + pages > before.reserved_pages);
        const bool is_alone = live_.size() == 1 && pins_.empty() && open_.empty() && !hit_ &&
                              holds_.empty() && imports_.empty() && exports_.empty();
        CHECK(!is_alone || steps > 1 || !is_plain());
    }
    void reserve(Row& row) {
        const std::int64_t steps = random_.chance(80) ? 1 : random_.between(2, 5);
        kvcore::RequestView view = row.request.view();
        if (random_.chance(20)) view.reserve_to = random_.between(0, view.end);
        const kvcore::TenantStats before = stats(row);
        kvcore::Transfers transfers;
        const kvcore::ReservePlan plan = manager_.plan(view, steps);
        try {
            const kvcore::ReserveStatus status =
                manager_.reserve(view, steps, copies_later_ ? &transfers : nullptr);
            if (status == kvcore::ReserveStatus::kPending) return settle(transfers);
            CHECK_EQ(plan.fits, status == kvcore::ReserveStatus::kOk);
            if (!plan.fits) {
                ++num_refused;
                CHECK_EQ(stats(row).held_pages, before.held_pages);
                return check_refusal(row, steps, before);
            }
            ++num_fits;
            row.request.start = view.start;
            row.request.active = view.active;
            settle(transfers);
        } catch (const kvcore::CapacityError&) {
            CHECK(!plan.fits);
            drop(row);
        }
    }
    void settle(const kvcore::Transfers& transfers) {
        if (!copies_later_) return static_cast<void>(manager_.take_copies());
        if (!transfers.empty()) open_.push_back(transfers);
    }

    // Run some rows.
    void step() {
        while (!open_.empty()) finish(100);
        std::vector<Row*> batch;
        for (Row& row : live_) {
            take_owed(row);
            if (random_.chance(60)) batch.push_back(&row);
        }
        if (batch.empty()) return;
        check_state();
        if (!fetch(batch)) return release();
        check::verb = "fetch ";
        check_state();
        check::verb = "";
        std::vector<kvcore::RequestView> views;
        for (Row* row : batch) {
            Request& request = row->request;
            request.start = request.active;
            if (request.start == request.end()) {
                request.append(static_cast<TokenId>(random_.below(2)));
            }
            request.active = random_.chance(40) ? random_.between(request.start + 1, request.end())
                                                : request.end();
            views.push_back(request.view());
        }
        std::vector<kvcore::PageSwap> swaps;
        kvcore::Transfers stores;
        manager_.commit({views.data(), count(views)}, swaps, copies_later_ ? &stores : nullptr);
        if (!stores.empty()) open_.push_back(stores);
    }
    bool fetch(const std::vector<Row*>& batch) {
        std::vector<kvcore::RequestView> views;
        for (const Row* row : batch) views.push_back(row->request.view());
        Tables tables(config().num_replicas, num_bundles());
        std::vector<kvcore::FetchTarget>& targets = tables.targets;
        kvcore::FetchResult result;
        std::int64_t rounds = 0;
        try {
            do {
                CHECK(++rounds <= kMostRounds);
                kvcore::Transfers transfers;
                result = manager_.fetch({views.data(), count(views)}, 1, targets.data(),
                                        copies_later_ ? &transfers : nullptr);
                settle(transfers);
                while (!open_.empty()) finish(100);
                for (Row* row : batch) take_owed(*row);
            } while (result.status == kvcore::FetchStatus::kPending);
        } catch (const kvcore::CapacityError&) {
            return false;
        }
        if (result.status == kvcore::FetchStatus::kNoSpace) return false;
        CHECK_EQ(result.status, kvcore::FetchStatus::kOk);
        for (std::size_t i = 0; i < batch.size(); ++i) {
            batch[i]->request.start = views[i].start;
            batch[i]->request.active = views[i].active;
        }
        return true;
    }
    void take_owed(Row& row) {
        kvcore::Transfers transfers;
        const auto status = manager_.take_owed(row.request.sequence, transfers);
        if (status == kvcore::OwedStatus::kTaken) manager_.finish(transfers.ticket);
    }
    // End copies that were handed out: done or failed.
    void finish(int done = 70) {
        if (open_.empty()) return;
        const std::int64_t i = random_.below(count(open_));
        const kvcore::Transfers transfers = item(open_, i);
        const bool is_done = random_.chance(done);
        manager_.finish(transfers.ticket, is_done);
        open_.erase(open_.begin() + i);
        for (Row& row : live_) {
            const bool is_gone = !is_done && manager_.pages_of(row.request.sequence).empty();
            if (is_gone) row.request.start = 0;
        }
    }

    void drop(Row& row) {
        manager_.release(row.request.sequence);
        live_.erase(live_.begin() + (&row - live_.data()));
    }
    void release() {
        if (!live_.empty()) drop(random_.pick(live_));
    }
    void fork() {
        if (live_.empty() || live_.size() >= 7) return;
        const Row& parent = random_.pick(live_);
        const kvcore::Sequence& sequence =
            kvcore::CacheManagerProbe::sequence(manager_, parent.request.sequence);
        const std::int64_t n = std::min(sequence.written, parent.request.start);
        const auto end = parent.request.tokens().begin() + n;
        std::vector<TokenId> all(parent.request.tokens().begin(), end);
        for (const TokenId token : tokens(random_.between(1, 6))) all.push_back(token);
        Row child{Request(parent.request.name_space(), all), parent.replica, parent.tenant};
        kvcore::RequestView view = child.request.view();
        try {
            manager_.fork(parent.request.view(), {&view, 1});
        } catch (const std::invalid_argument&) {
            return;
        } catch (const kvcore::PendingTransfersError&) {
            return;
        }
        child.request.sequence = view.sequence;
        child.request.start = view.start;
        child.request.active = view.active;
        live_.push_back(child);
        if (random_.chance(40)) tell(live_.back(), any_tenant());
    }
    void truncate() {
        if (live_.empty()) return;
        Row& row = random_.pick(live_);
        const std::int64_t n = random_.below(row.request.start + 1);
        try {
            manager_.truncate(row.request.sequence, n);
        } catch (const std::invalid_argument&) {
            return;
        } catch (const kvcore::PendingTransfersError&) {
            return;
        }
        if (n >= row.request.start) return;
        row.request.start = n;
        row.request.rewind(n + 1);
        row.request.start = n;
    }
    void pin() {
        const std::vector<TokenId> wanted = prompt();
        const auto replica = static_cast<std::int32_t>(random_.below(config().num_replicas));
        pins_.push_back(manager_.pin(replica, "", wanted.data(), count(wanted)));
        CHECK(pins_.back().num_tokens <= count(wanted));
    }
    void unpin() {
        if (pins_.empty()) return;
        manager_.unpin(pins_.back());
        pins_.pop_back();
    }
    void hold() {
        if (live_.empty()) return;
        const Row& row = random_.pick(live_);
        hit_.reset();
        hit_ = manager_.match(row.request.view());
        hit_of_ = row.request.sequence;
    }
    void allocate() {
        if (!hit_) return;
        for (Row& row : live_) {
            if (row.request.sequence != hit_of_) continue;
            kvcore::RequestView view = row.request.view();
            kvcore::Transfers transfers;
            try {
                const auto status =
                    manager_.allocate(*hit_, view, view.end, copies_later_ ? &transfers : nullptr);
                settle(transfers);
                if (status != kvcore::ReserveStatus::kOk) break;
                row.request.start = view.start;
                row.request.active = view.active;
            } catch (const std::invalid_argument&) {
                break;  // the hit has moved since, or was forgotten
            } catch (const kvcore::CapacityError&) {
                break;
            }
            break;
        }
        hit_.reset();
    }
    void begin_again() {
        if (live_.empty()) return;
        Row& row = random_.pick(live_);
        try {
            manager_.begin_again(row.request.sequence);
        } catch (const kvcore::PendingTransfersError&) {
            return;
        }
        row.request.start = 0;
    }

    // ---- pages that other calls hold, import and export
    [[nodiscard]] std::int32_t any_replica() {
        return static_cast<std::int32_t>(random_.below(config().num_replicas));
    }
    // Return mostly a page that a request has or an import fills.
    BlockId any_page(std::int32_t replica) {
        std::vector<BlockId> pages;
        for (const Row& row : live_) {
            if (row.replica != replica) continue;
            for (std::int32_t bundle = 0; bundle < num_bundles(); ++bundle) {
                for (const BlockId page : manager_.pages_of(row.request.sequence, bundle)) {
                    pages.push_back(page);
                }
            }
        }
        for (const Import& each : imports_) {
            if (each.replica != replica) continue;
            pages.insert(pages.end(), each.taken.pages().begin(), each.taken.pages().end());
        }
        pages.erase(std::remove(pages.begin(), pages.end(), -1), pages.end());
        if (!pages.empty() && random_.chance(80)) return random_.pick(pages);
        return static_cast<BlockId>(random_.below(config().num_pages));
    }
    [[nodiscard]] std::int32_t num_bundles() const {
        if (is_plain()) return 1;
        const kvcore::Grouping& grouping = kvcore::CacheManagerProbe::grouping(manager_);
        return static_cast<std::int32_t>(grouping.bundles().size());
    }
    void hold_pages() {
        const std::int32_t replica = any_replica();
        std::vector<BlockId> pages;
        for (std::int64_t n = random_.between(1, 3); n > 0; --n) pages.push_back(any_page(replica));
        try {
            holds_.push_back(manager_.hold(replica, pages.data(), count(pages)));
            ++num_held;
        } catch (const kvcore::InvalidHandleError&) {
            return;  // the page is free
        } catch (const kvcore::CapacityError&) {
            return;  // the quotas have no room
        }
    }
    template <class Held>
    void drop_one(std::vector<Held>& all) {
        if (all.empty()) return;
        std::swap(random_.pick(all), all.back());
        all.pop_back();
    }
    // Whole columns of a prompt.
    std::vector<TokenId> columns_of_prompt() {
        std::vector<TokenId> prefix = prompt();
        prefix.resize(prefix.size() / static_cast<std::size_t>(config().page_size) *
                      static_cast<std::size_t>(config().page_size));
        return prefix;
    }
    kvcore::ColumnSpan span_of(const std::vector<TokenId>& prefix, std::int32_t replica) {
        kvcore::ColumnSpan span;
        span.replica = replica;
        span.num_resets = manager_.num_resets();
        span.tokens = prefix.data();
        span.n = count(prefix);
        return span;
    }
    void begin_import() {
        const std::vector<TokenId> prefix = columns_of_prompt();
        if (prefix.empty() || !config().prefix_caching) return;
        const std::int32_t replica = any_replica();
        std::vector<kvcore::CachedColumn> offered(prefix.size() /
                                                  static_cast<std::size_t>(config().page_size));
        const std::int64_t masks =
            is_plain()
                ? 1
                : std::int64_t{1} << kvcore::CacheManagerProbe::grouping(manager_).windows().size();
        for (kvcore::CachedColumn& column : offered) {
            column.windows = static_cast<std::uint8_t>(random_.below(masks));
            column.passed = static_cast<std::uint8_t>(random_.below(masks)) & column.windows;
        }
        kvcore::CacheImport taken =
            manager_.import_columns(span_of(prefix, replica), offered.data());
        const bool holds = taken.status() == kvcore::ImportStatus::kTaken ||
                           taken.status() == kvcore::ImportStatus::kKnown;
        if (holds) imports_.push_back({std::move(taken), replica});
    }
    void end_import() {
        if (imports_.empty()) return;
        std::swap(random_.pick(imports_), imports_.back());
        Import last = std::move(imports_.back());
        imports_.pop_back();
        if (random_.chance(80) && manager_.publish(last.taken, random_.chance(30))) ++num_imported;
    }
    void begin_export() {
        const std::vector<TokenId> prefix = columns_of_prompt();
        if (prefix.empty()) return;
        kvcore::ColumnSpan span = span_of(prefix, any_replica());
        span.first = static_cast<std::int32_t>(random_.below(span.n / config().page_size));
        exports_.push_back(manager_.export_columns(span));
        if (exports_.back().columns().empty()) exports_.pop_back();
    }
    void forget() {
        const std::int32_t replica = any_replica();
        const BlockId page = any_page(replica);
        static_cast<void>(manager_.forget(replica, &page, 1));
    }

    void check_state() { oracle_.check(verb_); }

    kvcore::CacheManager manager_;
    TenantOracle oracle_{manager_};
    Random random_;
    bool copies_later_;
    std::int64_t verb_ = 0;
    std::vector<std::vector<TokenId>> prompts_;
    std::vector<Row> live_;
    std::vector<kvcore::PinHandle> pins_;
    struct Import {
        kvcore::CacheImport taken;
        std::int32_t replica;
    };
    std::vector<kvcore::HeldPages> holds_;
    std::vector<Import> imports_;
    std::vector<kvcore::CacheExport> exports_;
    std::optional<kvcore::PrefixHit> hit_;
    kvcore::SequenceHandle hit_of_;
    std::vector<kvcore::Transfers> open_;
};
