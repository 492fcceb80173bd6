// SPDX-License-Identifier: Apache-2.0
// Eight threads use one CacheManager, each for its own sequences, over the same few prompts. Page
// contents are plain memory: ThreadSanitizer reports a race if a page is written while another
// thread may read it. In every build, a sequence that reads other content than its own is an error.
// --count: operations of each thread.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "fakes/simulated_memory.hpp"
#include "kvcore/errors.hpp"
#include "traffic/workers.hpp"

namespace tests::stress::threads {

namespace {

constexpr int kThreads = 8;
constexpr std::int64_t kMaxLive = 3;  // sequences of one thread

kvcore::CacheConfig make_config(bool dedup, std::int64_t host_pages) {
    kvcore::CacheConfig config;
    config.page_size = 4;
    config.num_pages = 44;  // a third of the pages that all sequences could use
    config.max_sequences = kThreads * kMaxLive;
    config.max_seq_len = 48;
    config.num_replicas = 2;
    config.dedup = dedup;
    config.host_pages = host_pages;
    return config;
}

/// The configuration of the host tier as a pool of its own.
kvcore::CacheConfig host_config(kvcore::CacheConfig config) {
    config.num_pages = config.host_pages;
    return config;
}

/// The data that all threads share.
struct Shared {
    explicit Shared(const kvcore::CacheConfig& config)
        : manager(config), memory(config), host(host_config(config)) {}

    kvcore::CacheManager manager;
    SimulatedMemory memory;
    SimulatedMemory host;
    std::vector<std::vector<TokenId>> prompts;  // constant once the threads run
    std::atomic<std::int64_t> num_batches{0};
    std::atomic<std::int64_t> num_copies{0};
    std::atomic<std::int64_t> num_forks{0};
    std::atomic<std::int64_t> num_loads{0};
    std::atomic<std::int64_t> num_refused{0};
    std::atomic<std::int64_t> num_forgotten{0};
};

class Worker {
   public:
    Worker(Shared& shared, std::uint64_t seed)
        : shared_(shared),
          manager_(shared.manager),
          config_(manager_.config()),
          random_(seed),
          stride_(kvcore::ceil_div(config_.max_seq_len, config_.page_size)) {
        for (std::int32_t i = 0; i < config_.num_replicas; ++i) {
            cells_.emplace_back(static_cast<std::size_t>(kMaxLive * stride_));
            lengths_.emplace_back(static_cast<std::size_t>(kMaxLive));
            tables_.push_back(std::make_unique<kvcore::LookupTable>(cells_.back().data(), kMaxLive,
                                                                    stride_, ~0U));
        }
    }

    void run(std::int64_t num_operations) {
        for (std::int64_t i = 0; i < num_operations; ++i) act();
        while (!live_.empty()) release();
        for (const kvcore::PinHandle& pin : pins_) manager_.unpin(pin);
        holds_.clear();
    }

   private:
    struct Live {
        Request request;
        std::int32_t replica;
    };

    void act() {
        const std::int64_t dice = random_.below(1000);
        if (live_.empty() || (dice < 150 && count(live_) < kMaxLive)) return claim();
        if (dice < 300) return reserve(random_.pick(live_).request);
        if (dice < 600) return step();
        if (dice < 700) return release();
        if (dice < 760) return pin_or_unpin();
        if (dice < 840) return look_up();
        if (dice < 900) return look_around();
        if (dice < 920) return rewind(random_.pick(live_).request);
        if (dice < 950) return fork(random_.pick(live_));
        if (dice < 960) return cut(random_.pick(live_).request);
        if (dice < 963) return static_cast<void>(manager_.reset_prefix_cache());
        if (dice < 965) return manager_.reset_metrics();
        if (dice < 967) return manager_.check_integrity();
        if (dice < 980) return hold_or_let_go(random_.pick(live_));
        if (dice < 985) return forget(random_.pick(live_));
        manager_.release(manager_.claim(random_replica()));
    }

