// SPDX-License-Identifier: Apache-2.0
// Eight threads use one manager with groups of layers, with and without a host tier, each for its
// own sequences, over the same few prompts. Stores end later, or fail, also after their sequence
// has ended. Page contents are plain memory: ThreadSanitizer reports a race if a page is written
// while another thread may read it. In every build, a layer that reads content of other tokens is
// an error. --count: operations of a thread.
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kvcore/errors.hpp"
#include "support/layer_groups.hpp"
#include "support/random.hpp"
#include "traffic/group_rows.hpp"
#include "traffic/workers.hpp"

namespace tests::stress::group_threads {

namespace {

constexpr int kThreads = 8;
constexpr std::int64_t kMaxLive = 3;  // sequences of one thread

/// The data that all threads share.
struct Shared {
    explicit Shared(const kvcore::CacheConfig& config) : rows(config) {}

    GroupRows rows;
    std::vector<std::vector<TokenId>> prompts;  // constant once the threads run
    std::atomic<std::int64_t> num_steps{0};
    std::atomic<std::int64_t> num_refused{0};
    std::atomic<std::int64_t> num_moved{0};
};

class Worker {
   public:
    Worker(Shared& shared, std::uint64_t seed)
        : shared_(shared), rows_(shared.rows), manager_(shared.rows.manager), random_(seed) {
        for (std::size_t b = 0; b < rows_.bundles.size(); ++b) {
            cells_.emplace_back(static_cast<std::size_t>(kMaxLive * kStride));
            tables_.push_back(std::make_unique<kvcore::LookupTable>(cells_.back().data(), kMaxLive,
                                                                    kStride, ~0U));
            if (b > 0) more_.push_back(tables_.back().get());
        }
    }

    void run(std::int64_t num_operations) {
        for (std::int64_t i = 0; i < num_operations; ++i) act();
        while (!live_.empty()) release();
        while (!stores_.empty()) finish_store();
        for (const kvcore::PinHandle& pin : pins_) manager_.unpin(pin);
    }

   private:
    static constexpr std::int64_t kStride = 128;

    void act() {
        const std::int64_t dice = random_.below(1000);
        if (live_.empty() || (dice < 150 && count(live_) < kMaxLive)) return claim();
        if (dice < 600) return step();
        if (dice < 700) return release();
        if (dice < 760) return pin_or_unpin();
        if (dice < 840) return look_up();
        if (dice < 900) return fork();
        if (dice < 950) return truncate();
        if (dice < 995 && !stores_.empty()) return finish_store();
        if (dice < 953) return static_cast<void>(manager_.reset_prefix_cache());
        if (dice < 956) return manager_.check_integrity();
    }
    std::vector<TokenId> prompt() { return prompt_like(shared_.prompts, random_); }
    void claim() {
        GroupRow row = rows_.claimed(Request("", prompt()), 0);
        row.request.active = random_.between(1, row.request.end());
        live_.push_back(row);
    }
    // Return false if the transfers fail: a request that waited for loads is like a new claim.
    bool transfer(const kvcore::Transfers& transfers) {
        if (transfers.empty()) return true;
        const bool done = random_.chance(95);
        rows_.copy(transfers, done);
        manager_.finish(transfers.ticket, done);
        if (!transfers.tier_moves.empty()) {
            shared_.num_moved.fetch_add(count(transfers.tier_moves), std::memory_order_relaxed);
        }
        return done || transfers.tier_moves.empty();
    }
    static bool is_load(const kvcore::Transfers& transfers) {
        return std::any_of(transfers.tier_moves.begin(), transfers.tier_moves.end(),
                           [](const kvcore::PageMove& move) { return move.is_load(); });
    }
    void finish_store() {
        transfer(stores_.front());
        stores_.erase(stores_.begin());
    }
    // Run a random request.
    void step() {
        GroupRow& row = random_.pick(live_);
        kvcore::RequestView view = row.request.view();
        std::array<std::uint32_t, kMaxLive> lengths{};
        kvcore::FetchTarget target;
        target.table = tables_[0].get();
        target.more = more_.data();
        target.cache_lengths = lengths.data();
        kvcore::FetchResult result;
        do {
            kvcore::Transfers transfers;
            result = manager_.fetch({&view, 1}, 1, &target, &transfers);
            if (!transfer(transfers) && is_load(transfers)) {
                view.start = 0;
                view.active = view.end;
            }
            kvcore::Transfers owed;
            const auto found = manager_.take_owed(row.request.sequence, owed);
            transfer(owed);
            if (found == kvcore::OwedStatus::kUnderWay) manager_.wait(row.request.sequence);
        } while (result.status == kvcore::FetchStatus::kPending);
        row.request.start = view.start;
        row.request.active = view.active;
        if (result.status != kvcore::FetchStatus::kOk) {
            shared_.num_refused.fetch_add(1, std::memory_order_relaxed);
            return release();
        }
        rows_.read(row);
        rows_.write(row, view.start, view.active);
        row.request.start = row.request.active;
        if (row.request.start == row.request.end()) {
            row.request.append(static_cast<TokenId>(random_.below(3)));
        }
        row.request.active = random_.between(row.request.start + 1, row.request.end());
        kvcore::RequestView written = row.request.view();
        std::vector<kvcore::PageSwap> swaps;
        kvcore::Transfers stores;
        const bool has_tier = manager_.config().host_pages > 0;
        manager_.commit({&written, 1}, swaps, has_tier ? &stores : nullptr);
        if (!stores.empty()) stores_.push_back(stores);
        if (count(stores_) > 3) finish_store();
        shared_.num_steps.fetch_add(1, std::memory_order_relaxed);
        if (!has_room(row.request.end())) drop(row);
    }
    /// Return true if a request of `num_tokens` may continue, and grow by two more tokens.
    bool has_room(std::int64_t num_tokens) const {
        return num_tokens + 2 <= manager_.config().max_seq_len;
    }
    void drop(GroupRow& row) {
        manager_.release(row.request.sequence);
        live_.erase(live_.begin() + (&row - live_.data()));
    }
    void release() { drop(random_.pick(live_)); }
    void fork() {
        if (count(live_) >= kMaxLive) return;
        const GroupRow& parent = random_.pick(live_);
        if (!has_room(parent.request.end() + 1)) return;
        GroupRow child = parent;
        child.request.append(static_cast<TokenId>(random_.below(3)));
        kvcore::RequestView view = child.request.view();
        view.start = 0;
        try {
            manager_.fork(parent.request.view(), {&view, 1});
        } catch (const std::invalid_argument&) {
            return;  // the request was set back
        } catch (const kvcore::PendingTransfersError&) {
            return;
        }
        child.request.sequence = view.sequence;
        child.request.start = view.start;
        child.request.active = view.active;
        live_.push_back(child);
    }
    void truncate() {
        GroupRow& row = random_.pick(live_);
        const std::int64_t n = std::max<std::int64_t>(0, row.request.start - random_.below(5));
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
    }
    void pin_or_unpin() {
        if (pins_.size() >= 2 || (!pins_.empty() && random_.chance(60))) {
            manager_.unpin(pins_.back());
            return pins_.pop_back();
        }
        const std::vector<TokenId> tokens = prompt();
        pins_.push_back(manager_.pin(0, "", tokens.data(), count(tokens)));
    }
    void look_up() {
        const std::vector<TokenId> tokens = prompt();
        std::vector<BlockId> pages;
        const std::int64_t n = manager_.match(0, "", tokens.data(), count(tokens), &pages);
        CHECK_EQ(n, count(pages));
        const kvcore::PoolStats stats = manager_.stats(0);
        CHECK(stats.free_pages + stats.cached_pages <= stats.total_pages);
        const kvcore::PrefixHit hit = manager_.match(random_.pick(live_).request.view());
        CHECK(hit.num_tokens() >= 0);
    }

