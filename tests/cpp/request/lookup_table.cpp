// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>
#include <vector>

#include "kvcore/request.hpp"
#include "support/request.hpp"

namespace tests::request::lookup_table {

using kvcore::LookupTable;

namespace {

constexpr std::uint32_t kNoPage = 99999;
constexpr std::uint32_t kPoison = 0xabadcafe;

/// The pages of one row.
struct Pages {
    std::vector<BlockId> ids;
    std::uint32_t version = 0;
    std::uint32_t generation = 1;

    [[nodiscard]] kvcore::RowPages view() const { return {ids.data(), size(), version, &changes}; }
    [[nodiscard]] std::int32_t size() const { return static_cast<std::int32_t>(ids.size()); }
    /// A page at this column or after it was replaced or dropped.
    void note(std::int32_t column) { changes.note(++version, column); }

    kvcore::RowChanges changes;
};

/// A table over memory that starts with garbage.
struct Buffer {
    Buffer(std::int64_t rows, std::int64_t columns)
        : stride(columns),
          memory(static_cast<std::size_t>(rows * columns), kPoison),
          table(memory.data(), rows, columns, kNoPage) {}

    void write(std::int64_t row, kvcore::SequenceHandle occupant, const Pages& pages,
               std::int32_t width) {
        CHECK(table.has_room(row, pages.view()));
        table.write_row(row, occupant, pages.view());
        table.pad(row + 1, width);
    }
    std::uint32_t& at(std::int64_t row, std::int64_t column) {
        return item(memory, row * stride + column);
    }
    void check_row(std::int64_t row, const Pages& pages, std::int64_t width) {
        for (std::int64_t column = 0; column < width; ++column) {
            const bool is_page = column < pages.size();
            CHECK_EQ(at(row, column),
                     is_page ? static_cast<std::uint32_t>(item(pages.ids, column)) : kNoPage);
        }
    }

    std::int64_t stride;
    std::vector<std::uint32_t> memory;
    LookupTable table;
};

TEST(rows_read_pages_then_unassigned) {
    Buffer buffer(3, 40);
    Pages pages;
    pages.ids = {4, 5, 6};
    buffer.write(1, {0, 1}, pages, 5);
    buffer.check_row(1, pages, 5);
    CHECK_EQ(buffer.at(0, 4), kNoPage);   // an empty row
    CHECK_EQ(buffer.at(2, 0), kPoison);   // nothing reads after the last row
    CHECK_EQ(buffer.at(1, 39), kPoison);  // nor far past the width
    CHECK_EQ(buffer.table.max_rows(), 3);
    CHECK_EQ(buffer.table.stride(), 40);
    CHECK(!buffer.table.has_room(3, pages.view()));
    pages.ids.resize(41);
    CHECK(!buffer.table.has_room(0, pages.view()));
}

// Only changed columns are written: a cell that the test overwrites keeps the test's value.
TEST(unchanged_columns_are_left_alone) {
    Buffer buffer(1, 8);
    Pages pages;
    pages.ids = {4, 5, 6};
    buffer.write(0, {0, 1}, pages, 4);
    buffer.at(0, 1) = kPoison;
    pages.ids.push_back(7);
    buffer.write(0, {0, 1}, pages, 6);
    CHECK_EQ(buffer.at(0, 1), kPoison);
    CHECK_EQ(buffer.at(0, 3), 7);
    CHECK_EQ(buffer.at(0, 5), kNoPage);
    pages.ids = {4, 5, 8, 9};  // replaced from the third page on
    pages.note(2);
    buffer.write(0, {0, 1}, pages, 6);
    CHECK_EQ(buffer.at(0, 1), kPoison);
    buffer.at(0, 1) = 5;
    buffer.check_row(0, pages, 6);
    buffer.at(0, 1) = kPoison;
    ++pages.version;  // without a known column, everything is written again
    const kvcore::RowPages unknown{pages.ids.data(), pages.size(), pages.version};
    buffer.table.write_row(0, {0, 1}, unknown);
    buffer.check_row(0, pages, 6);
}

// After a row is cut and grows again, every buffer that has shown it recently rewrites it only from
// the cut on, whatever its length.
TEST(a_row_that_was_cut_is_written_from_the_cut_on) {
    constexpr std::int32_t kColumns = 1000;
    std::vector<Buffer> buffers(4, Buffer(1, kColumns));
    for (Buffer& buffer : buffers) {
        buffer.table = LookupTable(buffer.memory.data(), 1, kColumns, kNoPage);
    }
    Pages pages;
    BlockId next_page = 0;
    while (pages.size() < 800) pages.ids.push_back(next_page++);
    for (Buffer& buffer : buffers) buffer.write(0, {0, 1}, pages, 800);
    for (int step = 0; step < 150; ++step) {
        const std::int32_t kept = pages.size() - 2;
        pages.ids.resize(static_cast<std::size_t>(kept));
        pages.note(kept);
        for (int i = 0; i < 3; ++i) pages.ids.push_back(next_page++);
        Buffer& buffer = item(buffers, step % 4);
        // Each of the last 64 cuts is at most two pages before the previous cut.
        for (std::int64_t c = 0; c < kept - 2 * 64; ++c) buffer.at(0, c) = kPoison;
        buffer.write(0, {0, 1}, pages, pages.size());
        for (std::int64_t c = 0; c < kept - 2 * 64; ++c) {
            CHECK_EQ(buffer.at(0, c), kPoison);
            buffer.at(0, c) = static_cast<std::uint32_t>(item(pages.ids, c));
        }
        buffer.check_row(0, pages, pages.size());
    }
}

TEST(a_new_occupant_is_noticed) {
    Buffer buffer(1, 8);
    Pages longer;
    longer.ids = {1, 2, 3, 4, 5};
    Pages shorter;
    shorter.ids = {7, 8};
    buffer.write(0, {0, 1}, longer, 5);
    buffer.write(0, {1, 1}, shorter, 5);
    buffer.check_row(0, shorter, 5);
    // The same entry of the sequence table is used again.
    buffer.write(0, {1, 2}, longer, 5);
    buffer.check_row(0, longer, 5);
    buffer.write(0, {1, 3}, shorter, 8);
    buffer.check_row(0, shorter, 8);
}

// Batches of few long rows alternate with batches of many short rows.
TEST(every_row_asked_for_is_padded) {
    Buffer buffer(4, 40);
    Pages shorter;
    shorter.ids = {1, 2};
    Pages longer;
    for (BlockId page = 0; page < 33; ++page) longer.ids.push_back(page);
    for (const auto& [rows, width] : {std::pair{2, 5}, {1, 33}, {4, 5}, {4, 33}, {2, 40}}) {
        for (int row = 0; row < rows; ++row) {
            const bool is_long = row == 0 && width >= 33;
            buffer.table.write_row(row, {is_long ? 9U : static_cast<std::uint32_t>(row), 1},
                                   (is_long ? longer : shorter).view());
        }
        buffer.table.pad(rows, width);
        for (int row = 0; row < rows; ++row) {
            buffer.check_row(row, row == 0 && width >= 33 ? longer : shorter, width);
        }
    }
}

/// Columns with a page in each of two lanes: a fetch shows a row of two bundles in this form.
struct TwoBundles {
    static constexpr kvcore::SequenceHandle kOccupant{0, 1};

