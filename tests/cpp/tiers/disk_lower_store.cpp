// SPDX-License-Identifier: Apache-2.0
// A disk reads pages into the memory of a host tier; a failing disk is a miss.
#include "kvcore/disk_lower_store.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "fakes/disk_scene.hpp"
#include "fakes/lower_scene.hpp"

namespace tests::tiers::disk_lower_store {

using kvcore::DiskLowerStore;
using kvcore::kStatePart;
using kvcore::PageKey;
using kvcore::StoreMoves;
using kvcore::StoreTask;

namespace {

constexpr std::int64_t kBytes = 8192;
constexpr std::int64_t kState = 1000;
constexpr std::int64_t kRows = 12;

PageKey page_key_of(std::uint64_t number) {
    PageKey key;
    const StoreKey name = key_of(number);
    std::memcpy(key.data(), name.bytes.data(), key.size());
    return key;
}

/// Two replicas of a host tier above a disk with pages 0 to 7; the odd pages also have states.
struct Scene {
    explicit Scene(double seconds = 60)
        : disk(disk_config(directory.path, kBytes + kState, 16)),
          rows(2, std::vector<std::byte>(kRows * kBytes)),
          slots(2, std::vector<std::byte>(kRows * kState)) {
        std::vector<std::vector<std::byte>> bytes;
        bytes.reserve(16);
        std::vector<kvcore::PageToWrite> pages;
        for (std::uint64_t number = 0; number < 8; ++number) {
            pages.push_back({key_of(number), {}});
            bytes.push_back(content(number, 0, kBytes));
            pages.back().parts.push_back({0, bytes.back().data(), kBytes});
            if (number % 2 == 0) continue;
            bytes.push_back(content(number, kStatePart, kState));
            pages.back().parts.push_back({kStatePart, bytes.back().data(), kState});
        }
        CHECK_EQ(disk.store->put(std::move(pages)), 8);
        std::vector<kvcore::TierMemory> memory;
        for (std::size_t i = 0; i < 2; ++i) {
            memory.push_back({{rows[i].data(), kRows, kBytes}, {slots[i].data(), kRows, kState}});
        }
        store = std::make_unique<DiskLowerStore>(*disk.store, std::move(memory), true, seconds);
    }
    /// Return the number of pages that were read. `places`: for each page its parts and rows.
    std::int64_t read(const std::vector<std::uint64_t>& numbers,
                      const std::vector<std::vector<kvcore::StoredPart>>& places,
                      std::size_t first = 0) {
        moves.clear();
        moves.replica = 1;
        for (std::size_t i = 0; i < numbers.size(); ++i) {
            moves.keys.push_back(page_key_of(numbers[i]));
            for (const kvcore::StoredPart& part : places[i]) moves.parts.push_back(part);
            moves.ends.push_back(static_cast<std::int32_t>(moves.parts.size()));
        }
        const kvcore::ColumnRange range{moves, first, numbers.size() - first};
        parts.assign(numbers.size(), 0);
        return static_cast<std::int64_t>(store->read(range, parts.data(), late, hooks));
    }
    [[nodiscard]] std::vector<std::byte> row(std::int64_t row) const {
        return {rows[1].begin() + row * kBytes, rows[1].begin() + (row + 1) * kBytes};
    }

