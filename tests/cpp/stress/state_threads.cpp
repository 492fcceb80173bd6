// SPDX-License-Identifier: Apache-2.0
// Eight threads use one manager with states, each for its own sequences, over the same few prompts.
// Slots are plain memory: ThreadSanitizer reports a race if a slot is written while another thread
// may read it. In every build, a request that continues from a state of other tokens is an error.
// --count: operations of a thread.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "kvcore/errors.hpp"
#include "support/check.hpp"
#include "support/group_probe.hpp"
#include "support/random.hpp"
#include "traffic/workers.hpp"

namespace tests::stress::state_threads {

namespace {

constexpr int kThreads = 8;
constexpr std::int64_t kMaxLive = 3;  // sequences of one thread

/// The data that all threads share.
struct Shared {
    explicit Shared(const kvcore::CacheConfig& config)
        : manager(config),
          slots(static_cast<std::size_t>(config.num_state_slots)),
          host_slots(static_cast<std::size_t>(config.num_host_state_slots)) {}

    kvcore::CacheManager manager;
    std::vector<Digest> slots;
    std::vector<Digest> host_slots;
    std::vector<std::vector<TokenId>> prompts;  // constant once the threads run
    std::atomic<std::int64_t> num_steps{0};
    std::atomic<std::int64_t> num_hits{0};
    std::atomic<std::int64_t> num_refused{0};
};

class Worker {
   public:
    Worker(Shared& shared, std::uint64_t seed)
        : shared_(shared), manager_(shared.manager), random_(seed), cells_(kStride) {}

    void run(std::int64_t num_operations) {
        for (std::int64_t i = 0; i < num_operations; ++i) act();
        while (!live_.empty()) drop(live_.back());
        for (const kvcore::PinHandle& pin : pins_) manager_.unpin(pin);
    }

   private:
    static constexpr std::int64_t kStride = 128;

    void act() {
        const std::int64_t dice = random_.below(1000);
        if (live_.empty() || (dice < 150 && count(live_) < kMaxLive)) return claim();
        if (dice < 650) return step();
        if (dice < 750) return drop(random_.pick(live_));
        if (dice < 800) return pin_or_unpin();
        if (dice < 870) return fork();
        if (dice < 950) return truncate();
        if (dice < 953) return static_cast<void>(manager_.reset_prefix_cache());
        if (dice < 956) return manager_.check_integrity();
        static_cast<void>(manager_.match(random_.pick(live_).view()));
    }
    std::vector<TokenId> prompt() {
        std::vector<TokenId> tokens = random_.pick(shared_.prompts);
        tokens.resize(static_cast<std::size_t>(random_.between(1, count(tokens))));
        for (std::int64_t n = random_.below(6); n > 0; --n) {
            tokens.push_back(static_cast<TokenId>(random_.below(3)));
        }
        return tokens;
    }
    void claim() {
        Request request("", prompt());
        request.sequence = manager_.claim();
        request.active = random_.between(1, request.end());
        live_.push_back(request);
    }
    Digest& slot(std::int32_t index) { return item(shared_.slots, index); }
    Digest& slot_in(kvcore::Tier tier, std::int32_t index) {
        return tier == kvcore::Tier::kHost ? item(shared_.host_slots, index) : slot(index);
    }
    void copy(const std::vector<kvcore::StateMove>& moves, bool done) {
        for (const kvcore::StateMove& move : moves) {
            const Digest content = slot_in(move.source_tier, move.source);
            slot_in(move.destination_tier, move.destination) = done ? content : 1;
        }
    }
    // Return false if the transfers fail.
    bool transfer(const kvcore::Transfers& transfers) {
        if (transfers.empty()) return true;
        const bool done = random_.chance(95);
        copy(transfers.state_copies, done);
        copy(transfers.state_moves, done);
        manager_.finish(transfers.ticket, done);
        return done;
    }
    // Take the owed copies of a request. Other threads end the transfers that they began with its
    // slot.
    void settle(const Request& request) {
        kvcore::Transfers owed;
        const auto found = manager_.take_owed(request.sequence, owed);
        transfer(owed);
        if (found == kvcore::OwedStatus::kUnderWay) manager_.wait(request.sequence);
    }
    static bool is_load(const kvcore::Transfers& transfers) {
        const auto loads = [](const auto& move) { return move.is_load(); };
        return std::any_of(transfers.tier_moves.begin(), transfers.tier_moves.end(), loads) ||
               std::any_of(transfers.state_moves.begin(), transfers.state_moves.end(), loads);
    }
    // Run a random request.
    void step() {
        Request& request = random_.pick(live_);
        kvcore::RequestView view = request.view();
        kvcore::LookupTable table(cells_.data(), 1, kStride, ~0U);
        std::uint32_t length = 0;
        std::int32_t state = -1;
        kvcore::FetchTarget target;
        target.table = &table;
        target.cache_lengths = &length;
        target.states = &state;
        kvcore::FetchResult result;
        do {
            kvcore::Transfers transfers;
            result = manager_.fetch({&view, 1}, 1, &target, &transfers);
            const bool is_lost = !transfer(transfers) && is_load(transfers);
            if (is_lost) view = request.view();  // the request is in the state of a new claim
            settle(request);
        } while (result.status == kvcore::FetchStatus::kPending);
        if (view.start > request.start) shared_.num_hits.fetch_add(1, std::memory_order_relaxed);
        request.start = view.start;
        request.active = view.active;
        if (result.status != kvcore::FetchStatus::kOk) {
            shared_.num_refused.fetch_add(1, std::memory_order_relaxed);
            return drop(request);
        }
        if (view.start > 0) CHECK_EQ(slot(state), request.digest(view.start));
        slot(state) = request.digest(view.active);
        request.start = request.active;
        if (request.start == request.end()) {
            request.append(static_cast<TokenId>(random_.below(3)));
        }
        request.active = random_.between(request.start + 1, request.end());
        commit(request);
    }
    void commit(Request& request) {
        kvcore::RequestView written = request.view();
        std::vector<kvcore::PageSwap> swaps;
        kvcore::Transfers transfers;
        manager_.commit({&written, 1}, swaps, &transfers);
        transfer(transfers);
        shared_.num_steps.fetch_add(1, std::memory_order_relaxed);
        if (!has_room(request.end())) drop(request);
    }
    /// Return true if a request of `num_tokens` may continue, and grow by two more tokens.
    bool has_room(std::int64_t num_tokens) const {
        return num_tokens + 2 <= manager_.config().max_seq_len;
    }
    void drop(Request& request) {
        manager_.release(request.sequence);
        live_.erase(live_.begin() + (&request - live_.data()));
    }
    void fork() {
        if (count(live_) >= kMaxLive) return;
        const Request& parent = random_.pick(live_);
        if (!has_room(parent.end() + 1)) return;
        Request child = parent;
        child.append(static_cast<TokenId>(random_.below(3)));
        kvcore::RequestView view = child.view();
        view.start = 0;
        kvcore::Transfers transfers;
        try {
            manager_.fork(parent.view(), {&view, 1}, &transfers);
        } catch (const std::invalid_argument&) {
            return;  // the request was fetched and lost its pages
        } catch (const kvcore::CapacityError&) {
            return;
        } catch (const kvcore::PendingTransfersError&) {
            return;
        }
        transfer(transfers);
        child.sequence = view.sequence;
        child.start = view.start;
        child.active = view.active;
        live_.push_back(child);
    }
    void truncate() {
        Request& request = random_.pick(live_);
        const std::int64_t n = random_.below(request.start + 1) / 4 * 4;
        kvcore::Transfers transfers;
        try {
            manager_.truncate(request.sequence, n, &transfers);
        } catch (const std::invalid_argument&) {
            return;
        } catch (const kvcore::PendingTransfersError&) {
            return;
        }
        transfer(transfers);
        if (n >= request.start) return;
        request.start = n;
        request.rewind(n + 1);
    }
    void pin_or_unpin() {
        if (pins_.size() >= 2 || (!pins_.empty() && random_.chance(60))) {
            manager_.unpin(pins_.back());
            return pins_.pop_back();
        }
        const std::vector<TokenId> tokens = prompt();
        pins_.push_back(manager_.pin(0, "", tokens.data(), count(tokens)));
    }

