// SPDX-License-Identifier: Apache-2.0
// Threads put, get, remove and clear pages of one small store, whose disk fails at random. Each
// thread checks the bytes that it reads. --count: operations of each thread.
#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "fakes/disk_scene.hpp"
#include "kvcore/errors.hpp"

namespace tests::stress::disk_store {

namespace {

constexpr int kThreads = 6;
constexpr std::int64_t kBytes = 3000;
constexpr std::int64_t kKeys = 24;

struct Shared {
    explicit Shared(const DiskStoreConfig& config) : scene(config) {}
    FaultyScene scene;
    std::atomic<std::int64_t> served{0};
    std::atomic<std::int64_t> closed{0};
};

std::vector<std::uint64_t> some_pages(Random& random) {
    std::vector<std::uint64_t> numbers(static_cast<std::size_t>(random.between(1, 4)));
    for (std::uint64_t& number : numbers) number = static_cast<std::uint64_t>(random.below(kKeys));
    return numbers;
}

void act(Shared& shared, Random& random) {
    Pages pages(*shared.scene.store, kBytes);
    const std::vector<std::int32_t> parts =
        random.chance(70) ? std::vector<std::int32_t>{0} : std::vector<std::int32_t>{0, 1};
    switch (random.below(12)) {
        case 0:
            if (random.chance(10)) shared.scene.store->clear();
            shared.scene.store->remove({key_of(static_cast<std::uint64_t>(random.below(kKeys)))});
            break;
        case 1:
            shared.scene.ops->read_error = random.chance(20) ? EIO : 0;
            shared.scene.ops->write_error = random.chance(20) ? ENOSPC : 0;
            break;
        case 2:
            shared.scene.now += 20'000'000'000;
            CHECK(shared.scene.store->stats().stored <= 12);
            break;
        case 3:
        case 4:
        case 5:
        case 6:
            pages.put(some_pages(random), parts);
            break;
        default:
            shared.served += pages.get(some_pages(random), parts);
    }
}

void work(Shared& shared, std::uint64_t seed, int operations) {
    Random random(seed);
    try {
        for (int i = 0; i < operations; ++i) act(shared, random);
    } catch (const kvcore::Error&) {  // another thread has closed the store
        ++shared.closed;
    }
}

void run(std::uint64_t seed, int operations, bool close_early) {
    const TemporaryDirectory first;
    const TemporaryDirectory second;
    DiskStoreConfig config = disk_config(first.path, 2 * kBytes, 6);
    config.directories.push_back(config.directories[0]);
    config.directories[1].path = second.path;
    config.queue_pages = 4;
    Shared shared(config);
    {
        std::vector<std::thread> threads;
        for (std::uint64_t i = 0; i < kThreads; ++i) {
            threads.emplace_back([&, i] { work(shared, seed * 100 + i, operations); });
        }
        if (close_early) {
            while (shared.served < 20 && shared.closed == 0) std::this_thread::yield();
            shared.scene.store->close();
        }
        for (std::thread& thread : threads) thread.join();
    }
    CHECK_EQ(shared.closed > 0, close_early);
    shared.scene.store->check_integrity();
    shared.scene.store->close();
    shared.scene.ops->read_error = shared.scene.ops->write_error = 0;
    shared.scene.open();
    Pages pages(*shared.scene.store, kBytes);
    std::int64_t found = 0;
    for (std::uint64_t number = 0; number < kKeys; ++number) found += pages.get({number});
    CHECK(shared.served > 0 && found <= 12);
}

TEST(threads_get_the_pages_they_put) {
    const std::uint64_t seed = check::seed_or(5);
    const auto operations = static_cast<int>(check::count_or(400));
    run(seed, operations, false);
    run(seed + 1, 1'000'000, true);
}

}  // namespace

}  // namespace tests::stress::disk_store