    std::int32_t random_replica() {
        return static_cast<std::int32_t>(random_.below(config_.num_replicas));
    }
    std::vector<TokenId> random_prompt() { return prompt_like(shared_.prompts, random_); }

    void claim() {
        const std::int32_t replica = random_replica();
        Request request(random_.chance(20) ? "other" : "", random_prompt());
        try {
            request.sequence = manager_.claim(replica);
        } catch (const kvcore::CapacityError&) {
            return;  // other threads use all sequences
        }
        live_.push_back({std::move(request), replica});
    }

    void reserve(Request& request) {
        kvcore::RequestView view = request.view();
        transfers_.clear();
        const bool fits = manager_.reserve(view, random_.between(1, 2), &transfers_) ==
                          kvcore::ReserveStatus::kOk;
        request.start = view.start;
        request.active = view.active;
        transfer();
        if (!fits) give_way();
    }

    // Make the transfers of the last call; stores sometimes fail.
    void transfer() {
        if (transfers_.empty()) return;
        bool stores = false;
        for (const kvcore::PageMove& copy : transfers_.copies) shared_.memory.copy(copy);
        for (const kvcore::PageMove& copy : transfers_.tier_moves) {
            Digest* here = shared_.memory.page(copy.replica, copy.page_in(kvcore::Tier::kDevice));
            Digest* below = shared_.host.page(copy.replica, copy.page_in(kvcore::Tier::kHost));
            stores = !copy.is_load();
            if (!stores) std::swap(here, below);
            std::copy(here, here + config_.page_size, below);
        }
        if (random_.chance(30)) std::this_thread::yield();
        manager_.finish(transfers_.ticket, !stores || !random_.chance(2));
        shared_.num_copies.fetch_add(count(transfers_.copies), std::memory_order_relaxed);
        const std::int64_t loads = stores ? 0 : count(transfers_.tier_moves);
        shared_.num_loads.fetch_add(loads, std::memory_order_relaxed);
    }

    void step() {
        std::vector<kvcore::RequestView> views;
        for (const Live& live : live_) views.push_back(live.request.view());
        std::vector<kvcore::FetchTarget> targets(tables_.size());
        for (std::size_t i = 0; i < tables_.size(); ++i) {
            targets[i].table = tables_[i].get();
            targets[i].cache_lengths = lengths_[i].data();
        }
        const auto fetch = [&] {
            transfers_.clear();
            const kvcore::FetchResult result =
                manager_.fetch({views.data(), count(views)}, 1, targets.data(), &transfers_);
            transfer();
            return result.status;
        };
        kvcore::FetchStatus status = fetch();
        if (status == kvcore::FetchStatus::kPending) status = fetch();
        if (status != kvcore::FetchStatus::kOk) {
            // The call may have reserved some requests: their views have the new positions.
            for (std::size_t i = 0; i < live_.size(); ++i) {
                live_[i].request.start = views[i].start;
                live_[i].request.active = views[i].active;
            }
            return give_way();
        }
        std::vector<std::int64_t> next_row(tables_.size());
        for (std::size_t i = 0; i < live_.size(); ++i) {
            live_[i].request.start = views[i].start;
            live_[i].request.active = views[i].active;
            run(live_[i], item(next_row, live_[i].replica)++);
        }
        commit();
        for (std::size_t i = live_.size(); i-- > 0;) {
            if (!has_room(live_[i].request.end())) release(i);
        }
        shared_.num_batches.fetch_add(1, std::memory_order_relaxed);
    }

