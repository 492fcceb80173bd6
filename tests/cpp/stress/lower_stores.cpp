// SPDX-License-Identifier: Apache-2.0
// Threads serve prompts with a manager above a small disk that fails at random. Other threads write
// the pages that arrive in the host tier, and reset the caches. Each page that a request gets has
// the bytes of its key. --count: requests of each thread.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "fakes/disk_scene.hpp"
#include "kvcore/disk_lower_store.hpp"
#include "kvcore/errors.hpp"
#include "kvcore/store_reader.hpp"
#include "kvcore/store_writer.hpp"
#include "support/store_fixture.hpp"

namespace tests::stress::lower_stores {

using kvcore::PageKey;
using kvcore::PageMove;
using kvcore::Tier;

namespace {

constexpr std::int64_t kBytes = 512;
constexpr std::int64_t kHostPages = 10;
constexpr std::int64_t kPage = 2;
constexpr int kThreads = 4;

class NoHooks final : public kvcore::StoreHooks {
   public:
    void prepare(const kvcore::StoreMoves& /*fill*/) override {}
    bool make_room() override { return false; }
    void check_interrupt() override {}
};

/// The bytes of a page, from its key.
std::vector<std::byte> bytes_of(const PageKey& key) {
    std::vector<std::byte> bytes(kBytes);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = static_cast<std::byte>(key[i % key.size()] + i / key.size());
    }
    return bytes;
}

kvcore::CacheConfig manager_config() {
    kvcore::CacheConfig config = HostFixture::config(20, kHostPages);
    config.has_stores = true;
    return config;
}

// No transfer counts as slow, although the clock jumps.
DiskStoreConfig store_config(const std::string& path) {
    DiskStoreConfig config = disk_config(path, kBytes, 40);
    config.slow_seconds = 1e8;
    return config;
}

struct Shared {
    Shared() : disk(store_config(directory.path)) {}
    [[nodiscard]] std::byte* row(BlockId page) { return rows.data() + page * kBytes; }

    TemporaryDirectory directory;
    FaultyScene disk;
    std::vector<std::byte> rows = std::vector<std::byte>(kHostPages * kBytes);
    kvcore::CacheManager manager{manager_config()};
    kvcore::DiskLowerStore store{*disk.store, {{{rows.data(), kHostPages, kBytes}, {}}}, false, 5};
    NoHooks hooks;
    kvcore::StoreReader reader{manager, {&store}, hooks, {kBytes, 0, 2 * kBytes, 5}};
    kvcore::StoreWriter writer{manager, {&store}};
    std::atomic<std::int64_t> loaded{0};
    std::atomic<bool> is_over{false};
};

/// A request of a thread.
class Served {
   public:
    Served(Shared& shared, const Tokens& tokens) : shared_(shared), request_("", tokens) {
        kvcore::KeyChain chain(kPage, {});
        chain.extend(tokens.data(), count(tokens));
        keys_ = chain.keys();
        search();
        request_.sequence = shared_.manager.claim();
    }
    Served(const Served&) = delete;
    Served& operator=(const Served&) = delete;
    ~Served() { shared_.manager.release(request_.sequence); }

    void run() {
        kvcore::RequestView view = request_.view();
        kvcore::Transfers transfers;
        if (shared_.manager.reserve(view, 1, &transfers) != kvcore::ReserveStatus::kOk) return;
        copy(transfers, shared_.manager.pages_of(request_.sequence));
        const std::vector<BlockId> pages = shared_.manager.pages_of(request_.sequence);
        view.start = view.end - 1;
        view.active = view.end;
        std::vector<kvcore::PageSwap> swaps;
        kvcore::Transfers stores;
        shared_.manager.commit({&view, 1}, swaps, &stores);
        std::vector<BlockId> all = pages;  // a store reads the own page or the cached page
        all.insert(all.end(), pages.begin(), pages.end());
        for (const kvcore::PageSwap& swap : swaps)
            item(all, count(pages) + swap.column) = swap.page;
        copy(stores, all);
    }

