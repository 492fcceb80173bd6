// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "fakes/simulated_store.hpp"
#include "kvcore/errors.hpp"
#include "support/random.hpp"
#include "traffic/group_rows.hpp"

/// Random traffic; each call is compared with the oracle.
class GroupWorld {
   public:
    /// `copies_later`: copies are transfers that end later or fail; otherwise they run in list
    /// order.
    GroupWorld(const kvcore::CacheConfig& config, bool copies_later, std::uint64_t seed,
               kvcore::EvictionOrder order = {})
        : rows_(config, order), random_(seed), copies_later_(copies_later) {
        live_.reserve(16);  // rows of a batch must not move while others are forked
        for (int i = 0; i < 4; ++i) prompts_.push_back(tokens(random_.between(1, 44)));
        for (std::int32_t r = 0; r < config.num_replicas; ++r) tables_.emplace_back(config);
        if (config.has_stores) store_.emplace(rows_.manager, random_, rows_.stored_words());
    }

    void operate() {
        const std::int64_t verb = random_.below(100);
        if (store_ && random_.chance(30)) {
            use_store();
        } else if (config().host_pages > 0 && random_.chance(5)) {
            crowd_out();
        } else {
            act(verb);
        }
        check_state();
    }
    [[nodiscard]] const kvcore::CacheManager& manager() const { return rows_.manager; }
    [[nodiscard]] kvcore::CacheManager& manager() { return rows_.manager; }
    [[nodiscard]] std::int64_t num_hits() const { return num_hits_; }
    /// Planned hits that took pages from the host tier.
    [[nodiscard]] std::int64_t num_hits_below() const { return num_below_; }
    /// Columns of the tree that got window pages from the host tier.
    [[nodiscard]] std::int64_t num_patches() const { return num_patches_; }
    [[nodiscard]] const std::optional<SimulatedStore>& store() const { return store_; }
    void end();

   private:
    struct Pin {
        kvcore::PinHandle handle;
        std::int32_t replica = 0;
        Request prompt;
    };
    /// The tables of a replica.
    struct Tables {
        static constexpr std::int64_t kRows = 8;
        static constexpr std::uint32_t kNone = ~0U;
        explicit Tables(const kvcore::CacheConfig& config) : stride(config.max_seq_len + 64) {
            for (const kvcore::CacheGroup& group : config.groups) {
                for (std::int32_t b = 0; b < group.num_bundles; ++b) {
                    cells.emplace_back(static_cast<std::size_t>(kRows * stride));
                    tables.push_back(std::make_unique<kvcore::LookupTable>(cells.back().data(),
                                                                           kRows, stride, kNone));
                    if (tables.size() > 1) more.push_back(tables.back().get());
                }
            }
            lengths.resize(static_cast<std::size_t>(kRows));
        }
        [[nodiscard]] kvcore::FetchTarget target() {
            kvcore::FetchTarget target;
            target.table = tables[0].get();
            target.more = more.data();
            target.cache_lengths = lengths.data();
            return target;
        }
        std::int64_t stride;
        std::vector<std::uint32_t> lengths;
        std::vector<std::vector<std::uint32_t>> cells;
        std::vector<std::unique_ptr<kvcore::LookupTable>> tables;
        std::vector<kvcore::LookupTable*> more;
    };

    void act(std::int64_t verb) {
        if (verb < 18) return claim();
        if (verb < 52) return step();
        if (verb < 60) return release();
        if (verb < 65) return fork();
        if (verb < 71) return truncate();
        if (verb < 74) return pin();
        if (verb < 77) return unpin();
        if (verb < 80) return hold();
        if (verb < 83) return allocate();
        if (verb < 84) return reset();
        if (verb < 87) return finish();
        if (verb < 89) return begin_again();
        if (verb < 91) return set_back();
        if (live_.empty()) return;
        reserve(random_.pick(live_));
    }