    // Read the written tokens and write the new tokens, as kernels do with the table's row.
    void run(Live& live, std::int64_t row) {
        Request& request = live.request;
        const std::int64_t pages = kvcore::ceil_div(request.end(), config_.page_size);
        std::vector<BlockId> ids;
        for (std::int64_t column = 0; column < pages; ++column) {
            ids.push_back(
                static_cast<BlockId>(item(item(cells_, live.replica), row * stride_ + column)));
        }
        shared_.memory.check_contents(live.replica, ids, request, request.start);
        shared_.memory.write(live.replica, ids, request, request.start, request.active);
        request.start = request.active;
        if (request.active == request.end()) {
            request.append(static_cast<TokenId>(random_.below(3)));
        }
        request.active = request.end();
    }

    void commit() {
        std::vector<kvcore::RequestView> views;
        for (const Live& live : live_) views.push_back(live.request.view());
        std::vector<kvcore::PageSwap> swaps;
        transfers_.clear();
        manager_.commit({views.data(), count(views)}, swaps, &transfers_);
        transfer();
    }

    void give_way() {
        shared_.num_refused.fetch_add(1, std::memory_order_relaxed);
        release();
    }
    void release() { release(static_cast<std::size_t>(random_.below(count(live_)))); }
    void release(std::size_t index) {
        std::swap(live_[index], live_.back());
        manager_.release(live_.back().request.sequence);
        CHECK(!manager_.contains(live_.back().request.sequence));
        live_.pop_back();
    }

    /// Return true if a request of `num_tokens` may continue, and grow by two more tokens.
    bool has_room(std::int64_t num_tokens) const { return num_tokens + 2 <= config_.max_seq_len; }

    void rewind(Request& request) { request.rewind(random_.between(1, request.end())); }

    // Fork a request after some of its tokens: threads never share a sequence, but they share its
    // pages.
    void fork(const Live& parent) {
        if (count(live_) >= kMaxLive || !has_room(parent.request.end() + 1)) return;
        Live child{parent.request, parent.replica};
        child.request.append(static_cast<TokenId>(random_.below(3)));
        kvcore::RequestView view = child.request.view();
        try {
            manager_.fork(parent.request.view(), {&view, 1});
        } catch (const kvcore::CapacityError&) {
            return;
        }
        child.request.sequence = view.sequence;
        child.request.start = view.start;
        child.request.active = view.active;
        shared_.num_forks.fetch_add(1, std::memory_order_relaxed);
        live_.push_back(std::move(child));
    }

    void cut(Request& request) {
        const std::int64_t n = random_.between(0, request.start);
        try {
            manager_.truncate(request.sequence, n);
        } catch (const std::invalid_argument&) {
            return;  // not fetched yet
        }
        request.rewind(std::max<std::int64_t>(n, 1));
    }

    void pin_or_unpin() {
        if (pins_.size() >= 3 || (!pins_.empty() && random_.chance(60))) {
            manager_.unpin(pins_.back());
            return pins_.pop_back();
        }
        const std::vector<TokenId> tokens = random_prompt();
        pins_.push_back(manager_.pin(random_replica(), "", tokens.data(), count(tokens)));
    }

    // Hold a request's own pages and cached pages, which other threads release, forget and reset.
    void hold_or_let_go(const Live& live) {
        if (holds_.size() >= 3 || (!holds_.empty() && random_.chance(60))) {
            if (random_.chance(50)) holds_.front().let_go();
            holds_.erase(holds_.begin());
            return;
        }
        const std::vector<BlockId> pages = random_pages(live);
        holds_.push_back(manager_.hold(live.replica, pages.data(), count(pages)));
    }
    void forget(const Live& live) {
        const std::vector<BlockId> pages = random_pages(live);
        const std::int64_t left = manager_.forget(live.replica, pages.data(), count(pages));
        shared_.num_forgotten.fetch_add(left, std::memory_order_relaxed);
    }
    std::vector<BlockId> random_pages(const Live& live) {
        std::vector<BlockId> pages = manager_.pages_of(live.request.sequence);
        while (!pages.empty() && random_.chance(70)) {
            pages.erase(pages.begin() + static_cast<std::ptrdiff_t>(random_.below(count(pages))));
        }
        return pages;
    }

