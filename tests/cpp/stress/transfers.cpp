// SPDX-License-Identifier: Apache-2.0
// Threads use one CacheManager and each other's sequences: while one thread copies, other threads
// release, fork, truncate, reset or use the sequence of the copy. Copies fail and leave garbage.
// Page contents are plain memory: ThreadSanitizer reports a race if a page gets a new owner during
// a copy. In every build, a table that shows a sequence other content than its own is an error.
// --count: operations of each thread.
#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "fakes/shared_slots.hpp"
#include "kvcore/errors.hpp"
#include "traffic/store_workers.hpp"
#include "traffic/workers.hpp"

namespace tests::stress::transfers {

namespace {

constexpr int kThreads = 6;
constexpr int kManyThreads = 21;  // 24 with the threads of the stores
constexpr std::int64_t kMaxBatch = 4;

kvcore::CacheConfig make_config(bool dedup, std::int64_t host_pages, bool has_stores,
                                kvcore::WritePolicy policy) {
    kvcore::CacheConfig config;
    config.has_stores = has_stores;
    config.write_policy = policy;
    config.page_size = 4;
    config.num_pages = 24;
    config.max_sequences = Shared::kSlots;
    config.max_seq_len = 40;
    config.num_replicas = 2;
    config.dedup = dedup;
    config.host_pages = host_pages;
    return config;
}

class Worker {
   public:
    Worker(Shared& shared, std::uint64_t seed)
        : shared_(shared),
          manager_(shared.manager),
          config_(manager_.config()),
          random_(seed),
          stride_(kvcore::ceil_div(config_.max_seq_len, config_.page_size)) {
        for (std::int32_t i = 0; i < config_.num_replicas; ++i) {
            cells_.emplace_back(static_cast<std::size_t>(kMaxBatch * stride_));
            lengths_.emplace_back(static_cast<std::size_t>(kMaxBatch));
            tables_.push_back(std::make_unique<kvcore::LookupTable>(cells_.back().data(), kMaxBatch,
                                                                    stride_, ~0U));
        }
    }

    void run(std::int64_t num_operations) {
        for (std::int64_t i = 0; i < num_operations; ++i) act();
        for (const kvcore::PinHandle& pin : pins_) manager_.unpin(pin);
    }

   private:
    using Lock = std::unique_lock<std::mutex>;

    /// Slots of requests that this thread uses now, and the views that it passed to the manager.
    struct Batch {
        std::vector<Slot*> slots;
        std::vector<Lock> locks;
        std::vector<kvcore::RequestView> views;
    };

    void act() {
        const std::int64_t dice = random_.below(1000);
        if (dice < 150) return claim();
        if (dice < 300) return reserve();
        if (dice < 650) return step();
        if (dice < 760) return release();
        if (dice < 820) return fork();
        if (dice < 880) return cut();
        if (dice < 900) return begin_again();
        if (dice < 904) return static_cast<void>(manager_.reset_prefix_cache());
        if (dice < 975) return pin_or_unpin();
        manager_.check_integrity();
    }

    Slot& slot_at(std::int64_t index) {
        return shared_.slots[static_cast<std::size_t>(index % Shared::kSlots)];
    }
    Slot& random_slot() { return slot_at(random_.below(Shared::kSlots)); }
    std::int32_t random_replica() {
        return static_cast<std::int32_t>(random_.below(config_.num_replicas));
    }
    TokenId random_token() { return static_cast<TokenId>(random_.below(3)); }
    std::vector<TokenId> random_prompt() {
        std::vector<TokenId> tokens = random_.pick(shared_.prompts);
        tokens.resize(static_cast<std::size_t>(random_.between(1, count(tokens))));
        for (std::int64_t n = random_.below(6); n > 0; --n) tokens.push_back(random_token());
        return tokens;
    }

