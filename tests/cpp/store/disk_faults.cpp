// SPDX-License-Identifier: Apache-2.0
// A failing disk causes misses and counts them: no call throws, and no page has wrong bytes.
#include <cerrno>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "fakes/disk_scene.hpp"
#include "kvcore/errors.hpp"
#include "store/disk/slot_format.hpp"

namespace tests::store::disk_faults {

using kvcore::BreakerState;

namespace {

constexpr std::int64_t kBytes = 5000;
constexpr std::int64_t kSlot = 4096 + 8192;
constexpr std::int64_t kSecond = 1'000'000'000;

std::string segment(const std::string& directory, std::int64_t number) {
    return directory + "/" + kvcore::segment_name(number);
}

std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

void change(const std::string& path, std::int64_t at, char mask) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char before = static_cast<char>(file.get());
    file.seekp(at);
    file.put(static_cast<char>(before ^ mask));
}

TEST(reads_that_fail_are_misses) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 8));
    Pages pages(*scene.store, kBytes);
    CHECK_EQ(pages.put({1, 2, 3}), 3);
    scene.ops->read_error = EIO;
    CHECK_EQ(pages.get({1}), 0);
    CHECK_EQ(scene.store->stats().errors, 1);
    scene.ops->read_error = 0;
    CHECK_EQ(pages.get({1, 2, 3}), 3);  // the disk had failed, not the page
    scene.ops->small_moves = true;
    CHECK_EQ(pages.get({1, 2, 3}), 3);
    CHECK_EQ(pages.put({4}), 1);
    scene.ops->small_moves = false;
    CHECK_EQ(pages.get({4}), 1);
    scene.ops->short_reads = true;
    CHECK_EQ(pages.get({2}), 0);
    scene.ops->short_reads = false;
    CHECK(!pages.has(2));  // the file ends before this page
    CHECK_EQ(scene.store->stats().corrupt, 1);
    scene.store->check_integrity();
}

TEST(writes_that_fail_are_not_found) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 6));  // two slots are lost
    Pages pages(*scene.store, kBytes);
    CHECK_EQ(pages.put({1, 2}), 2);
    for (const int error : {ENOSPC, EIO}) {
        scene.ops->write_error = error;
        CHECK_EQ(pages.put({3}), 0);
        CHECK(!pages.has(3));
        scene.ops->write_error = 0;
        CHECK_EQ(pages.get({1, 2}), 2);
        CHECK_EQ(pages.put({3}), 1);
        CHECK_EQ(scene.store->remove({key_of(3)}), 1);
    }
    scene.store->check_integrity();
    scene.open();
    Pages again(*scene.store, kBytes);
    CHECK_EQ(again.get({1, 2}), 2);
    CHECK(!again.has(3));
}

TEST(a_full_disk_keeps_what_there_is) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 8));  // two files of four slots
    scene.ops->allocate_error = ENOSPC;
    Pages pages(*scene.store, kBytes);
    CHECK_EQ(pages.put({1}), 0);
    CHECK_EQ(scene.store->stats().no_room, 1);
    CHECK(!std::filesystem::exists(segment(directory.path, 0)));
    scene.ops->allocate_error = 0;
    CHECK_EQ(pages.put({1}), 0);  // the store does not retry yet
    scene.now += 11 * kSecond;
    for (const std::uint64_t number : {1, 2, 3, 4}) CHECK_EQ(pages.put({number}), 1);
    scene.ops->allocate_error = ENOSPC;
    CHECK_EQ(pages.put({5}), 1);  // replaces page 1
    CHECK(!pages.has(1));
    CHECK_EQ(scene.store->stats().evicted, 1);
    scene.ops->allocate_error = 0;
    scene.now += 11 * kSecond;
    CHECK_EQ(pages.put({6, 7, 8}), 3);
    CHECK_EQ(scene.store->stats().evicted, 1);
    CHECK_EQ(pages.get({2, 3, 4, 5, 6, 7, 8}), 7);
    CHECK(scene.store->stats().breaker == BreakerState::kClosed);
    scene.store->check_integrity();
}