    Shared& shared_;
    kvcore::CacheManager& manager_;
    Random random_;
    std::vector<std::uint32_t> cells_;
    std::vector<Request> live_;
    std::vector<kvcore::PinHandle> pins_;
};

void hammer(std::int64_t interval, std::int64_t num_slots, std::int64_t num_pages,
            std::int64_t host_slots, std::uint64_t seed, std::int64_t num_operations,
            kvcore::WritePolicy policy = kvcore::WritePolicy::kWriteThrough) {
    kvcore::CacheConfig config;
    config.write_policy = policy;
    config.page_size = 4;
    config.num_pages = num_pages;
    config.max_sequences = kThreads * kMaxLive;
    config.max_seq_len = 48;
    config.states = {{interval}};
    config.num_state_slots = num_slots;
    config.host_pages = 10 * host_slots;
    config.num_host_state_slots = host_slots;
    Shared shared(config);
    Random random(seed);
    shared.prompts = random_prompts(random, 4, 30);
    run_together(kThreads, [&](int i) {
        Worker(shared, seed * 1000 + static_cast<std::uint64_t>(i)).run(num_operations);
    });
    shared.manager.check_integrity();
    shared.manager.reset_prefix_cache();
    CHECK_EQ(shared.manager.stats(0).free_pages, num_pages);
    CHECK_EQ(shared.manager.state_stats(0).available_slots, num_slots);
    CHECK_EQ(shared.manager.state_stats(0).host_checkpoints, 0);
    const kvcore::StateStats stats = shared.manager.state_stats(0);
    CHECK(host_slots == 0 || stats.stored_checkpoints > 0);
    // The number of loaded checkpoints depends on the speed of the threads.
    // tests/cpp/level/state_tier.cpp checks that loads work.
    std::printf("%lld steps, %lld hits, %lld times no room, %lld checkpoints loaded\n",
                static_cast<long long>(shared.num_steps.load()),
                static_cast<long long>(shared.num_hits.load()),
                static_cast<long long>(shared.num_refused.load()),
                static_cast<long long>(stats.loaded_checkpoints));
}

TEST(threads_read_their_own_states) {
    const std::uint64_t seed = check::seed_or(17);
    const std::int64_t operations = check::count_or(4'000);
    hammer(0, 40, 120, 0, seed, operations);
    hammer(8, 24, 60, 0, seed + 1, operations);
    hammer(8, 25, 40, 12, seed + 2, operations);
    hammer(8, 25, 40, 12, seed + 3, operations / 2, kvcore::WritePolicy::kWriteBack);
    hammer(8, 25, 40, 12, seed + 4, operations / 2, kvcore::WritePolicy::kSelective);
}

}  // namespace

}  // namespace tests::stress::state_threads
