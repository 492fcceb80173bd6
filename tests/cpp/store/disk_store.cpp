// SPDX-License-Identifier: Apache-2.0
#include "kvcore/disk_store.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <vector>

#include "fakes/disk_scene.hpp"
#include "kvcore/errors.hpp"
#include "store/disk/aligned_buffer.hpp"

namespace tests::store::disk_store {

using Numbers = std::vector<std::uint64_t>;

namespace {

constexpr std::int64_t kBytes = 5000;  // of a page: not a multiple of the block size

TEST(puts_and_gets) {
    const TemporaryDirectory directory;
    DiskStore store(disk_config(directory.path, kBytes, 8));
    Pages pages(store, kBytes);
    CHECK_EQ(pages.get({1}), 0);
    CHECK_EQ(pages.put({1, 2, 3}), 3);
    CHECK_EQ(pages.put({2}), 1);  // already stored
    CHECK_EQ(pages.get({1, 2, 3}), 3);
    CHECK_EQ(pages.get({2, 9, 3}), 1);  // the first hole ends the get
    CHECK_EQ(pages.get({9, 2}), 0);
    CHECK_EQ(store.parts_of(key_of(1)), 1U);
    CHECK_EQ(store.remove({key_of(2), key_of(9)}), 1);
    CHECK_EQ(pages.get({1, 2}), 1);
    const auto stats = store.stats();
    CHECK_EQ(stats.written, 3);
    CHECK_EQ(stats.hits, 3 + 1 + 1);
    CHECK_EQ(stats.misses, 1 + 2 + 2 + 1);
    CHECK_EQ(stats.bytes_written, 3 * kBytes);
    CHECK_EQ(stats.stored, 2);
    CHECK_EQ(stats.capacity, 8);
    CHECK_EQ(stats.errors + stats.corrupt + stats.timeouts, 0);
    store.check_integrity();
}

TEST(aligned_memory_is_read_in_place) {
    const TemporaryDirectory directory;
    constexpr std::int64_t kPage = 16384;
    DiskStore store(disk_config(directory.path, kPage, 4));
    const kvcore::AlignedBuffer from(kPage);
    const kvcore::AlignedBuffer to(kPage);
    const auto bytes = content(3, 0, kPage);
    std::copy(bytes.begin(), bytes.end(), from.data());
    CHECK_EQ(store.put({{key_of(3), {{0, from.data(), kPage}}}}), 1);
    CHECK_EQ(store.get({{key_of(3), {{0, to.data(), kPage}}}}), 1);
    CHECK(std::equal(bytes.begin(), bytes.end(), to.data()));
    Pages pages(store, kPage);  // unaligned memory
    CHECK_EQ(pages.get({3}), 1);
}

TEST(restart_keeps_pages) {
    const TemporaryDirectory directory;
    DiskStoreConfig config = disk_config(directory.path, kBytes, 6);
    {
        DiskStore store(config);
        Pages pages(store, kBytes);
        for (std::uint64_t number = 0; number < 6; ++number) CHECK_EQ(pages.put({number}), 1);
        CHECK_EQ(store.remove({key_of(3)}), 1);
    }
    {
        DiskStore store(config);
        Pages pages(store, kBytes);
        CHECK_EQ(store.stats().restored, 5);
        CHECK_EQ(pages.get({0, 1, 2}), 3);
        CHECK_EQ(pages.get({4, 5}), 2);
        CHECK(!pages.has(3));
        store.check_integrity();
    }
    {
        DiskStore store(config);
        Pages pages(store, kBytes);
        CHECK_EQ(pages.put({10, 11}), 2);  // takes the free slot, then the slot written first
        CHECK(!pages.has(0));
        CHECK_EQ(pages.get({1, 2}), 2);
    }
    config.directories[0].quota_bytes = disk_config("", kBytes, 5).directories[0].quota_bytes;
    {
        DiskStore store(config);
        CHECK_EQ(store.stats().capacity, 5);
        CHECK(store.stats().restored <= 5);
    }
    config.fingerprint = key_of(777);
    DiskStore store(config);
    CHECK_EQ(store.stats().restored, 0);
    CHECK(store.stats().foreign > 0);
}

TEST(empty_slots_are_used_before_those_of_others) {
    const TemporaryDirectory directory;
    const DiskStoreConfig config = disk_config(directory.path, kBytes, 8);
    DiskStoreConfig other = config;
    other.fingerprint = key_of(777);
    {
        DiskStore store(config);
        Pages pages(store, kBytes);  // two files of four slots
        for (std::uint64_t number = 0; number < 5; ++number) CHECK_EQ(pages.put({number}), 1);
    }
    {
        DiskStore store(other);
        CHECK_EQ(store.stats().foreign, 5);
        CHECK_EQ(Pages(store, kBytes).put({10}), 1);
    }
    {
        DiskStore store(config);
        CHECK_EQ(Pages(store, kBytes).get({0, 1, 2, 3, 4}), 5);
    }
    {
        DiskStore store(other);
        Pages pages(store, kBytes);
        for (const std::uint64_t number : {11, 12, 13}) CHECK_EQ(pages.put({number}), 1);
    }
    DiskStore store(config);
    Pages pages(store, kBytes);
    CHECK(!pages.has(0));  // the oldest page
    CHECK_EQ(pages.get({1, 2, 3, 4}), 4);
}

TEST(pages_of_another_size_are_replaced) {
    const TemporaryDirectory directory;
    DiskStore store(disk_config(directory.path, 2 * kBytes, 4));
    Pages pages(store, kBytes);
    Pages larger(store, 2 * kBytes);
    CHECK_EQ(pages.put({1}), 1);
    CHECK_EQ(larger.put({1}), 1);
    CHECK_EQ(larger.get({1}), 1);
    CHECK_EQ(pages.put({1}), 1);
    CHECK_EQ(pages.get({1}), 1);
    CHECK_EQ(store.stats().written, 3);
    CHECK_EQ(store.stats().stored, 1);
    store.check_integrity();
}

TEST(least_recently_used_goes_first) {
    const TemporaryDirectory directory;
    DiskStore store(disk_config(directory.path, kBytes, 3));
    Pages pages(store, kBytes);
    for (const std::uint64_t number : {1, 2, 3}) CHECK_EQ(pages.put({number}), 1);
    CHECK_EQ(pages.get({1}), 1);
    CHECK_EQ(pages.put({4}), 1);
    CHECK(!pages.has(2));
    CHECK_EQ(pages.put({3}), 1);  // counts as a use
    CHECK_EQ(pages.put({5}), 1);
    CHECK(!pages.has(1) && pages.has(3) && pages.has(4) && pages.has(5));
    CHECK_EQ(store.stats().evicted, 2);
    CHECK_EQ(pages.put({6, 7, 8, 9, 10, 11, 12, 13}) > 0, true);
    CHECK_EQ(store.stats().stored, 3);
    store.check_integrity();
}

TEST(pages_have_parts) {
    const TemporaryDirectory directory;
    const DiskStoreConfig config = disk_config(directory.path, 3 * kBytes, 4);
    {
        DiskStore store(config);
        Pages pages(store, kBytes);
        CHECK_EQ(pages.put({1}, {0, 5}), 1);
        CHECK_EQ(store.parts_of(key_of(1)), (1U << 0) | (1U << 5));
        CHECK_EQ(pages.get({1}, {0, 5}), 1);
        CHECK_EQ(pages.get({1}, {5}), 1);
        CHECK_EQ(pages.get({1}, {0}), 1);
        CHECK_EQ(pages.get({1}, {3}), 0);
        CHECK_EQ(pages.get({1}, {0, 3}), 0);
        CHECK_EQ(pages.put({1}, {5}), 1);  // already stored
        CHECK_EQ(store.stats().written, 1);
        CHECK_EQ(pages.put({1}, {0, 3, 63}), 1);  // replaces the page
        CHECK_EQ(pages.get({1}, {3, 63}), 1);
        CHECK_EQ(pages.get({1}, {5}), 0);
        CHECK_EQ(store.stats().stored, 1);
        Pages others(store, kBytes - 1);
        CHECK_EQ(others.get({1}, {3}), 0);  // the size differs
        CHECK_EQ(store.stats().corrupt, 0);
        CHECK_EQ(pages.get({1}, {3}), 1);
        store.check_integrity();
    }
    DiskStore store(config);
    Pages pages(store, kBytes);
    CHECK_EQ(pages.get({1}, {0, 3, 63}), 1);
    CHECK_EQ(store.remove({key_of(1)}), 1);
    store.close();
    DiskStore again(config);
    CHECK_EQ(again.parts_of(key_of(1)), 0U);  // nor does it find the replaced page
}

TEST(pages_are_spread_over_directories) {
    const TemporaryDirectory first;
    const TemporaryDirectory second;
    DiskStoreConfig config = disk_config(first.path, kBytes, 4);
    config.directories.push_back(
        {second.path, disk_config("", kBytes, 8).directories[0].quota_bytes});
    {
        DiskStore store(config);
        Pages pages(store, kBytes);
        for (std::uint64_t number = 0; number < 12; ++number) CHECK_EQ(pages.put({number}), 1);
        CHECK_EQ(store.stats().evicted, 0);
        CHECK_EQ(store.stats().capacity, 12);
        CHECK_EQ(pages.get({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}), 12);
    }
    CHECK_EQ(kvcore::inspect_disk_store(first.path, true).stored, 4);
    CHECK_EQ(kvcore::inspect_disk_store(second.path, true).stored, 8);
}

TEST(quotas_hold) {
    const TemporaryDirectory directory;
    const DiskStoreConfig config = disk_config(directory.path, kBytes, 7);
    DiskStore store(config);
    Pages pages(store, kBytes);
    for (std::uint64_t number = 0; number < 30; ++number) pages.put({number});
    std::int64_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory.path)) {
        if (entry.path().filename() != "kvcore-lock") {
            bytes += static_cast<std::int64_t>(std::filesystem::file_size(entry.path()));
        }
    }
    CHECK_EQ(bytes, config.directories[0].quota_bytes);
}