TEST(the_breaker_opens_and_closes) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 8));
    Pages pages(*scene.store, kBytes);
    const auto state = [&] { return scene.store->stats().breaker; };
    CHECK_EQ(pages.put({1, 2}), 2);
    scene.ops->read_error = EIO;
    for (int i = 0; i < 4; ++i) CHECK_EQ(pages.get({1}), 0);
    scene.ops->read_error = 0;
    CHECK_EQ(pages.get({1}), 1);  // the limit is five errors in a row, not five in total
    scene.ops->read_error = EIO;
    for (int i = 0; i < 5; ++i) CHECK_EQ(pages.get({1}), 0);
    CHECK(state() == BreakerState::kOpen);
    std::atomic<int> moves{0};
    scene.ops->before_move = [&] { ++moves; };
    for (int i = 0; i < 50; ++i) CHECK_EQ(pages.get({1, 2}) + pages.put({3}), 0);
    CHECK_EQ(int{moves}, 0);
    CHECK_EQ(scene.store->stats().refused, 150);
    scene.now += 11 * kSecond;
    CHECK_EQ(pages.get({1}), 0);  // one attempt
    CHECK_EQ(int{moves}, 1);
    CHECK(state() == BreakerState::kOpen);
    CHECK_EQ(pages.get({1}), 0);
    CHECK_EQ(int{moves}, 1);
    scene.ops->read_error = 0;
    scene.now += 11 * kSecond;
    CHECK_EQ(pages.put({1}), 1);  // already stored: tests no part of the disk
    CHECK_EQ(pages.get({1}), 1);
    CHECK(state() == BreakerState::kClosed);
    CHECK_EQ(pages.get({1, 2}), 2);
}

TEST(slow_calls_open_the_breaker) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 8));
    Pages pages(*scene.store, kBytes);
    scene.ops->before_move = [&] { scene.now += 6 * kSecond; };
    CHECK_EQ(pages.put({1}), 1);  // slow, but correct
    CHECK_EQ(scene.store->stats().timeouts, 1);
    for (int i = 0; i < 4; ++i) CHECK_EQ(pages.get({1}), 1);
    CHECK_EQ(scene.store->stats().timeouts, 5);
    CHECK_EQ(pages.get({1}), 0);
    CHECK(scene.store->stats().breaker == BreakerState::kOpen);
}

TEST(a_disk_that_hangs_costs_one_call) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 8));
    Pages pages(*scene.store, kBytes);
    CHECK_EQ(pages.put({1, 2}), 2);
    std::atomic<bool> hangs{true};
    std::atomic<bool> is_in{false};
    scene.ops->before_move = [&] {
        is_in = true;
        while (hangs) std::this_thread::yield();
    };
    std::vector<std::byte> memory(kBytes);
    kvcore::StoreTask task = scene.store->get_async({{key_of(1), {{0, memory.data(), kBytes}}}});
    while (!is_in) std::this_thread::yield();
    CHECK(!task.wait(0));
    scene.now += 6 * kSecond;
    CHECK_EQ(pages.get({2}) + pages.put({3}), 0);  // refused at once
    CHECK_EQ(scene.store->stats().refused, 2);
    hangs = false;
    CHECK_EQ(task.result(), 1);
    CHECK(memory == content(1, 0, kBytes));
    CHECK_EQ(pages.get({2}), 1);
}