    void append() {
        columns.push_back(static_cast<BlockId>(columns.size()));
        pages.push_back(static_cast<BlockId>(pages.size()) + 1);
        pages.push_back(static_cast<BlockId>(pages.size()) + 1);
        ++state.windows;
    }
    [[nodiscard]] kvcore::BundlePages of(std::int32_t lane) const {
        kvcore::BundlePages view;
        view.columns = columns.data();
        view.n = static_cast<std::int32_t>(columns.size());
        view.first = lane == 0 ? 0 : first;
        view.state = state;
        view.changes = &changes;
        view.pages = pages.data() + lane;
        view.stride = 2;
        return view;
    }
    void write(Buffer& leader, Buffer& other) const {
        LookupTable* const others[] = {&other.table};
        leader.table.lead(others, 1);
        if (leader.table.shows(0, kOccupant, state)) return;
        other.table.write_row(0, kOccupant, of(1));
        leader.table.write_row(0, kOccupant, of(0));
    }
    void check(Buffer& leader, Buffer& other) const {
        for (std::int32_t c = 0; c < static_cast<std::int32_t>(columns.size()); ++c) {
            CHECK_EQ(leader.at(0, c), of(0).cell(c, 0, kNoPage));
            CHECK_EQ(other.at(0, c), c < first ? kNoPage : of(1).cell(c, 0, kNoPage));
        }
    }