    void look_up() {
        const std::vector<TokenId> tokens = random_prompt();
        std::vector<BlockId> pages;
        const std::int64_t depth =
            manager_.match(random_replica(), "", tokens.data(), count(tokens), &pages);
        CHECK_EQ(pages.size(), depth);
        CHECK(manager_.recommend_replica("", tokens.data(), count(tokens)) < config_.num_replicas);
        CHECK(manager_.plan(random_.pick(live_).request.view()).new_pages >= 0);
    }

    void look_around() {
        const kvcore::PoolStats stats = manager_.stats(random_replica());
        CHECK(stats.free_pages >= 0 && stats.evictable_pages >= 0);
        CHECK(stats.evictable_pages <= stats.cached_pages);
        CHECK(stats.free_pages + stats.cached_pages <= stats.total_pages);
        CHECK(manager_.metrics().peak_used_pages <= 2 * config_.num_pages);
        const Live& live = random_.pick(live_);
        CHECK(manager_.contains(live.request.sequence));
        CHECK_EQ(manager_.replica_of(live.request.sequence), live.replica);
        CHECK(count(manager_.pages_of(live.request.sequence)) <= stride_);
        std::vector<kvcore::RequestView> views;
        for (const Live& each : live_) views.push_back(each.request.view());
        for (const kvcore::SharedPrefix& group :
             manager_.shared_prefixes({views.data(), count(views)})) {
            CHECK(group.rows.size() > 1 && group.num_tokens > 0);
        }
    }

    Shared& shared_;
    kvcore::CacheManager& manager_;
    const kvcore::CacheConfig config_;
    Random random_;
    std::int64_t stride_;
    std::vector<Live> live_;
    std::vector<kvcore::PinHandle> pins_;
    std::vector<kvcore::HeldPages> holds_;
    kvcore::Transfers transfers_;  // of the last call
    std::vector<std::vector<std::uint32_t>> cells_;
    std::vector<std::vector<std::uint32_t>> lengths_;
    std::vector<std::unique_ptr<kvcore::LookupTable>> tables_;
};

void hammer(bool dedup, std::int64_t host_pages, std::uint64_t seed, std::int64_t num_operations) {
    Shared shared(make_config(dedup, host_pages));
    Random random(seed);
    shared.prompts = random_prompts(random, 4, 30);
    run_together(kThreads, [&](int i) {
        Worker(shared, seed * 1000 + static_cast<std::uint64_t>(i)).run(num_operations);
    });
    shared.manager.check_integrity();
    shared.manager.reset_prefix_cache();
    for (std::int32_t i = 0; i < shared.manager.config().num_replicas; ++i) {
        const kvcore::PoolStats stats = shared.manager.stats(i);
        CHECK_EQ(stats.free_pages, stats.total_pages);
        CHECK_EQ(stats.num_sequences, 0);
        CHECK_EQ(stats.host_cached_pages, 0);
    }
    shared.manager.check_integrity();
    CHECK_EQ(shared.num_loads > 0, host_pages > 0);
    CHECK(shared.num_forgotten > 0);
    std::printf("%lld batches, %lld forks, %lld copies, %lld times no room, %lld loads\n",
                static_cast<long long>(shared.num_batches.load()),
                static_cast<long long>(shared.num_forks.load()),
                static_cast<long long>(shared.num_copies.load()),
                static_cast<long long>(shared.num_refused.load()),
                static_cast<long long>(shared.num_loads.load()));
}

TEST(threads_read_their_own_tokens) {
    const std::uint64_t seed = check::seed_or(16);
    const std::int64_t operations = check::count_or(20'000);
    hammer(true, 0, seed, operations);
    hammer(false, 0, seed + 1, operations);
    hammer(true, 300, seed + 2, operations);
    hammer(false, 60, seed + 3, operations);
}

}  // namespace

}  // namespace tests::stress::threads