    [[nodiscard]] const kvcore::CacheConfig& config() const { return rows_.manager.config(); }
    [[nodiscard]] Cached cached(std::int32_t replica) const {
        return cached_of(rows_.manager, replica, {"", "other"});
    }
    [[nodiscard]] Cached records(std::int32_t replica) const {
        return records_of(rows_.manager, replica, {"", "other"});
    }
    std::vector<TokenId> tokens(std::int64_t n) {
        std::vector<TokenId> tokens;
        while (count(tokens) < n) tokens.push_back(static_cast<TokenId>(random_.below(2)));
        return tokens;
    }
    std::vector<TokenId> prompt() {
        std::vector<TokenId> prompt = random_.pick(prompts_);
        prompt.resize(static_cast<std::size_t>(random_.between(1, count(prompt))));
        for (const TokenId token : tokens(random_.below(12))) prompt.push_back(token);
        return prompt;
    }
    std::int32_t any_replica() {
        return static_cast<std::int32_t>(random_.below(config().num_replicas));
    }

    void reset() {
        // The oracle cannot describe pages that are held across a reset: a lookup no longer finds
        // them.
        hit_.reset();
        while (!live_.empty()) release();
        while (!pins_.empty()) unpin();
        if (store_) store_->note_reset();
        rows_.manager.reset_prefix_cache();
    }
    void use_store() {
        if (!store_) return;
        auto& store = *store_;
        if (random_.chance(2)) return reset();  // only the store has the pages
        if (random_.chance(50)) return store.write();
        const std::vector<TokenId> asked = random_.chance(60) ? random_.pick(prompts_) : prompt();
        store.read(any_replica(), Request(random_.chance(10) ? "other" : "", asked));
    }

    void claim() {
        if (live_.size() >= 5) return release();
        const std::string name = random_.chance(10) ? "other" : "";
        live_.push_back(rows_.claimed(Request(name, prompt()), any_replica()));
        if (random_.chance(60)) chunk(live_.back().request);
    }
    // Let only a part of the request's tokens run next.
    void chunk(Request& request) {
        request.active = random_.between(request.start + 1, request.end());
    }
    [[nodiscard]] bool is_open(const GroupRow& row) const {
        const kvcore::Sequence& sequence = rows_.sequence(row);
        const std::int64_t begin = sequence.pages.empty() ? 0 : row.request.start;
        return config().prefix_caching && !sequence.is_sealed() && begin == sequence.hit_tokens &&
               row.request.active - begin > 1;
    }

    // Check the hit that a plan reports.
    void check_plan(const GroupRow& row, const kvcore::ReservePlan& plan, const Cached& before) {
        const std::int64_t held = rows_.sequence(row).hit_tokens;
        const std::int64_t most = row.request.end() - 1;
        if (!is_open(row)) return CHECK_EQ(plan.hit_tokens, 0);
        const std::int64_t below =
            rows_.oracle.tiered_hit(before, records(row.replica), row.request, most);
        const std::int64_t whole = rows_.oracle.whole_hit(before, row.request, most);
        const std::int64_t part = rows_.oracle.part_hit(before, row.request, most, whole);
        const std::int64_t hit = plan.hit_tokens == 0 ? 0 : plan.hit_tokens + held;
        const bool has_declined =
            row.has_declined || rows_.sequence(row).reuse == kvcore::Reuse::kDeclined;
        // A hit that covers all tokens to run moves their end: that may need too many pages.
        const bool moves_on = part >= row.request.active;
        const bool may_decline = has_declined || moves_on || plan.evicted_pages > 0 || !plan.fits;
        if (plan.copied_tokens > 0) {
            CHECK(part > held && hit >= whole && hit >= below && hit == part);
            return;
        }
        const std::int64_t best = std::max(whole, below);
        num_below_ += best > whole && hit > 0 ? 1 : 0;
        CHECK_EQ(hit, best > held ? best : 0);
        if (part > std::max(held, best)) CHECK(may_decline);
    }

    // Count the row's pages that neither the row had before nor the tree has.
    std::int64_t count_new(const GroupRow& row, const std::vector<std::vector<BlockId>>& before,
                           const Cached& now) const {
        std::set<BlockId> known;
        for (const auto& [digest, column] : now) {
            known.insert(column.pages.begin(), column.pages.end());
        }
        for (const auto& pages : before) known.insert(pages.begin(), pages.end());
        std::set<BlockId> fresh;
        for (const auto& pages : rows_.pages_of(row)) {
            for (const BlockId page : pages) {
                if (page >= 0 && known.count(page) == 0) fresh.insert(page);
            }
        }
        return static_cast<std::int64_t>(fresh.size());
    }
    static std::int64_t count_pages(const Cached& cached) {
        std::int64_t pages = 0;
        for (const auto& [digest, column] : cached) {
            pages += std::count_if(column.pages.begin(), column.pages.end(),
                                   [](BlockId page) { return page >= 0; });
        }
        return pages;
    }