    TemporaryDirectory directory;
    FaultyScene disk;
    std::vector<std::vector<std::byte>> rows;
    std::vector<std::vector<std::byte>> slots;
    FakeHooks hooks;
    StoreMoves moves;
    std::vector<std::uint64_t> parts;
    StoreTask late;  // its destructor waits before the memory goes
    std::unique_ptr<DiskLowerStore> store;
};

TEST(each_part_goes_to_its_row) {
    Scene m;
    CHECK_EQ(m.read({4, 1, 2}, {{{0, 9}}, {{0, 2}, {kStatePart, 1}}, {{0, 11}}}), 3);
    const std::uint64_t state = std::uint64_t{1} << kStatePart;
    CHECK(m.parts == std::vector<std::uint64_t>({1, 1 | state, 1}));
    CHECK(m.row(9) == content(4, 0, kBytes));
    CHECK(m.row(2) == content(1, 0, kBytes));
    CHECK(m.row(11) == content(2, 0, kBytes));
    const std::vector<std::byte> slot(m.slots[1].begin() + kState, m.slots[1].begin() + 2 * kState);
    CHECK(slot == content(1, kStatePart, kState));
    CHECK(m.rows[0] == std::vector<std::byte>(m.rows[0].size()));  // the other replica
    CHECK_EQ(m.read({4, 6}, {{{0, 3}}, {{0, 5}}}, 1), 1);          // begins at the second column
    CHECK(m.row(3) == std::vector<std::byte>(kBytes));
    CHECK(m.row(5) == content(6, 0, kBytes));
    const DiskLowerStore::Counters counters = m.store->take_counters();
    CHECK_EQ(count(counters.read_seconds), 2);
    CHECK_EQ(counters.errors + counters.timeouts, 0);
    CHECK(m.store->take_counters().read_seconds.empty());
}

TEST(a_hole_or_a_missing_part_ends_the_read) {
    Scene m;
    CHECK_EQ(m.read({0, 99, 1}, {{{0, 0}}, {{0, 1}}, {{0, 2}}}), 1);
    CHECK_EQ(m.read({1, 2}, {{{kStatePart, 0}}, {{kStatePart, 1}}}), 1);
    CHECK(m.row(0) == content(0, 0, kBytes));
    CHECK(m.late.done());
    std::vector<std::uint64_t> found(3);
    const std::vector<PageKey> keys{page_key_of(1), page_key_of(99), page_key_of(2)};
    m.store->parts_of(keys.data(), 3, found.data());
    const std::uint64_t state = std::uint64_t{1} << kStatePart;
    CHECK(found == std::vector<std::uint64_t>({1 | state, 0, 1}));
}

TEST(a_disk_that_fails_is_a_miss) {
    Scene m;
    m.disk.ops->read_error = EIO;
    CHECK_EQ(m.read({0, 2}, {{{0, 0}}, {{0, 1}}}), 0);
    CHECK(m.disk.store->stats().errors >= 1);
    m.disk.ops->read_error = 0;
    m.disk.ops->short_reads = true;
    CHECK_EQ(m.read({0, 2}, {{{0, 0}}, {{0, 1}}}), 0);
    CHECK(m.disk.store->stats().corrupt >= 1);
    m.disk.ops->short_reads = false;
    CHECK_EQ(m.read({4, 6}, {{{0, 0}}, {{0, 1}}}), 2);
    CHECK_EQ(m.store->take_counters().errors, 0);  // the disk counts its failures
}

TEST(a_read_that_takes_too_long_is_a_miss_and_keeps_its_memory) {
    Door door;
    Scene m(0.01);
    m.disk.ops->before_move = [&] { door.pass(); };
    CHECK_EQ(m.read({0, 2}, {{{0, 0}}, {{0, 1}}}), 0);
    CHECK_EQ(m.store->take_counters().timeouts, 1);
    CHECK(!m.late.done());
    door.open();
    CHECK(m.late.wait());
    CHECK(m.row(1) == content(2, 0, kBytes));
}

TEST(a_wait_can_be_interrupted) {
    Door door;
    Scene m;
    m.disk.ops->before_move = [&] { door.pass(); };
    m.hooks.on_interrupt = [] { throw Interrupted(); };
    CHECK_THROWS(Interrupted, static_cast<void>(m.read({0}, {{{0, 0}}})));
    CHECK(!m.late.done());
    door.open();
    CHECK(m.late.wait());
}

TEST(a_store_that_its_owner_closes_is_a_miss) {
    Scene m;
    m.disk.store->close();
    std::uint64_t parts = 9;
    const PageKey key = page_key_of(1);
    m.store->parts_of(&key, 1, &parts);
    CHECK_EQ(parts, 0U);
    CHECK_EQ(m.read({0}, {{{0, 0}}}), 0);
    CHECK_EQ(m.store->take_counters().errors, 2);
}

/// Write one page from row 7 and slot 3 of replica 1; return the number of stored pages.
std::int64_t write_page(Scene& m, std::uint64_t number, const std::vector<std::int32_t>& parts) {
    StoreMoves moves;
    moves.replica = 1;
    moves.keys = {page_key_of(99), page_key_of(number)};
    moves.parts = {{0, 0}};
    moves.ends = {1};
    for (const std::int32_t part : parts) moves.parts.push_back({part, part == 0 ? 7 : 3});
    moves.ends.push_back(static_cast<std::int32_t>(moves.parts.size()));
    const auto page = content(number, 0, kBytes);
    const auto state = content(number, kStatePart, kState);
    std::copy(page.begin(), page.end(), m.rows[1].begin() + 7 * kBytes);
    std::copy(state.begin(), state.end(), m.slots[1].begin() + 3 * kState);
    kvcore::StoreWrite write = m.store->write(moves, {1});
    return m.store->end(write);
}

TEST(pages_are_written_from_their_rows) {
    Scene m;
    CHECK_EQ(write_page(m, 20, {0}), 1);
    CHECK_EQ(write_page(m, 21, {0, kStatePart}), 1);
    CHECK_EQ(m.read({20, 21}, {{{0, 1}}, {{0, 2}, {kStatePart, 5}}}), 2);
    CHECK(m.row(1) == content(20, 0, kBytes));
    CHECK(m.row(2) == content(21, 0, kBytes));
    CHECK(m.disk.store->parts_of(key_of(99)) == 0);
    CHECK_EQ(count(m.store->take_counters().write_seconds), 2);
    m.store->remove({page_key_of(20), page_key_of(77)});
    CHECK(m.disk.store->parts_of(key_of(20)) == 0);
}

TEST(a_page_keeps_the_parts_that_the_store_had_before) {
    Scene m;
    const std::uint64_t both = 1 | std::uint64_t{1} << kStatePart;
    CHECK_EQ(write_page(m, 4, {kStatePart}), 1);  // has part 0
    CHECK_EQ(m.disk.store->parts_of(key_of(4)), both);
    CHECK_EQ(write_page(m, 5, {0}), 1);  // has both
    CHECK_EQ(m.disk.store->parts_of(key_of(5)), both);
    CHECK_EQ(m.read({4, 5}, {{{0, 1}, {kStatePart, 5}}, {{0, 2}, {kStatePart, 6}}}), 2);
    CHECK(m.row(1) == content(4, 0, kBytes));
    CHECK(m.row(2) == content(5, 0, kBytes));
    const auto slot = m.slots[1].begin() + 5 * kState;
    CHECK(std::vector<std::byte>(slot, slot + kState) == content(4, kStatePart, kState));
    m.disk.ops->read_error = EIO;
    CHECK_EQ(write_page(m, 2, {kStatePart}), 1);  // the old part cannot be read
    m.disk.ops->read_error = 0;
    CHECK_EQ(m.disk.store->parts_of(key_of(2)), std::uint64_t{1} << kStatePart);
}

TEST(writes_that_fail_are_not_stored) {
    Scene m;
    m.disk.ops->write_error = ENOSPC;
    CHECK_EQ(write_page(m, 20, {0}), 0);
    m.disk.ops->write_error = 0;
    m.disk.store->close();
    CHECK_EQ(write_page(m, 20, {0}), 0);
    m.store->remove({page_key_of(1)});
    CHECK_EQ(m.store->take_counters().errors, 2);
}

// A manager, a reader and a disk: the pages of the host tier get the bytes of the disk. The owner
// closes the disk between the search and the second read.
TEST(a_prompt_comes_from_disk) {
    TemporaryDirectory directory;
    FaultyScene disk(disk_config(directory.path, kBytes, 16));
    LowerScene m(64, kRows);
    const Tokens prompt = count_up(10, 13);
    const Keys keys = m.keys(prompt);
    std::vector<std::vector<std::byte>> bytes;
    std::vector<kvcore::PageToWrite> pages;
    for (std::size_t i = 0; i < keys.size(); ++i) {
        bytes.push_back(content(i, 0, kBytes));
        StoreKey name;
        std::memcpy(name.bytes.data(), keys[i].data(), keys[i].size());
        pages.push_back({name, {{0, bytes.back().data(), kBytes}}});
    }
    CHECK_EQ(disk.store->put(std::move(pages)), 6);
    std::vector<std::byte> rows(kRows * kBytes);
    DiskLowerStore store(*disk.store, {{{rows.data(), kRows, kBytes}, {}}}, false, 60);
    m.open({&store}, 16);
    StoreMoves fill;
    int fills = 0;
    m.hooks.on_prepare = [&](const StoreMoves& moves) {
        fill = moves;
        if (++fills == 2) disk.store->close();
    };
    m.load(Tokens(prompt.begin(), prompt.begin() + 9));
    CHECK_EQ(count(fill.keys), 4);
    for (std::size_t i = 0; i < 4; ++i) {
        const std::byte* row = rows.data() + fill.parts[i].page * kBytes;
        CHECK(std::memcmp(row, bytes[i].data(), kBytes) == 0);
    }
    m.load(prompt);
    CHECK_EQ(m.hit(prompt), 8);
    CHECK(store.take_counters().errors >= 1);
    CHECK_EQ(m.room(), kRows);
}

}  // namespace

}  // namespace tests::tiers::disk_lower_store
