// SPDX-License-Identifier: Apache-2.0
#include <utility>
#include <vector>

#include "kvcore/lookup_table.hpp"
#include "kvcore/sequence_table.hpp"
#include "request.hpp"

using kvcore::LookupTable;
using kvcore::Sequence;

namespace {

constexpr std::uint32_t kNoPage = 99999;
constexpr std::uint32_t kPoison = 0xabadcafe;

/// A table over memory that begins as rubbish.
struct Buffer {
    Buffer(std::int64_t rows, std::int64_t columns)
        : stride(columns),
          memory(static_cast<std::size_t>(rows * columns), kPoison),
          table(memory.data(), rows, columns, kNoPage) {}

    void write(std::int64_t row, kvcore::SequenceHandle occupant, const Sequence& sequence,
               std::int32_t width) {
        CHECK(table.has_room(row, sequence));
        table.write_row(row, occupant, sequence);
        table.pad(row + 1, width);
    }
    std::uint32_t& at(std::int64_t row, std::int64_t column) {
        return item(memory, row * stride + column);
    }
    void check_row(std::int64_t row, const Sequence& sequence, std::int64_t width) {
        for (std::int64_t column = 0; column < width; ++column) {
            const bool is_page = column < sequence.num_pages();
            CHECK_EQ(at(row, column),
                     is_page ? static_cast<std::uint32_t>(item(sequence.pages, column)) : kNoPage);
        }
    }

    std::int64_t stride;
    std::vector<std::uint32_t> memory;
    LookupTable table;
};

void rows_read_pages_then_unassigned() {
    Buffer buffer(3, 40);
    Sequence sequence;
    sequence.pages = {4, 5, 6};
    buffer.write(1, {0, 1}, sequence, 5);
    buffer.check_row(1, sequence, 5);
    CHECK_EQ(buffer.at(0, 4), kNoPage);   // an empty row
    CHECK_EQ(buffer.at(2, 0), kPoison);   // behind the last row nobody reads
    CHECK_EQ(buffer.at(1, 39), kPoison);  // nor far behind the width
    CHECK_EQ(buffer.table.max_rows(), 3);
    CHECK_EQ(buffer.table.stride(), 40);
    CHECK(!buffer.table.has_room(3, sequence));
    sequence.pages.resize(41);
    CHECK(!buffer.table.has_room(0, sequence));
}

// Only what changed is written: a cell overwritten behind the table's back stays.
void unchanged_columns_are_left_alone() {
    Buffer buffer(1, 8);
    Sequence sequence;
    sequence.pages = {4, 5, 6};
    buffer.write(0, {0, 1}, sequence, 4);
    buffer.at(0, 1) = kPoison;
    sequence.pages.push_back(7);
    buffer.write(0, {0, 1}, sequence, 6);
    CHECK_EQ(buffer.at(0, 1), kPoison);
    CHECK_EQ(buffer.at(0, 3), 7);
    CHECK_EQ(buffer.at(0, 5), kNoPage);
    ++sequence.row_version;  // a page was replaced: everything is written again
    buffer.write(0, {0, 1}, sequence, 6);
    buffer.check_row(0, sequence, 6);
}

void a_new_occupant_is_noticed() {
    Buffer buffer(1, 8);
    Sequence longer;
    longer.pages = {1, 2, 3, 4, 5};
    Sequence shorter;
    shorter.pages = {7, 8};
    buffer.write(0, {0, 1}, longer, 5);
    buffer.write(0, {1, 1}, shorter, 5);
    buffer.check_row(0, shorter, 5);
    // The same slot of the sequence table, used again.
    buffer.write(0, {1, 2}, longer, 5);
    buffer.check_row(0, longer, 5);
    buffer.write(0, {1, 3}, shorter, 8);
    buffer.check_row(0, shorter, 8);
}

// Batches of few long rows and of many short ones take turns.
void every_row_asked_for_is_padded() {
    Buffer buffer(4, 40);
    Sequence shorter;
    shorter.pages = {1, 2};
    Sequence longer;
    for (BlockId page = 0; page < 33; ++page) longer.pages.push_back(page);
    for (const auto& [rows, width] : {std::pair{2, 5}, {1, 33}, {4, 5}, {4, 33}, {2, 40}}) {
        for (int row = 0; row < rows; ++row) {
            const bool is_long = row == 0 && width >= 33;
            buffer.table.write_row(row, {is_long ? 9U : static_cast<std::uint32_t>(row), 1},
                                   is_long ? longer : shorter);
        }
        buffer.table.pad(rows, width);
        for (int row = 0; row < rows; ++row) {
            buffer.check_row(row, row == 0 && width >= 33 ? longer : shorter, width);
        }
    }
}

// Sequences come, grow, change, move between rows and back; two buffers are used in turn, so that
// each misses some of the changes.
void agrees_with_rewriting(std::uint64_t seed) {
    Random random(seed);
    constexpr std::int64_t kRows = 4;
    constexpr std::int64_t kColumns = 24;
    std::vector<Buffer> buffers(2, Buffer(kRows, kColumns));
    for (Buffer& buffer : buffers) {
        buffer.table = LookupTable(buffer.memory.data(), kRows, kColumns, kNoPage);
    }
    std::vector<Sequence> sequences(6);
    BlockId next_page = 0;
    for (int step = 0; step < 20000; ++step) {
        Sequence& sequence = random.pick(sequences);
        const std::int64_t dice = random.below(10);
        if (dice < 6 && sequence.num_pages() < kColumns) {
            sequence.pages.push_back(next_page++ % 5000);
        } else if (dice == 6 && sequence.num_pages() > 0) {
            random.pick(sequence.pages) = next_page++ % 5000;
            ++sequence.row_version;
        } else if (dice == 7 && sequence.num_pages() > 0) {
            sequence.pages.resize(static_cast<std::size_t>(random.below(sequence.num_pages())));
            ++sequence.row_version;
        } else if (dice == 8 && random.chance(20)) {
            const std::uint32_t generation = sequence.generation + 1;
            sequence = Sequence{};
            sequence.generation = generation;
        }
        Buffer& buffer = random.pick(buffers);
        const std::int64_t row = random.below(kRows);
        const std::int64_t index = random.below(count(sequences));
        const Sequence& occupant = item(sequences, index);
        const auto width =
            static_cast<std::int32_t>(random.between(occupant.num_pages(), kColumns));
        buffer.write(row, {static_cast<std::uint32_t>(index), occupant.generation}, occupant,
                     width);
        buffer.check_row(row, occupant, width);
    }
}

}  // namespace

int main(int argc, char** argv) {
    const std::uint64_t seed = seed_from(argc, argv, 14);
    rows_read_pages_then_unassigned();
    unchanged_columns_are_left_alone();
    a_new_occupant_is_noticed();
    every_row_asked_for_is_padded();
    for (std::uint64_t i = 0; i < 5; ++i) agrees_with_rewriting(seed + i);
}