TEST(files_may_be_larger_than_quotas) {
    const TemporaryDirectory directory;
    DiskStoreConfig config = disk_config(directory.path, kBytes, 5);
    config.segment_bytes = std::int64_t{1} << 50;
    DiskStore store(config);
    CHECK_EQ(Pages(store, kBytes).put({1, 2, 3}), 3);
    CHECK_EQ(store.stats().slots, 5);
}

TEST(one_store_has_a_directory) {
    const TemporaryDirectory directory;
    const DiskStoreConfig config = disk_config(directory.path, kBytes, 2);
    DiskStore store(config);
    try {
        DiskStore other(config);
        CHECK(false);
    } catch (const kvcore::Error& error) {
        const std::string text = error.what();
        CHECK(text.find(directory.path) != std::string::npos);
        CHECK(text.find(std::to_string(getpid())) != std::string::npos);
    }
    CHECK_THROWS(kvcore::Error, kvcore::purge_disk_store(directory.path));
    CHECK_THROWS(kvcore::Error, kvcore::inspect_disk_store(directory.path, true));
    CHECK_EQ(kvcore::inspect_disk_store(directory.path, false).owner, getpid());
    store.close();
    DiskStore next(config);
}

TEST(slots_of_another_size_are_refused) {
    const TemporaryDirectory directory;
    {
        DiskStore store(disk_config(directory.path, kBytes, 2));
    }
    CHECK_THROWS(kvcore::Error, DiskStore(disk_config(directory.path, 3 * kBytes, 2)));
    CHECK_EQ(kvcore::purge_disk_store(directory.path) > 0, true);
    CHECK(std::filesystem::is_empty(directory.path));
    CHECK_THROWS(std::invalid_argument, kvcore::purge_disk_store(directory.path));
    DiskStore store(disk_config(directory.path, 3 * kBytes, 2));
}