    // ---- start and end of requests -----------------------------------
    void claim() {
        Slot& slot = random_slot();
        const Lock lock(slot.mutex, std::try_to_lock);
        if (!lock || slot.request != nullptr) return;
        auto request =
            std::make_unique<Request>(random_.chance(20) ? "other" : "", random_prompt());
        slot.replica = random_replica();
        request->sequence = manager_.claim(slot.replica);
        slot.request = std::move(request);
    }
    void release() {
        Slot& slot = random_slot();
        const Lock lock(slot.mutex);
        if (slot.request != nullptr) release(slot);
    }
    void release(Slot& slot) {
        manager_.release(slot.request->sequence);
        slot.request.reset();
    }
    void fork() {
        const std::int64_t index = random_.below(Shared::kSlots);
        Slot& parent = slot_at(index);
        Slot& child = slot_at(index + random_.between(1, 2));
        const Lock first(parent.mutex, std::try_to_lock);
        const Lock second(child.mutex, std::try_to_lock);
        if (!first || !second || parent.request == nullptr || child.request != nullptr) return;
        if (parent.request->end() + 2 > config_.max_seq_len) return;
        auto request = std::make_unique<Request>(*parent.request);
        request->append(random_token());
        kvcore::RequestView view = request->view();
        try {
            manager_.fork(parent.request->view(), {&view, 1});
        } catch (const kvcore::PendingTransfersError&) {
            return note_refusal();
        }
        request->sequence = view.sequence;
        request->start = view.start;
        request->active = view.active;
        child.replica = parent.replica;
        child.request = std::move(request);
    }
    void cut() {
        Slot& slot = random_slot();
        const Lock lock(slot.mutex);
        if (slot.request == nullptr) return;
        const std::int64_t start = slot.request->start;
        const std::int64_t n = random_.between(random_.chance(50) ? 0 : start - start % 4, start);
        try {
            manager_.truncate(slot.request->sequence, n);
        } catch (const kvcore::PendingTransfersError&) {
            return note_refusal();
        } catch (const std::invalid_argument&) {
            return;  // not fetched yet
        }
        slot.request->rewind(std::max<std::int64_t>(n, 1));
    }
    void begin_again() {
        Slot& slot = random_slot();
        const Lock lock(slot.mutex);
        if (slot.request == nullptr) return;
        try {
            manager_.begin_again(slot.request->sequence);
        } catch (const kvcore::PendingTransfersError&) {
            return note_refusal();
        }
        slot.request->start = 0;
        slot.request->active = slot.request->end();
    }
    void note_refusal() { shared_.num_refused.fetch_add(1, std::memory_order_relaxed); }

    // ---- batches ----------------------------------------
    // Take neighbouring slots, which are often forks of each other.
    Batch take_batch(std::int64_t most) {
        Batch batch;
        std::int64_t index = random_.below(Shared::kSlots);
        for (std::int64_t i = random_.between(1, most); i > 0; --i) {
            Slot& slot = slot_at(index++);
            Lock lock(slot.mutex, std::try_to_lock);
            if (!lock || slot.request == nullptr) continue;
            batch.slots.push_back(&slot);
            batch.locks.push_back(std::move(lock));
            batch.views.push_back(slot.request->view());
        }
        return batch;
    }
    static void take_over(const Batch& batch) {
        for (std::size_t i = 0; i < batch.slots.size(); ++i) {
            batch.slots[i]->request->start = batch.views[i].start;
            batch.slots[i]->request->active = batch.views[i].active;
        }
    }

    void reserve() {
        Batch batch = take_batch(2);
        if (batch.slots.empty()) return;
        transfers_.clear();
        const kvcore::BatchReserve part = manager_.reserve_batch(
            {batch.views.data(), count(batch.views)}, random_.between(1, 2), &transfers_);
        take_over(batch);
        if (!transfers_.empty()) return transfer(batch);
        if (part.status == kvcore::ReserveStatus::kPending) return help(batch, part.reserved);
        if (part.status == kvcore::ReserveStatus::kNoSpace) release(*random_.pick(batch.slots));
    }