    bool reserve(GroupRow& row) {
        const std::int64_t steps = random_.chance(80) ? 1 : random_.between(2, 5);
        const Cached before = cached(row.replica);
        const auto pages = rows_.pages_of(row);
        const std::int64_t hit_before = rows_.sequence(row).hit_tokens;
        const std::int64_t evicted = rows_.manager.metrics().evicted_pages;
        const std::int64_t free = rows_.manager.stats(row.replica).free_pages;
        kvcore::RequestView view = row.request.view();
        kvcore::Transfers transfers;
        try {
            const kvcore::ReservePlan plan = rows_.manager.plan(view, steps);
            check_plan(row, plan, before);
            const kvcore::ReserveStatus status =
                rows_.manager.reserve(view, steps, copies_later_ ? &transfers : nullptr);
            const std::int64_t went = rows_.manager.metrics().evicted_pages - evicted;
            if (status == kvcore::ReserveStatus::kPending) {
                settle_copies(transfers);  // with write-back, these copies make room
                return false;
            }
            CHECK_EQ(plan.fits, status == kvcore::ReserveStatus::kOk);
            if (!plan.fits) {
                CHECK_EQ(rows_.manager.stats(row.replica).free_pages, free);
                CHECK_EQ(went, 0);
                return false;
            }
            if (plan.hit_tokens > 0) ++num_hits_;
            const bool is_whole = plan.hit_tokens > 0 && plan.copied_tokens == 0;
            row.has_declined = row.has_declined || (is_whole || plan.evicted_pages > 0);
            reserved(row, view, hit_before, steps, transfers);
            // A column is evicted with all its pages, a window's page with all its lanes.
            // Pages that the row itself gives up need no eviction.
            const bool had_pages = !pages[0].empty() || num_loads(row) > 0;
            CHECK(had_pages || went >= plan.evicted_pages);
            CHECK(went < plan.evicted_pages + std::max<std::int64_t>(1, rows_.oracle.lanes()));
            const Cached now = cached(row.replica);
            CHECK_EQ(count_pages(before) - count_pages(now), went);
            const std::int64_t fresh = count_new(row, pages, now);
            CHECK(fresh <= plan.new_pages && (had_pages || fresh == plan.new_pages));
            if (pages[0].empty()) {
                CHECK_EQ(rows_.manager.stats(row.replica).free_pages, free + went - plan.new_pages);
            }
            return true;
        } catch (const kvcore::CapacityError&) {
            drop(row);
        }
        return false;
    }
    void reserved(GroupRow& row, const kvcore::RequestView& view, std::int64_t hit_before,
                  std::int64_t steps, const kvcore::Transfers& transfers) {
        row.request.start = view.start;
        row.request.active = view.active;
        rows_.reserved(row, hit_before, steps);
        settle_copies(transfers);
    }
    void settle_copies(const kvcore::Transfers& transfers) {
        if (!copies_later_) return rows_.copy(rows_.manager.take_copies());
        if (!transfers.empty()) open_.push_back(transfers);
    }
    [[nodiscard]] std::int64_t num_loads(const GroupRow& row) const {
        const auto& flights = kvcore::CacheManagerProbe::flights(rows_.manager).all();
        return std::count_if(flights.begin(), flights.end(), [&](const auto& flight) {
            return flight.is_load && flight.sequence == row.request.sequence;
        });
    }

