// SPDX-License-Identifier: Apache-2.0
// Slots, lengths and tables of a step, written by emulated lanes.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/cuda.hpp"
#include "support/cuda_scene.hpp"

namespace tests::cuda::step {

using cuda_scene::kDefault;
using cuda_scene::random_page_size;
using cuda_scene::shuffled;
using cuda_scene::size_of;
namespace cuda = kvcore::cuda;

namespace {

template <class Slot>
void slots_are_the_cpu_s(Random& random) {
    for (int i = 0; i < 1000; ++i) {
        const std::int64_t page_size = random_page_size(random);
        const std::int64_t num_pages = random.between(1, 50);
        const std::int64_t batch = random.below(20);
        constexpr std::int64_t kWidth = 5;
        constexpr std::int64_t kStride = 7;
        std::vector<std::uint32_t> table, lengths;
        std::vector<std::uint32_t> offsets = {static_cast<std::uint32_t>(random.below(3))};
        for (std::int64_t row = 0; row < batch; ++row) {
            for (std::int64_t column = 0; column < kStride; ++column) {
                table.push_back(static_cast<std::uint32_t>(random.below(num_pages + 2)));
            }
            lengths.push_back(static_cast<std::uint32_t>(random.below(3 * page_size)));
            offsets.push_back(offsets.back() + static_cast<std::uint32_t>(random.below(
                                                   random.chance(30) ? 1 : 3 * page_size)));
        }
        const std::int64_t tokens = offsets.back() - offsets.front();
        const std::int64_t capacity = tokens + random.below(4);
        std::vector<Slot> found(static_cast<std::size_t>(capacity) + 1, Slot{77});
        std::vector<Slot> expected = found;
        const kvcore::PageTable pages{table.data(), kStride, kWidth, batch};
        const kvcore::TokenRanges ranges{random.chance(80) ? lengths.data() : nullptr,
                                         offsets.data()};
        kvcore::build_slots(pages, ranges, page_size, num_pages, expected.data(), capacity);
        CHECK_EQ(cuda::build_slots(pages, ranges, page_size, num_pages, found.data(), capacity,
                                   kDefault),
                 cuda::kSuccess);
        CHECK(found == expected);
    }
}

TEST(slots_do_not_wrap) {
    cuda::emulation::reset(1);
    const std::uint32_t table[] = {1U << 30};
    const std::uint32_t lengths[] = {0};
    const std::uint32_t offsets[] = {0, 2};
    std::int64_t slots[2];
    CHECK_EQ(cuda::build_slots({table, 1, 1, 1}, {lengths, offsets}, 4096, std::int64_t{1} << 31,
                               slots, 2, kDefault),
             cuda::kSuccess);
    CHECK_EQ(slots[1], (std::int64_t{1} << 42) + 1);
}

TEST(lengths_are_the_cpu_s) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(64));
    for (int i = 0; i < 300; ++i) {
        const std::int64_t batch = random.below(600);
        std::vector<std::uint32_t> lengths, offsets = {0};
        std::vector<std::uint8_t> active;
        for (std::int64_t row = 0; row < batch; ++row) {
            lengths.push_back(static_cast<std::uint32_t>(random.next()));
            offsets.push_back(offsets.back() + static_cast<std::uint32_t>(random.below(9)));
            active.push_back(static_cast<std::uint8_t>(random.below(3)));
        }
        const std::uint8_t* which = random.chance(70) ? active.data() : nullptr;
        std::vector<std::uint32_t> expected = lengths;
        kvcore::advance_lengths(lengths.data(), offsets.data(), which, expected.data(), batch);
        CHECK_EQ(cuda::advance_lengths(lengths.data(), offsets.data(), which, lengths.data(), batch,
                                       kDefault),
                 cuda::kSuccess);
        CHECK(lengths == expected);
    }
}