    std::vector<BlockId> columns;
    std::vector<BlockId> pages;
    std::int32_t first = 0;  // the first column that the second bundle reads
    kvcore::RowState state;
    kvcore::RowChanges changes;
};

TEST(windows_move_on) {
    Buffer leader(1, 12);
    Buffer other(1, 12);
    TwoBundles row;
    for (int step = 0; step < 12; ++step) {
        row.append();
        if (step % 3 == 2) row.first += 2;
        row.write(leader, other);
        row.check(leader, other);
    }
    other.at(0, 11) = kPoison;  // no change: nothing is written
    row.write(leader, other);
    CHECK_EQ(other.at(0, 11), kPoison);
    row.changes.note(++row.state.version, 0);
    row.write(leader, other);
    row.check(leader, other);
}

// Columns are cut and added again with other ids, the second bundle's window moves forward and
// back, and each pair of tables misses some of these changes.
void bundles_agree_with_rewriting(std::uint64_t seed) {
    Random random(seed);
    std::vector<Buffer> leaders(2, Buffer(1, 24));
    std::vector<Buffer> others(2, Buffer(1, 24));
    for (int i = 0; i < 2; ++i) {
        for (Buffer* each : {&item(leaders, i), &item(others, i)}) {
            each->table = LookupTable(each->memory.data(), 1, 24, kNoPage);
        }
    }
    TwoBundles row;
    BlockId next = 0;
    for (int step = 0; step < 20000; ++step) {
        const auto n = static_cast<std::int32_t>(row.columns.size());
        if (n < 24 && random.below(3) > 0) {
            row.append();
            row.columns.back() = next;
            next = (next + 1) % 24;  // ids of removed columns are used again
        } else if (n > 0 && random.below(3) == 0) {
            const auto kept = static_cast<std::int32_t>(random.below(n));
            row.columns.resize(static_cast<std::size_t>(kept));
            row.changes.note(++row.state.version, kept);
            row.first = std::min(row.first, kept);
            ++row.state.windows;
        } else if (n > 0) {
            row.first = std::max(row.first, static_cast<std::int32_t>(random.below(n)));
            ++row.state.windows;
        }
        const int turn = static_cast<int>(random.below(2));
        row.write(item(leaders, turn), item(others, turn));
        row.check(item(leaders, turn), item(others, turn));
    }
}

// Any free buffer is taken. The leader shows the row as the other buffer, used in between, has it,
// not as this buffer has it.
TEST(a_table_that_was_left_out_is_written_again) {
    Buffer leader(1, 12);
    std::vector<Buffer> others;
    for (int i = 0; i < 2; ++i) others.emplace_back(1, 12);
    for (Buffer& other : others) {
        other.table = LookupTable(other.memory.data(), 1, 12, kNoPage);
    }
    TwoBundles row;
    for (const int turn : {0, 1, 0, 0, 1, 1, 0}) {
        row.append();
        row.write(leader, item(others, turn));
        row.check(leader, item(others, turn));
        row.write(leader, item(others, 1 - turn));
        row.check(leader, item(others, 1 - turn));
    }
}

// Sequences start, grow, change, and move between rows and back. Two buffers alternate, so each
// misses some of the changes.
void agrees_with_rewriting(std::uint64_t seed) {
    Random random(seed);
    constexpr std::int64_t kRows = 4;
    constexpr std::int64_t kColumns = 24;
    std::vector<Buffer> buffers(2, Buffer(kRows, kColumns));
    for (Buffer& buffer : buffers) {
        buffer.table = LookupTable(buffer.memory.data(), kRows, kColumns, kNoPage);
    }
    std::vector<Pages> rows(6);
    BlockId next_page = 0;
    for (int step = 0; step < 20000; ++step) {
        Pages& pages = random.pick(rows);
        const std::int64_t dice = random.below(10);
        if (dice < 6 && pages.size() < kColumns) {
            pages.ids.push_back(next_page++ % 5000);
        } else if (dice == 6 && pages.size() > 0) {
            const std::int64_t column = random.below(pages.size());
            item(pages.ids, column) = next_page++ % 5000;
            pages.note(static_cast<std::int32_t>(column));
        } else if (dice == 7 && pages.size() > 0) {
            pages.ids.resize(static_cast<std::size_t>(random.below(pages.size())));
            pages.note(pages.size());
        } else if (dice == 8 && random.chance(20)) {
            const std::uint32_t generation = pages.generation + 1;
            pages = Pages{};
            pages.generation = generation;
        }
        Buffer& buffer = random.pick(buffers);
        const std::int64_t row = random.below(kRows);
        const std::int64_t index = random.below(count(rows));
        const Pages& occupant = item(rows, index);
        const auto width = static_cast<std::int32_t>(random.between(occupant.size(), kColumns));
        buffer.write(row, {static_cast<std::uint32_t>(index), occupant.generation}, occupant,
                     width);
        buffer.check_row(row, occupant, width);
    }
}

TEST(agrees_with_rewriting) {
    const std::uint64_t seed = check::seed_or(14);
    for (std::uint64_t i = 0; i < 5; ++i) agrees_with_rewriting(seed + i);
}

TEST(bundles_agree_with_rewriting) {
    const std::uint64_t seed = check::seed_or(14);
    for (std::uint64_t i = 0; i < 5; ++i) bundles_agree_with_rewriting(seed + i);
}

}  // namespace

}  // namespace tests::request::lookup_table