    // Run some rows, with several steps if all of them sample.
    void step() {
        while (!open_.empty()) finish();
        for (GroupRow& row : live_) take_owed(row);
        std::vector<GroupRow*> batch;
        for (GroupRow& row : live_) {
            if (random_.chance(60)) batch.push_back(&row);
        }
        if (batch.empty()) return;
        const bool all_sample = std::all_of(batch.begin(), batch.end(), [](const GroupRow* row) {
            return row->request.active == row->request.end();
        });
        const std::int64_t steps = all_sample && random_.chance(30) ? random_.between(2, 4) : 1;
        if (!fetch(batch, steps)) return release();
        const std::int64_t parent = random_.chance(15) ? random_.below(count(batch)) : -1;
        const kvcore::SequenceHandle forked =
            parent < 0 ? kvcore::SequenceHandle() : item(batch, parent)->request.sequence;
        for (GroupRow* row : batch) run(*row, steps);
        commit(batch, parent < 0 ? nullptr : &forked);
    }
    bool fetch(const std::vector<GroupRow*>& batch, std::int64_t steps) {
        std::vector<kvcore::RequestView> views;
        std::vector<std::int64_t> hits;
        for (const GroupRow* row : batch) {
            views.push_back(row->request.view());
            hits.push_back(rows_.sequence(*row).hit_tokens);
        }
        std::vector<kvcore::FetchTarget> targets;
        for (Tables& tables : tables_) targets.push_back(tables.target());
        kvcore::FetchResult result;
        try {
            do {
                kvcore::Transfers transfers;
                result = rows_.manager.fetch({views.data(), count(views)}, steps, targets.data(),
                                             copies_later_ ? &transfers : nullptr);
                settle_copies(transfers);
                loads_fail_ = false;  // else the call would repeat failed loads
                while (!open_.empty()) finish();
                loads_fail_ = true;
                for (GroupRow* row : batch) take_owed(*row);
            } while (result.status == kvcore::FetchStatus::kPending);
        } catch (const kvcore::CapacityError&) {
            for (std::size_t i = 0; i < batch.size(); ++i)
                CHECK(batch[i]->request.start == views[i].start);
            return false;
        }
        if (result.status == kvcore::FetchStatus::kNoSpace) return false;
        CHECK_EQ(result.status, kvcore::FetchStatus::kOk);
        std::vector<std::int64_t> next(tables_.size());
        for (std::size_t i = 0; i < batch.size(); ++i) {
            batch[i]->request.start = views[i].start;
            batch[i]->request.active = views[i].active;
            rows_.reserved(*batch[i], hits[i], steps);
            check_tables(*batch[i], item(next, batch[i]->replica)++);
        }
        return true;
    }
    void check_tables(const GroupRow& row, std::int64_t index) {
        const auto pages = rows_.pages_of(row);
        const Tables& tables = item(tables_, row.replica);
        for (std::size_t b = 0; b < pages.size(); ++b) {
            for (std::int64_t i = 0; i < count(pages[b]); ++i) {
                const BlockId page = item(pages[b], i);
                CHECK_EQ(item(tables.cells[b], index * tables.stride + i),
                         page < 0 ? Tables::kNone : static_cast<std::uint32_t>(page));
            }
        }
    }
    void run(GroupRow& row, std::int64_t steps) {
        Request& request = row.request;
        rows_.read(row);
        std::int64_t end = request.active;
        for (std::int64_t k = 1; k < steps; ++k, ++end) {
            request.append(static_cast<TokenId>(random_.below(2)));
        }
        rows_.write(row, request.start, end);
        written_.push_back(end);
    }
    // `forked`: the sequence to fork before the manager learns of its step.
    void commit(const std::vector<GroupRow*>& batch, const kvcore::SequenceHandle* forked);

    void crowd_out();
    void finish();
    void note_lost_loads(const kvcore::Transfers& transfers);
    void note_begun_again(GroupRow& row) const;
    void take_owed(GroupRow& row);
    void drop(GroupRow& row) {
        rows_.manager.release(row.request.sequence);
        live_.erase(live_.begin() + (&row - live_.data()));
    }
    void release() {
        if (!live_.empty()) drop(random_.pick(live_));
    }
    void fork();
    void fork_of(const GroupRow& parent);
    void truncate();
    void pin();
    void unpin();
    void hold();
    void allocate();
    void begin_again();
    void set_back();
    void check_state();
    void check_pages(std::int32_t replica, const Cached& cached) const;
    [[nodiscard]] std::set<BlockId> pinned(std::int32_t replica, const Cached& cached) const;

    GroupRows rows_;
    Random random_;
    bool copies_later_;
    std::vector<Tables> tables_;
    std::vector<std::vector<TokenId>> prompts_;
    std::vector<GroupRow> live_;
    std::vector<std::int64_t> written_;  // tokens, by row of a step
    std::vector<Pin> pins_;
    std::optional<kvcore::PrefixHit> hit_;
    kvcore::SequenceHandle hit_of_;
    std::vector<kvcore::Transfers> open_;
    std::optional<SimulatedStore> store_;
    bool loads_fail_ = true;
    std::int64_t num_hits_ = 0;
    std::int64_t num_below_ = 0;
    std::int64_t num_patches_ = 0;
};

#include "traffic/group_world_verbs.hpp"