/// The list may contain any value: rows, the end, rows in descending order, or rows that do not
/// exist.
TEST(compacted_rows_are_the_cpu_s) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(64));
    for (int i = 0; i < 1000; ++i) {
        const std::int64_t rows = random.below(40);
        const std::int64_t columns = random.below(100);
        const std::int64_t stride = columns + random.below(4);
        std::vector<std::uint32_t> pages(static_cast<std::size_t>(rows * stride));
        for (std::uint32_t& entry : pages) entry = static_cast<std::uint32_t>(random.next());
        std::vector<std::uint32_t> lengths, kept;
        std::vector<std::uint32_t> offsets = {0};
        for (std::int64_t row = 0; row < rows; ++row) {
            lengths.push_back(static_cast<std::uint32_t>(random.next()));
            offsets.push_back(offsets.back() + static_cast<std::uint32_t>(random.below(4)));
            if (random.chance(70)) kept.push_back(static_cast<std::uint32_t>(row));
        }
        if (!kept.empty() && random.chance(30)) {
            const auto at = static_cast<std::size_t>(random.below(size_of(kept)));
            const auto any = static_cast<std::uint32_t>(random.below(rows + 2));
            kept[at] = random.chance(50) ? any : ~any;
        }
        std::vector<std::uint32_t> expected[] = {pages, lengths, offsets};
        const bool has_more = random.chance(70);
        const auto view = [&](auto& table, auto& of_rows, auto& ends) {
            return kvcore::BatchRows{table.data(),
                                     stride,
                                     columns,
                                     rows,
                                     has_more ? of_rows.data() : nullptr,
                                     has_more ? ends.data() : nullptr};
        };
        kvcore::compact_table(view(expected[0], expected[1], expected[2]), kept.data(),
                              size_of(kept));
        CHECK_EQ(cuda::compact_table(view(pages, lengths, offsets), kept.data(), size_of(kept),
                                     kDefault),
                 cuda::kSuccess);
        CHECK(pages == expected[0]);
        CHECK(lengths == expected[1]);
        CHECK(offsets == expected[2]);
    }
}

TEST(tables_are_edited_in_place) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(64));
    for (int i = 0; i < 300; ++i) {
        const std::int64_t rows = random.between(1, 20);
        const std::int64_t columns = random.between(1, 30);
        const std::int64_t stride = columns + random.below(4);
        std::vector<std::uint32_t> found(static_cast<std::size_t>(rows * stride));
        for (std::uint32_t& entry : found) entry = static_cast<std::uint32_t>(random.next());
        std::vector<std::uint32_t> expected = found;
        std::vector<cuda::TableEdit> edits;
        std::int32_t outside = 0;
        for (const auto place : shuffled<std::uint32_t>(random, rows * columns)) {
            const auto row = static_cast<std::uint32_t>(place / columns);
            const auto column = static_cast<std::uint32_t>(place % columns);
            const auto page = static_cast<std::uint32_t>(random.next());
            if (random.chance(40)) {
                edits.push_back({row, column, page});
                expected[static_cast<std::size_t>(row * stride + column)] = page;
            }
            if (random.chance(5)) edits.push_back({row, static_cast<std::uint32_t>(columns), page});
            if (random.chance(5)) edits.push_back({0xffffffffU, column, page});
        }
        for (const cuda::TableEdit& edit : edits)
            outside += edit.row >= rows || edit.column >= columns;
        std::int32_t bad = 0;
        CHECK_EQ(cuda::update_table(found.data(), stride, rows, columns, edits.data(),
                                    size_of(edits), random.chance(80) ? &bad : nullptr, kDefault),
                 cuda::kSuccess);
        CHECK(found == expected);
        CHECK(bad == outside || bad == 0);
    }
}

TEST(slots_are_the_cpu_s) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(64));
    slots_are_the_cpu_s<std::int64_t>(random);
    slots_are_the_cpu_s<std::int32_t>(random);
}

}  // namespace

}  // namespace tests::cuda::step