    void step() {
        Batch batch = take_batch(kMaxBatch);
        if (batch.slots.empty()) return;
        std::vector<kvcore::FetchTarget> targets(tables_.size());
        for (std::size_t i = 0; i < tables_.size(); ++i) {
            targets[i].table = tables_[i].get();
            targets[i].cache_lengths = lengths_[i].data();
        }
        transfers_.clear();
        const kvcore::FetchResult result = manager_.fetch({batch.views.data(), count(batch.views)},
                                                          1, targets.data(), &transfers_);
        take_over(batch);
        if (!transfers_.empty()) {
            CHECK_EQ(result.status, kvcore::FetchStatus::kPending);
            return transfer(batch);
        }
        if (result.status == kvcore::FetchStatus::kPending) return help(batch, result.row);
        if (result.status != kvcore::FetchStatus::kOk) return release(*random_.pick(batch.slots));
        std::vector<std::int64_t> next_row(tables_.size());
        for (const Slot* slot : batch.slots) run(*slot, item(next_row, slot->replica)++);
        shared_.num_batches.fetch_add(1, std::memory_order_relaxed);
        commit(batch);
    }

    // Read the written tokens and write the new tokens, as kernels do with the table's row.
    void run(const Slot& slot, std::int64_t row) {
        Request& request = *slot.request;
        std::vector<BlockId> ids;
        for (std::int64_t c = 0; c < kvcore::ceil_div(request.end(), config_.page_size); ++c) {
            ids.push_back(
                static_cast<BlockId>(item(item(cells_, slot.replica), row * stride_ + c)));
        }
        shared_.memory.check_contents(slot.replica, ids, request, request.start);
        shared_.memory.write(slot.replica, ids, request, request.start, request.active);
        request.start = request.active;
        if (request.active == request.end()) request.append(random_token());
        request.active = request.end();
    }

    void commit(Batch& batch) {
        for (std::size_t i = 0; i < batch.slots.size(); ++i) {
            batch.views[i] = batch.slots[i]->request->view();
        }
        std::vector<kvcore::PageSwap> swaps;
        transfers_.clear();
        manager_.commit({batch.views.data(), count(batch.views)}, swaps, &transfers_);
        for (Slot* slot : batch.slots) {
            if (slot->request->end() + 2 > config_.max_seq_len) release(*slot);
        }
        transfer(batch);
    }

    // ---- transfers ----------------------------------------
    /// Make the transfers of the last call, while other threads may use the batch.
    void transfer(Batch& batch) {
        batch.locks.clear();
        if (transfers_.empty()) return;
        const bool is_done = !random_.chance(10);
        for (const kvcore::PageMove& copy : transfers_.copies) {
            shared_.memory.copy(copy);
            if (!is_done) spoil(shared_.memory.page(copy.replica, copy.destination));
        }
        std::int64_t loads = 0;
        for (const kvcore::PageMove& copy : transfers_.tier_moves) {
            Digest* from = shared_.memory.page(copy.replica, copy.page_in(kvcore::Tier::kDevice));
            Digest* to = shared_.host.page(copy.replica, copy.page_in(kvcore::Tier::kHost));
            const bool is_load = copy.is_load();
            if (is_load) std::swap(from, to);
            if (random_.chance(20)) std::this_thread::yield();
            std::copy(from, from + config_.page_size, to);
            if (!is_done) spoil(to);
            loads += is_load ? 1 : 0;
        }
        if (random_.chance(50)) std::this_thread::yield();
        note_transfers(is_done, loads);
        if (is_done || loads == 0) return manager_.finish(transfers_.ticket, is_done);
        set_back(batch);
    }
    void spoil(Digest* page) { std::fill(page, page + config_.page_size, Digest{0}); }
    void note_transfers(bool is_done, std::int64_t loads) {
        const auto add = [](std::atomic<std::int64_t>& to, std::int64_t n) {
            to.fetch_add(n, std::memory_order_relaxed);
        };
        add(shared_.num_copies, count(transfers_.copies));
        add(shared_.num_loads, loads);
        add(shared_.num_stores, count(transfers_.tier_moves) - loads);
        add(shared_.num_failed, is_done ? 0 : 1);
    }
    /// Loads failed: set each request that lost its pages back to its position before the call.
    /// Other threads may have truncated these requests meanwhile.
    void set_back(const Batch& batch) {
        std::vector<Slot*> slots = batch.slots;
        std::sort(slots.begin(), slots.end());
        std::vector<Lock> locks;
        for (Slot* slot : slots) locks.emplace_back(slot->mutex);
        manager_.finish(transfers_.ticket, false);
        for (const kvcore::MovedRequest& moved : transfers_.moved) {
            Request* request = item(batch.slots, moved.row)->request.get();
            const kvcore::SequenceHandle sequence = item(batch.views, moved.row).sequence;
            if (request == nullptr || request->sequence != sequence) continue;
            if (!manager_.pages_of(sequence).empty()) continue;
            request->start = moved.start;
            request->active = std::min(moved.active, request->end());
        }
    }
    /// Another thread makes the copy that a row waits for, or the copy is owed: then this thread
    /// makes it.
    void help(Batch& batch, std::int64_t row) {
        const kvcore::SequenceHandle sequence = item(batch.views, row).sequence;
        transfers_.clear();
        const kvcore::OwedStatus owed = manager_.take_owed(sequence, transfers_);
        if (owed == kvcore::OwedStatus::kTaken) {
            shared_.num_owed.fetch_add(1, std::memory_order_relaxed);
            return transfer(batch);
        }
        batch.locks.clear();
        if (owed == kvcore::OwedStatus::kNone) return;
        shared_.num_waits.fetch_add(1, std::memory_order_relaxed);
        manager_.wait(sequence);
    }