TEST(a_closed_store_refuses) {
    const TemporaryDirectory directory;
    DiskStore store(disk_config(directory.path, kBytes, 4));
    Pages pages(store, kBytes);
    const auto bytes = content(1, 0, kBytes);
    kvcore::StoreTask task = store.put_async({{key_of(1), {{0, bytes.data(), kBytes}}}});
    store.close();
    CHECK(task.done());
    CHECK_EQ(task.result(), 1);  // the write in flight completes
    store.close();
    CHECK(store.is_closed());
    CHECK_THROWS(kvcore::Error, pages.get({1}));
    CHECK_THROWS(kvcore::Error, pages.put({1}));
    CHECK_THROWS(kvcore::Error, store.remove({key_of(1)}));
    CHECK_THROWS(kvcore::Error, store.parts_of(key_of(1)));
    CHECK_THROWS(kvcore::Error, store.stats());
}

TEST(a_fork_refuses) {
    const TemporaryDirectory directory;
    auto store = std::make_unique<DiskStore>(disk_config(directory.path, kBytes, 4));
    Pages pages(*store, kBytes);
    CHECK_EQ(pages.put({1}), 1);
    const pid_t child = fork();
    if (child == 0) {
        int refused = 0;
        try {
            static_cast<void>(store->parts_of(key_of(1)));
        } catch (const kvcore::Error&) {
            ++refused;
        }
        store->close();
        store.reset();  // must not wait or unlock
        _exit(refused == 1 ? 0 : 1);
    }
    int status = 1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_THROWS(kvcore::Error, DiskStore(disk_config(directory.path, kBytes, 4)));
    CHECK_EQ(pages.get({1}), 1);
}

