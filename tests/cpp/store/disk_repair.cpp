// SPDX-License-Identifier: Apache-2.0
// A disk that fails in part, or for some time, loses only the pages that it failed on.
#include <cerrno>
#include <thread>
#include <vector>

#include "fakes/disk_scene.hpp"
#include "kvcore/errors.hpp"

namespace tests::store::disk_repair {

using kvcore::BreakerState;

namespace {

constexpr std::int64_t kBytes = 5000;
constexpr std::int64_t kSlot = 4096 + 8192;
constexpr std::int64_t kSecond = 1'000'000'000;

TEST(bad_slots_are_left_alone) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 4));
    scene.ops->bad_from = 0;
    scene.ops->bad_to = kSlot;
    Pages pages(*scene.store, kBytes);
    CHECK_EQ(pages.put({1}), 0);
    CHECK_EQ(scene.store->stats().broken, 1);
    for (std::uint64_t number = 1; number < 20; ++number) {
        CHECK_EQ(pages.put({number}), 1);
        CHECK_EQ(pages.get({number}), 1);
    }
    CHECK_EQ(scene.store->stats().stored, 3);
    CHECK_EQ(scene.store->stats().broken, 1);
    CHECK(scene.store->stats().breaker == BreakerState::kClosed);
    scene.store->check_integrity();
    scene.ops->bad_to = 0;
    scene.open();
    Pages again(*scene.store, kBytes);
    CHECK_EQ(scene.store->stats().broken, 0);
    CHECK_EQ(again.put({30}), 1);
    CHECK_EQ(again.get({17, 18, 19, 30}), 4);
}

TEST(a_write_that_fails_counts_once) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 8));
    Pages pages(*scene.store, kBytes);
    scene.ops->write_error = EIO;
    for (std::uint64_t number = 0; number < 4; ++number) CHECK_EQ(pages.put({number}), 0);
    CHECK(scene.store->stats().breaker == BreakerState::kClosed);  // it opens after five failures
    CHECK_EQ(pages.put({4}), 0);
    CHECK(scene.store->stats().breaker == BreakerState::kOpen);
}

TEST(a_disk_that_was_away_comes_back) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 8));
    Pages pages(*scene.store, kBytes);
    scene.ops->write_error = EIO;
    for (std::uint64_t number = 0; number < 20; ++number) {
        CHECK_EQ(pages.put({number}), 0);
        scene.now += 11 * kSecond;
    }
    scene.ops->write_error = 0;
    for (std::uint64_t number = 0; number < 20; ++number) CHECK_EQ(pages.put({number}), 1);
    CHECK(scene.store->stats().stored >= 4);
    scene.store->check_integrity();
}

TEST(pages_that_cannot_be_read_are_written_elsewhere) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 4));
    Pages pages(*scene.store, kBytes);
    for (std::uint64_t number = 0; number < 3; ++number) CHECK_EQ(pages.put({number}), 1);
    scene.ops->bad_from = 0;  // page 0
    scene.ops->bad_to = kSlot;
    CHECK_EQ(pages.get({0}), 0);
    CHECK_EQ(pages.put({0}), 1);
    CHECK_EQ(scene.store->stats().written, 4);
    CHECK_EQ(scene.store->stats().broken, 1);
    for (int i = 0; i < 10; ++i) CHECK_EQ(pages.get({0, 1, 2}), 3);
    for (std::uint64_t number = 10; number < 20; ++number) {
        CHECK_EQ(pages.put({number}), 1);
        CHECK_EQ(pages.get({number}), 1);
    }
    scene.store->check_integrity();
    scene.ops->bad_to = 0;
    CHECK_EQ(pages.put({0, 1, 2}), 3);
    scene.ops->read_error = EIO;
    CHECK_EQ(pages.get({1}), 0);
    scene.ops->read_error = 0;
    CHECK_EQ(pages.get({1}), 1);  // the disk had failed, not the page
    CHECK_EQ(pages.put({1}), 1);
    CHECK_EQ(scene.store->stats().broken, 1);
}