    void pin_or_unpin() {
        if (pins_.size() >= 3 || (!pins_.empty() && random_.chance(60))) {
            manager_.unpin(pins_.back());
            return pins_.pop_back();
        }
        const std::vector<TokenId> tokens = random_prompt();
        pins_.push_back(manager_.pin(random_replica(), "", tokens.data(), count(tokens)));
    }

    Shared& shared_;
    kvcore::CacheManager& manager_;
    const kvcore::CacheConfig config_;
    Random random_;
    std::int64_t stride_;
    kvcore::Transfers transfers_;  // of the last call
    std::vector<kvcore::PinHandle> pins_;
    std::vector<std::vector<std::uint32_t>> cells_;
    std::vector<std::vector<std::uint32_t>> lengths_;
    std::vector<std::unique_ptr<kvcore::LookupTable>> tables_;
};

void hammer(bool dedup, std::int64_t host_pages, bool has_stores, std::uint64_t seed,
            std::int64_t num_operations,
            kvcore::WritePolicy policy = kvcore::WritePolicy::kWriteThrough,
            int num_threads = kThreads) {
    Shared shared(make_config(dedup, host_pages, has_stores, policy));
    SharedStore store;
    Random random(seed);
    shared.prompts = random_prompts(random, 4, 28);
    run_together(has_stores ? num_threads + 3 : num_threads, [&](int i) {
        const std::uint64_t own = seed * 1000 + static_cast<std::uint64_t>(i);
        if (i < num_threads) return Worker(shared, own).run(num_operations);
        StoreWorker worker(shared, store, own);
        return i == num_threads ? worker.write(num_operations) : worker.fill(num_operations);
    });
    if (has_stores) {
        StoreWorker(shared, store, seed).drain();
        CHECK(store.num_written > 0 && store.num_filled > 0);
        std::cout << store.num_written << " columns written, " << store.num_filled << " filled\n";
    }
    shared.manager.check_integrity();
    for (const Slot& slot : shared.slots) {
        if (slot.request != nullptr) shared.manager.release(slot.request->sequence);
    }
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
    report(shared);
}

TEST(threads_transfer_each_others_pages) {
    const std::uint64_t seed = check::seed_or(29);
    const std::int64_t operations = check::count_or(10'000);
    hammer(true, 0, false, seed, operations);
    hammer(false, 0, false, seed + 1, operations);
    hammer(true, 200, false, seed + 2, operations);
    hammer(false, 50, false, seed + 3, operations);
    hammer(true, 200, true, seed + 4, operations);
    hammer(false, 30, true, seed + 5, operations);
    hammer(true, 100, true, seed + 8, operations / 4, kvcore::WritePolicy::kWriteThrough,
           kManyThreads);
    for (const bool dedup : {true, false}) {
        hammer(dedup, 100, dedup, seed + 6, operations / 2, kvcore::WritePolicy::kWriteBack);
        hammer(dedup, 100, dedup, seed + 7, operations / 2, kvcore::WritePolicy::kSelective);
    }
}

}  // namespace

}  // namespace tests::stress::transfers