TEST(a_full_queue_waits_no_longer_than_a_slow_call) {
    const TemporaryDirectory directory;
    DiskStoreConfig config = disk_config(directory.path, kBytes, 8);
    config.threads = 1;
    config.queue_pages = 1;
    config.slow_seconds = 0.02;
    FaultyScene scene(config);
    Pages pages(*scene.store, kBytes);
    CHECK_EQ(pages.put({1, 2, 3}), 3);
    std::atomic<bool> hangs{true};
    scene.ops->before_move = [&] {
        while (hangs) std::this_thread::yield();
    };
    const auto bytes = content(4, 0, kBytes);
    const kvcore::PageToWrite page{key_of(4), {{0, bytes.data(), kBytes}}};
    kvcore::StoreTask first = scene.store->put_async({page});
    while (scene.store->stats().queued > 0) std::this_thread::yield();
    kvcore::StoreTask second = scene.store->put_async({page});
    CHECK_EQ(pages.put({5}) + pages.get({1, 2}), 0);
    CHECK_EQ(scene.store->stats().refused, 3);
    CHECK_EQ(scene.store->stats().misses, 2);
    hangs = false;
    CHECK_EQ(first.result() + second.result(), 2);
    CHECK_EQ(pages.get({1, 2, 3, 4}), 4);
    scene.store->check_integrity();
}

TEST(removing_from_a_dead_disk_is_quick) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 8));
    Pages pages(*scene.store, kBytes);
    CHECK_EQ(pages.put({1, 2, 3}), 3);
    std::atomic<int> moves{0};
    scene.ops->before_move = [&] {
        ++moves;
        scene.now += 6 * kSecond;
    };
    for (int i = 0; i < 5; ++i) CHECK_EQ(pages.get({1}), 1);
    CHECK_EQ(scene.store->remove({key_of(1), key_of(2)}), 2);
    CHECK_EQ(int{moves}, 5);
    CHECK(!pages.has(1) && !pages.has(2) && pages.has(3));
    scene.store->check_integrity();
}

TEST(file_systems_may_refuse_direct_io) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 4));
    scene.ops->refuse_direct = EINVAL;
    scene.open();
    CHECK(!scene.store->stats().direct);
    Pages pages(*scene.store, kBytes);
    CHECK_EQ(pages.put({1, 2, 3}), 3);
    CHECK_EQ(pages.get({1, 2, 3}), 3);
}

TEST(vanished_files_are_misses) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 8));
    Pages pages(*scene.store, kBytes);
    for (std::uint64_t number = 0; number < 8; ++number) pages.put({number});
    scene.store.reset();
    std::filesystem::remove(segment(directory.path, 0));
    scene.open();
    Pages again(*scene.store, kBytes);
    CHECK_EQ(scene.store->stats().restored, 0);  // the second file is created after the first
    for (std::uint64_t number = 0; number < 8; ++number) CHECK_EQ(again.put({number}), 1);
    for (std::uint64_t number = 0; number < 8; ++number) CHECK_EQ(again.get({number}), 1);
    scene.store.reset();
    std::filesystem::resize_file(segment(directory.path, 1), kSlot + 4096);
    scene.open();
    Pages cut(*scene.store, kBytes);
    std::int64_t found = 0;
    for (std::uint64_t number = 0; number < 8; ++number) found += cut.get({number});
    CHECK_EQ(found, 5);
    for (const auto& entry : std::filesystem::directory_iterator(directory.path)) {
        std::filesystem::remove_all(entry.path());  // while the store runs
    }
    for (std::uint64_t number = 0; number < 8; ++number) cut.get({number});
    scene.store->check_integrity();
}

TEST(truncated_under_a_store) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 4));
    Pages pages(*scene.store, kBytes);
    for (std::uint64_t number = 0; number < 4; ++number) pages.put({number});
    std::filesystem::resize_file(segment(directory.path, 0), kSlot);
    std::int64_t found = 0;
    for (std::uint64_t number = 0; number < 4; ++number) found += pages.get({number});
    CHECK_EQ(found, 1);
    CHECK_EQ(scene.store->stats().corrupt, 3);
    for (std::uint64_t number = 0; number < 4; ++number) CHECK_EQ(pages.put({number}), 1);
    for (std::uint64_t number = 0; number < 4; ++number) CHECK_EQ(pages.get({number}), 1);
    scene.store->check_integrity();
}