TEST(evicted_pages_that_cannot_be_read_leave_their_slots_alone) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 3));
    Pages pages(*scene.store, kBytes);
    for (std::uint64_t number = 0; number < 3; ++number) CHECK_EQ(pages.put({number}), 1);
    scene.ops->read_error = EIO;
    CHECK_EQ(pages.get({0}), 0);
    scene.ops->read_error = 0;
    CHECK_EQ(pages.get({1, 2}), 2);
    CHECK_EQ(pages.put({3}), 1);
    CHECK_EQ(scene.store->stats().broken, 1);
    CHECK(!pages.has(0) && !pages.has(1));
    CHECK_EQ(pages.get({2, 3}), 2);
    scene.store->check_integrity();
}

TEST(a_disk_with_room_again_is_used) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 8));  // two files of four slots
    Pages pages(*scene.store, kBytes);
    scene.ops->disk_bytes = 3 * kSlot;
    for (std::uint64_t number = 0; number < 9; ++number) CHECK_EQ(pages.put({number}), 1);
    CHECK_EQ(scene.store->stats().slots, 3);
    CHECK_EQ(scene.store->stats().capacity, 8);
    scene.ops->disk_bytes = 100 * kSlot;
    scene.now += 11 * kSecond;
    for (std::uint64_t number = 20; number < 28; ++number) CHECK_EQ(pages.put({number}), 1);
    CHECK_EQ(scene.store->stats().slots, 8);
    CHECK_EQ(pages.get({20, 21, 22, 23, 24, 25, 26, 27}), 8);
    scene.store->check_integrity();
    scene.open();
    Pages again(*scene.store, kBytes);
    CHECK_EQ(again.get({20, 21, 22, 23, 24, 25, 26, 27}), 8);
}

TEST(files_that_cannot_be_opened_keep_their_pages) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 8));
    Pages pages(*scene.store, kBytes);
    for (std::uint64_t number = 0; number < 8; ++number) CHECK_EQ(pages.put({number}), 1);
    for (const int error : {EMFILE, EACCES, EIO}) {
        scene.ops->open_error = error;
        CHECK_THROWS(kvcore::Error, scene.open());
    }
    scene.ops->open_error = 0;
    scene.open();
    Pages again(*scene.store, kBytes);
    CHECK_EQ(again.get({0, 1, 2, 3, 4, 5, 6, 7}), 8);
}

TEST(interruptions_are_no_refusals) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 8));
    scene.ops->interruptions = 3;
    CHECK_EQ(Pages(*scene.store, kBytes).put({1}), 1);
    CHECK_EQ(scene.store->stats().errors, 0);
}

// While one call hangs, the store refuses all other calls at once.
TEST(erases_and_growth_may_hang) {
    for (const bool is_growth : {false, true}) {
        const TemporaryDirectory directory;
        FaultyScene scene(disk_config(directory.path, kBytes, 8));
        Pages pages(*scene.store, kBytes);
        if (!is_growth) CHECK_EQ(pages.put({1, 2}), 2);
        std::atomic<bool> hangs{true};
        std::atomic<bool> is_in{false};
        const auto hang = [&] {
            is_in = true;
            while (hangs) std::this_thread::yield();
        };
        (is_growth ? scene.ops->before_allocate : scene.ops->before_move) = hang;
        std::thread other([&] {
            if (is_growth) {
                CHECK_EQ(pages.put({1}), 1);
            } else {
                CHECK_EQ(scene.store->remove({key_of(1)}), 1);
            }
        });
        while (!is_in) std::this_thread::yield();
        scene.now += 6 * kSecond;
        const std::vector<std::byte> bytes = content(3, 0, kBytes);
        kvcore::StoreTask task = scene.store->put_async({{key_of(3), {{0, bytes.data(), kBytes}}}});
        const bool is_refused = task.done();
        hangs = false;
        other.join();
        CHECK(is_refused);
        CHECK_EQ(task.result(), 0);
        CHECK_EQ(scene.store->stats().refused, 1);
        scene.store->check_integrity();
    }
}

}  // namespace

}  // namespace tests::store::disk_repair
