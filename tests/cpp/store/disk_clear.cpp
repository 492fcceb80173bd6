// SPDX-License-Identifier: Apache-2.0
// Clearing a disk store removes its pages and the writes in flight, also after a restart.
#include <condition_variable>
#include <mutex>
#include <thread>

#include "fakes/disk_scene.hpp"
#include "store/disk/slot_format.hpp"

namespace tests::store::disk_clear {

namespace {

constexpr std::int64_t kBytes = 6000;

/// Blocks the next write of a page.
struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_closed = false;
    bool is_reached = false;

    void pass() {
        std::unique_lock<std::mutex> lock(mutex);
        if (!is_closed) return;
        is_reached = true;
        changed.notify_all();
        changed.wait(lock, [this] { return !is_closed; });
    }
    void close() {
        const std::lock_guard<std::mutex> lock(mutex);
        is_closed = true;
        is_reached = false;
    }
    void wait() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return is_reached; });
    }
    void open() {
        const std::lock_guard<std::mutex> lock(mutex);
        is_closed = false;
        changed.notify_all();
    }
};

TEST(all_pages_go_for_good) {
    const TemporaryDirectory first;
    const TemporaryDirectory second;
    DiskStoreConfig config = disk_config(first.path, kBytes, 4);
    config.directories.push_back({second.path, config.directories[0].quota_bytes});
    {
        DiskStore store(config);
        Pages pages(store, kBytes);
        CHECK_EQ(store.clear(), 0);
        CHECK_EQ(pages.put({1, 2, 3, 4, 5}), 5);
        CHECK_EQ(store.clear(), 5);
        CHECK_EQ(pages.get({1}), 0);
        CHECK_EQ(store.stats().stored, 0);
        CHECK_EQ(store.clear(), 0);
        store.check_integrity();
        CHECK_EQ(pages.put({3, 9}), 2);
    }
    CHECK_EQ(kvcore::inspect_disk_store(first.path, true).stored, 1);
    CHECK_EQ(kvcore::inspect_disk_store(second.path, true).stored, 1);
    {
        DiskStore store(config);
        Pages pages(store, kBytes);
        CHECK_EQ(store.stats().restored, 2);
        CHECK_EQ(store.stats().corrupt, 0);
        CHECK_EQ(pages.get({3, 9}), 2);
        CHECK(!pages.has(1));
        CHECK_EQ(pages.put({1, 2, 4, 5, 6, 7}), 6);
        CHECK_EQ(store.stats().evicted, 0);
        CHECK_EQ(store.clear(), 8);
    }
    DiskStore store(config);
    CHECK_EQ(store.stats().restored, 0);
    store.check_integrity();
}

TEST(a_write_that_began_before_does_not_come_back) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 4));
    Pages pages(*scene.store, kBytes);
    Gate gate;
    const std::thread::id here = std::this_thread::get_id();
    CHECK_EQ(pages.put({7}), 1);  // creates the files
    scene.ops->before_move = [&] {
        if (std::this_thread::get_id() != here) gate.pass();
    };
    gate.close();
    std::int64_t stored = -1;
    std::thread writer([&] { stored = pages.put({1, 2}); });
    gate.wait();
    CHECK_EQ(scene.store->clear(), 1);
    gate.open();
    writer.join();
    CHECK_EQ(stored, 0);
    CHECK(!pages.has(1) && !pages.has(2));
    scene.store->check_integrity();
    CHECK_EQ(pages.put({1}), 1);
    scene.ops->before_move = nullptr;
    scene.open();
    CHECK_EQ(scene.store->stats().restored, 1);
}

TEST(who_is_reading_reads_on) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 4));
    Pages pages(*scene.store, kBytes);
    CHECK_EQ(pages.put({1, 2}), 2);
    Gate gate;
    const std::thread::id here = std::this_thread::get_id();
    scene.ops->before_move = [&] {
        if (std::this_thread::get_id() != here) gate.pass();
    };
    gate.close();
    std::int64_t served = -1;
    std::thread reader([&] { served = pages.get({1, 2}); });
    gate.wait();
    CHECK_EQ(scene.store->clear(), 2);
    gate.open();
    reader.join();
    CHECK_EQ(served, 2);
    CHECK(!pages.has(1));
    scene.store->check_integrity();
    CHECK_EQ(pages.put({3, 4, 5, 6}), 4);  // their slots are free again
    CHECK_EQ(scene.store->stats().evicted, 0);
}

TEST(a_disk_that_fails_does_not_stop_it) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 4));
    Pages pages(*scene.store, kBytes);
    CHECK_EQ(pages.put({1, 2}), 2);
    scene.ops->write_error = EIO;
    CHECK_EQ(scene.store->clear(), 2);
    CHECK(!pages.has(1));
    CHECK_EQ(scene.store->stats().errors, 1);
    scene.ops->write_error = 0;
    CHECK_EQ(scene.store->clear(), 0);  // works now
    scene.open();
    CHECK_EQ(scene.store->stats().restored, 0);
}

TEST(the_file_of_the_shape_has_the_floor) {
    kvcore::AlignedBuffer block(kvcore::kHeaderBytes);
    kvcore::StoreShape shape{8192, 4, 77};
    kvcore::write_shape(shape, block.data());
    kvcore::StoreShape read;
    std::uint32_t version = 0;
    CHECK(kvcore::read_shape(block.data(), read, version) == kvcore::HeaderState::kRight);
    CHECK_EQ(read.floor, 77U);
    CHECK_EQ(version, 1U);
}

}  // namespace

}  // namespace tests::store::disk_clear