   private:
    void search() {
        const Tokens& tokens = request_.tokens();
        const kvcore::StoreSearch found =
            shared_.manager.search_below(0, "", tokens.data(), count(tokens) - 1);
        if (found.most == 0) return;
        kvcore::NextColumn next;
        next.keys.assign(keys_.begin() + found.stored, keys_.begin() + found.have + 1);
        if (!shared_.reader.has(next)) return;
        kvcore::LowerSearch search(shared_.manager, found, "", tokens.data(), std::move(next));
        shared_.reader.load(search);
    }
    // Checks the bytes of loaded pages, and writes the bytes of stored pages.
    void copy(const kvcore::Transfers& transfers, const std::vector<BlockId>& pages) {
        for (const PageMove& move : transfers.tier_moves) {
            const auto at = std::find(pages.begin(), pages.end(), move.page_in(Tier::kDevice));
            CHECK(at != pages.end());
            const std::int64_t columns = request_.end() / kPage;
            const auto column = (at - pages.begin()) % (columns + 1);
            const auto bytes = bytes_of(item(keys_, column));
            std::byte* const row = shared_.row(move.page_in(Tier::kHost));
            if (move.is_load()) {
                CHECK(std::memcmp(row, bytes.data(), bytes.size()) == 0);
                ++shared_.loaded;
            } else {
                std::memcpy(row, bytes.data(), bytes.size());
            }
        }
        if (!transfers.empty()) shared_.manager.finish(transfers.ticket, true);
    }

    Shared& shared_;
    Request request_;
    Keys keys_;
};

Tokens some_prompt(Random& random) {
    Tokens tokens = count_up(10, 4);
    const auto branch = static_cast<TokenId>(100 * (1 + random.below(8)));
    for (TokenId i = 0; i < 9; ++i) tokens.push_back(branch + i);
    return tokens;
}

void serve(Shared& shared, std::uint64_t seed, std::int64_t requests) {
    Random random(seed);
    for (std::int64_t i = 0; i < requests; ++i) {
        try {
            Served(shared, some_prompt(random)).run();
        } catch (const kvcore::PendingTransfersError&) {  // another request copies its pages
            std::this_thread::yield();
        }
    }
}

void write(Shared& shared) {
    kvcore::StoreWriter::Batch batch;
    while (!shared.is_over) {
        if (shared.writer.take(3, batch)) {
            static_cast<void>(shared.writer.write(batch));
            shared.writer.finish(batch);
        } else {
            std::this_thread::yield();
        }
    }
}

void disturb(Shared& shared, std::uint64_t seed) {
    Random random(seed);
    while (!shared.is_over) {
        shared.disk.ops->read_error = random.chance(10) ? EIO : 0;
        shared.disk.ops->write_error = random.chance(10) ? ENOSPC : 0;
        shared.disk.now += 20'000'000'000;  // the breaker tries the disk again
        if (random.chance(1)) {
            shared.reader.forget();
            shared.writer.forget();
            shared.manager.reset_prefix_cache();
            shared.disk.store->clear();
        }
        std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
}

TEST(threads_load_and_write_right_pages) {
    const std::uint64_t seed = check::seed_or(28);
    const std::int64_t requests = check::count_or(check::rounds(20000));
    Shared shared;
    std::vector<std::thread> threads;
    for (std::uint64_t i = 0; i < kThreads; ++i) {
        threads.emplace_back([&shared, i, seed, requests] { serve(shared, seed + i, requests); });
    }
    std::thread writing([&] { write(shared); });
    std::thread disturbing([&] { disturb(shared, seed + 100); });
    for (std::thread& thread : threads) thread.join();
    shared.is_over = true;
    writing.join();
    disturbing.join();
    CHECK(shared.reader.close(60));
    CHECK(shared.loaded > 0);
    CHECK(shared.disk.store->stats().hits > 0);
    shared.manager.check_integrity();
    shared.disk.store->check_integrity();
}

}  // namespace

}  // namespace tests::stress::lower_stores