    Shared& shared_;
    GroupRows& rows_;
    kvcore::CacheManager& manager_;
    Random random_;
    std::vector<GroupRow> live_;
    std::vector<kvcore::PinHandle> pins_;
    std::vector<kvcore::Transfers> stores_;
    std::vector<std::vector<std::uint32_t>> cells_;
    std::vector<std::unique_ptr<kvcore::LookupTable>> tables_;
    std::vector<kvcore::LookupTable*> more_;
};

void hammer(std::vector<kvcore::CacheGroup> groups, bool dedup, std::int64_t num_pages,
            std::uint64_t seed, std::int64_t num_operations, std::int64_t host_pages = 0,
            kvcore::WritePolicy policy = kvcore::WritePolicy::kWriteThrough) {
    kvcore::CacheConfig config;
    config.write_policy = policy;
    config.page_size = 4;
    config.num_pages = num_pages;
    config.max_sequences = kThreads * kMaxLive;
    config.max_seq_len = 48;
    config.dedup = dedup;
    config.max_draft_tokens = 2;
    config.groups = std::move(groups);
    config.host_pages = host_pages;
    Shared shared(config);
    Random random(seed);
    shared.prompts = random_prompts(random, 4, 30);
    run_together(kThreads, [&](int i) {
        Worker(shared, seed * 1000 + static_cast<std::uint64_t>(i)).run(num_operations);
    });
    kvcore::CacheManager& manager = shared.rows.manager;
    manager.check_integrity();
    shared.rows.check_cached(0, cached_of(manager, 0, {""}));
    shared.rows.check_cached(0, records_of(manager, 0, {""}), kvcore::Tier::kHost);
    manager.reset_prefix_cache();
    CHECK_EQ(manager.stats(0).free_pages, num_pages);
    CHECK_EQ(manager.stats(0).host_cached_pages, 0);
    std::printf("%lld steps, %lld times no room, %lld pages moved between tiers, %lld loaded\n",
                static_cast<long long>(shared.num_steps.load()),
                static_cast<long long>(shared.num_refused.load()),
                static_cast<long long>(shared.num_moved.load()),
                static_cast<long long>(manager.metrics().loaded_pages));
}

TEST(threads_read_their_own_tokens) {
    const std::uint64_t seed = check::seed_or(16);
    const std::int64_t operations = check::count_or(4'000);
    hammer({full(), sliding(7)}, true, 44, seed, operations);
    hammer({full(), sliding(7), chunked(8)}, false, 60, seed + 1, operations);
    hammer({sliding(7)}, true, 18, seed + 2, operations);
    hammer({full(), sliding(7)}, true, 52, seed + 3, operations, 40);
    hammer({full(), sliding(7), chunked(8)}, false, 60, seed + 4, operations, 200);
    hammer({sliding(7)}, true, 22, seed + 5, operations, 12);
    for (const auto policy : {kvcore::WritePolicy::kWriteBack, kvcore::WritePolicy::kSelective}) {
        hammer({full(), sliding(7)}, true, 52, seed + 6, operations / 2, 60, policy);
        hammer({full(), sliding(7), chunked(8)}, false, 60, seed + 7, operations / 2, 90, policy);
    }
}

}  // namespace

}  // namespace tests::stress::group_threads