TEST(wrong_arguments_change_nothing) {
    const TemporaryDirectory directory;
    DiskStore store(disk_config(directory.path, kBytes, 4));
    std::vector<std::byte> memory(2 * kBytes);
    std::byte* at = memory.data();
    using Parts = std::vector<kvcore::StorePart<std::byte>>;
    const auto get = [&](const Parts& parts) { return store.get({{key_of(1), parts}}); };
    CHECK_THROWS(std::invalid_argument, get({}));
    CHECK_THROWS(std::invalid_argument, get({{-1, at, 10}}));
    CHECK_THROWS(std::invalid_argument, get({{64, at, 10}}));
    CHECK_THROWS(std::invalid_argument, get({{1, at, 10}, {1, at, 10}}));
    CHECK_THROWS(std::invalid_argument, get({{1, at, 0}}));
    CHECK_THROWS(std::invalid_argument, get({{1, at, kBytes + 1}}));
    CHECK_THROWS(std::invalid_argument, get({{1, at, kBytes}, {2, at, 1}}));
    CHECK_EQ(store.stats().misses, 0);
    const auto refuse = [&](auto change) {
        DiskStoreConfig config = disk_config(directory.path + "/other", kBytes, 4);
        change(config);
        CHECK_THROWS(std::invalid_argument, DiskStore(config));
    };
    refuse([](DiskStoreConfig& c) { c.directories.clear(); });
    refuse([](DiskStoreConfig& c) { c.directories[0].path = ""; });
    refuse([](DiskStoreConfig& c) { c.directories[0].quota_bytes = kBytes; });
    refuse([](DiskStoreConfig& c) { c.page_bytes = 0; });
    refuse([](DiskStoreConfig& c) { c.page_bytes = std::int64_t{1} << 31; });
    refuse([](DiskStoreConfig& c) { c.threads = 0; });
    refuse([](DiskStoreConfig& c) { c.queue_pages = 0; });
    refuse([](DiskStoreConfig& c) { c.segment_bytes = -1; });
    refuse([](DiskStoreConfig& c) { c.breaker_failures = 0; });
    refuse([](DiskStoreConfig& c) { c.breaker_seconds = -1; });
    refuse([](DiskStoreConfig& c) { c.slow_seconds = std::nan(""); });
    const std::int64_t most = std::int64_t{1} << 60;
    try {
        DiskStoreConfig config = disk_config(directory.path + "/other", kBytes, 4);
        config.directories[0].quota_bytes = most + 1;
        static_cast<void>(DiskStore(config));
        CHECK(false);
    } catch (const std::invalid_argument& error) {
        const std::string text = error.what();
        CHECK(text.find(std::to_string(most + 1)) != text.npos);
        CHECK(text.find(".. " + std::to_string(most)) != text.npos);
    }
    CHECK(!std::filesystem::exists(directory.path + "/other"));
}

TEST(reports_name_bad_slots) {
    const TemporaryDirectory directory;
    {
        DiskStore store(disk_config(directory.path, kBytes, 6));
        Pages pages(store, kBytes);
        for (std::uint64_t number = 0; number < 6; ++number) pages.put({number});
    }
    const std::string segment = directory.path + "/segment-000001.kv";
    std::fstream file(segment, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(3 * 4096 + 4096 + 77);
    file.put('!');
    file.close();
    CHECK_EQ(kvcore::inspect_disk_store(directory.path, false).stored, 6);
    const kvcore::DiskReport report = kvcore::inspect_disk_store(directory.path, true);
    CHECK_EQ(report.stored, 5);
    CHECK_EQ(report.corrupt, 1);
    CHECK_EQ(report.bad_slots[0] == "segment-000001.kv:1", true);
    CHECK_EQ(report.fingerprints.size(), 1U);
    CHECK_EQ(report.page_counts[0], 5);
    CHECK_EQ(report.owner, 0);
}

}  // namespace

}  // namespace tests::store::disk_store