TEST(a_broken_shape_starts_anew) {
    const TemporaryDirectory directory;
    FaultyScene scene(disk_config(directory.path, kBytes, 4));
    CHECK_EQ(Pages(*scene.store, kBytes).put({1}), 1);
    scene.store.reset();
    change(directory.path + "/" + kvcore::kShapeName, 17, 1);
    scene.open();
    CHECK_EQ(scene.store->stats().corrupt, 1);
    CHECK_EQ(scene.store->stats().restored, 0);
    CHECK_EQ(Pages(*scene.store, kBytes).put({1}), 1);
}

/// A store of eight pages that is damaged again and again, while it runs or while it is closed.
class Damage {
   public:
    explicit Damage(Random& random)
        : random_(random), scene_(disk_config(directory_.path, kBytes, 8)) {
        Pages pages(*scene_.store, kBytes);
        for (std::uint64_t number = 0; number < 8; ++number) CHECK_EQ(pages.put({number}), 1);
        for (std::int64_t i = 0; i < 2; ++i)
            good_.push_back(read_file(segment(directory_.path, i)));
    }

    void once() {
        const bool while_it_runs = random_.chance(50);
        restore();
        if (!while_it_runs) scene_.store.reset();
        const bool is_swap = random_.chance(20);
        const bool is_cut = !is_swap && random_.chance(10);
        if (is_swap) {
            swap();
        } else if (is_cut) {
            std::filesystem::resize_file(segment(directory_.path, random_.below(2)),
                                         static_cast<std::uintmax_t>(random_.below(4 * kSlot)));
        } else {
            change(segment(directory_.path, random_.below(2)), random_.below(4 * kSlot),
                   static_cast<char>(1 + random_.below(255)));
        }
        if (!while_it_runs) scene_.open();
        Pages pages(*scene_.store, kBytes);  // checks the bytes that it reads
        for (std::uint64_t number = 0; number < 8; ++number) found_ += pages.get({number});
        ++rounds_;
    }
    /// Most damages hit one page of eight.
    void check() const {
        CHECK(found_ > rounds_ * 5);
        CHECK(found_ < rounds_ * 8);
    }

   private:
    void restore() {
        scene_.store.reset();
        for (std::size_t i = 0; i < 2; ++i) {
            write_file(segment(directory_.path, static_cast<std::int64_t>(i)), good_[i]);
        }
        scene_.open();
        CHECK_EQ(scene_.store->stats().restored, 8);
    }
    // Swap whole slots, only headers, or bytes of two pages.
    void swap() {
        const std::string a = segment(directory_.path, 0);
        const std::string b = segment(directory_.path, 1);
        const std::int64_t from = random_.below(4) * kSlot + random_.pick(offsets_);
        const std::int64_t to = random_.below(4) * kSlot + random_.pick(offsets_);
        const std::int64_t bytes = random_.pick(lengths_);
        const auto n = static_cast<std::size_t>(std::min(bytes, 4 * kSlot - std::max(from, to)));
        std::string first = good_[0];
        std::string second = good_[1];
        first.replace(static_cast<std::size_t>(from), n, good_[1], static_cast<std::size_t>(to), n);
        second.replace(static_cast<std::size_t>(to), n, good_[0], static_cast<std::size_t>(from),
                       n);
        write_file(a, first);
        write_file(b, second);
    }

    Random& random_;
    const TemporaryDirectory directory_;
    FaultyScene scene_;
    std::vector<std::string> good_;
    std::vector<std::int64_t> offsets_{0, 4096, 8192};
    std::vector<std::int64_t> lengths_{4096, 8192, kSlot};
    std::int64_t found_ = 0;
    std::int64_t rounds_ = 0;
};

// --count: number of damages.
TEST(damaged_files_are_misses) {
    Random random(check::seed_or(7));
    Damage damage(random);
    const auto rounds = static_cast<int>(check::count_or(500));
    for (int i = 0; i < rounds; ++i) damage.once();
    damage.check();
}

}  // namespace

}  // namespace tests::store::disk_faults
