// SPDX-License-Identifier: Apache-2.0
// Slots of batches, tokens written by slots, and lengths, each against single tokens.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kvcore/paged_batch.hpp"
#include "support/random.hpp"

namespace tests::data::slots {

using kvcore::DType;
using kvcore::PoolView;
using Bytes = std::vector<std::byte>;

namespace {

Bytes random_bytes(Random& random, std::int64_t n) {
    Bytes bytes(static_cast<std::size_t>(n));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
    return bytes;
}

template <class Slot>
void slots_are_page_times_size_plus_token(Random& random) {
    for (int i = 0; i < 1000; ++i) {
        const std::int64_t page_size = random.between(1, 9);
        const std::int64_t num_pages = random.between(1, 50);
        const std::int64_t batch = random.below(6);
        constexpr std::int64_t kWidth = 5;
        std::vector<std::uint32_t> table, lengths, offsets = {0};
        std::vector<Slot> expected;
        for (std::int64_t row = 0; row < batch; ++row) {
            for (std::int64_t column = 0; column < kWidth; ++column) {
                table.push_back(static_cast<std::uint32_t>(random.below(num_pages + 2)));
            }
            lengths.push_back(static_cast<std::uint32_t>(random.below(3 * page_size)));
            offsets.push_back(offsets.back() +
                              static_cast<std::uint32_t>(random.below(3 * page_size)));
            for (std::int64_t token = lengths.back();
                 token < lengths.back() + offsets.back() - *(offsets.end() - 2); ++token) {
                const std::int64_t column = token / page_size;
                const std::int64_t page =
                    column < kWidth ? table[static_cast<std::size_t>(row * kWidth + column)]
                                    : num_pages;
                expected.push_back(static_cast<Slot>(
                    page < num_pages ? page * page_size + token % page_size : -1));
            }
        }
        const auto capacity = static_cast<std::int64_t>(expected.size()) + random.below(4);
        expected.resize(static_cast<std::size_t>(capacity), Slot{-1});
        std::vector<Slot> slots(static_cast<std::size_t>(capacity) + 1, Slot{77});
        kvcore::build_slots({table.data(), kWidth, kWidth, batch}, {lengths.data(), offsets.data()},
                            page_size, num_pages, slots.data(), capacity);
        CHECK_EQ(slots.back(), Slot{77});
        slots.pop_back();
        CHECK(slots == expected);
    }
}

TEST(slots_do_not_wrap) {
    const std::uint32_t table[] = {1U << 30};
    const std::uint32_t lengths[] = {0};
    const std::uint32_t offsets[] = {0, 2};
    std::int64_t slots[2];
    kvcore::build_slots({table, 1, 1, 1}, {lengths, offsets}, 4096, std::int64_t{1} << 31, slots,
                        2);
    CHECK_EQ(slots[1], (std::int64_t{1} << 42) + 1);
}

/// A layer [pages, page_size, heads, dim] of K, and sometimes V, with gaps, in one piece of memory.
struct Pool {
    explicit Pool(Random& random) : page_size(random.between(1, 5)), heads(random.between(1, 4)) {
        view.pages = random.between(1, 6);
        view.page_size = page_size;
        view.heads = heads;
        const auto dtype = static_cast<DType>(random.below(kvcore::kNumDTypes));
        std::int64_t bytes = random.below(70);
        const std::int64_t first_k = bytes;
        bytes += lay_out(random, view.k, dtype, random.between(1, 70));
        const std::int64_t first_v = bytes;
        if (random.chance(70)) bytes += lay_out(random, view.v, dtype, random.between(1, 70));
        memory = random_bytes(random, bytes + 70);
        view.k.data = memory.data() + first_k;
        view.v.data = memory.data() + first_v;
    }

    std::int64_t lay_out(Random& random, kvcore::PagedTensor<std::byte>& tensor, DType dtype,
                         std::int64_t dim) const {
        const bool is_hnd = random.chance(40);
        tensor.dtype = dtype;
        tensor.dim = dim;
        const std::int64_t row = dim * kvcore::item_size(dtype) + random.below(2) * random.below(9);
        tensor.head_stride = is_hnd ? row * page_size : row;
        tensor.token_stride = is_hnd ? row : row * heads;
        tensor.page_stride = row * heads * page_size + random.below(9);
        return tensor.page_stride * view.pages;
    }

    std::int64_t page_size;
    std::int64_t heads;
    PoolView<std::byte> view;
    Bytes memory;
};

template <class Slot>
void tokens_go_to_their_slots(Random& random) {
    for (int i = 0; i < 1500; ++i) {
        Pool pool(random);
        const std::int64_t capacity = pool.view.pages * pool.page_size;
        std::vector<Slot> slots;
        std::int64_t beyond = 0;
        for (std::int64_t slot = 0; slot < capacity; ++slot) {
            if (random.chance(60)) slots.push_back(static_cast<Slot>(slot));
            if (random.chance(10)) slots.push_back(static_cast<Slot>(-1 - random.below(9)));
            if (random.chance(10)) {
                slots.push_back(static_cast<Slot>(capacity + random.below(9)));
                ++beyond;
            }
        }
        const bool is_shuffled = random.chance(60);  // otherwise most slots are consecutive
        for (std::size_t j = slots.size(); j > 1 && is_shuffled; --j) {
            std::swap(slots[j - 1],
                      slots[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(j)))]);
        }
        const auto n = static_cast<std::int64_t>(slots.size());
        // A fused row: keys and values of all heads, and other data after them.
        const std::int64_t item = kvcore::item_size(pool.view.k.dtype);
        const std::int64_t k_head = pool.view.k.dim * item;
        const std::int64_t v_head = pool.view.v.dim * item;
        const std::int64_t fused = pool.heads * (k_head + v_head) + random.below(9);
        const Bytes rows = random_bytes(random, fused * (n + 2));
        const std::byte* values = rows.data() + pool.heads * k_head;

        Bytes expected = pool.memory;
        const auto write = [&](const kvcore::PagedTensor<std::byte>& tensor, std::int64_t slot,
                               const std::byte* from, std::int64_t head_bytes) {
            for (std::int64_t head = 0; head < pool.heads; ++head) {
                const std::byte* at = tensor.at(slot / pool.page_size, slot % pool.page_size, head);
                std::copy_n(from + head * head_bytes, head_bytes,
                            expected.begin() + (at - pool.memory.data()));
            }
        };
        for (std::int64_t j = 0; j < n; ++j) {
            const std::int64_t slot = slots[static_cast<std::size_t>(j)];
            if (slot < 0 || slot >= capacity) continue;
            write(pool.view.k, slot, rows.data() + j * fused, k_head);
            if (v_head > 0) write(pool.view.v, slot, values + j * fused, v_head);
        }
        const std::int64_t found =
            kvcore::append_slots(pool.view, {rows.data(), fused, k_head}, {values, fused, v_head},
                                 slots.data(), n, static_cast<int>(random.between(1, 3)));
        CHECK_EQ(found, beyond);
        CHECK(pool.memory == expected);
    }
}

/// The tokens have enough bytes for streamed writes and for several threads.
TEST(many_tokens_are_the_same_for_all_threads) {
    Random random(check::seed_or(13));
    constexpr std::int32_t kTokens = 4096;
    Bytes memory(std::size_t{1} << 23);
    PoolView<std::byte> pool{kTokens / 16, 16, 2, {}, {}, {}};
    constexpr std::int64_t kHead = 512;
    constexpr std::int64_t kPage = 32 * kHead;
    pool.k = {memory.data(), DType::kFloat16, 256, kPage, 2 * kHead, kHead, {}};
    pool.v = {memory.data() + (1 << 22), DType::kFloat16, 256, kPage, kHead, 16 * kHead, {}};
    const Bytes rows = random_bytes(random, std::int64_t{kTokens} * 1024);
    std::vector<std::int32_t> slots;
    for (std::int32_t i = 0; i < kTokens; ++i) slots.push_back(i * 1027 % kTokens);
    Bytes expected;
    for (int threads = 1; threads <= 3; ++threads) {
        std::fill(memory.begin(), memory.end(), std::byte{0});
        CHECK_EQ(kvcore::append_slots(pool, {rows.data(), 1024, 512}, {rows.data(), 1024, 512},
                                      slots.data(), kTokens, threads),
                 0);
        if (threads == 1) expected = memory;
        CHECK(memory == expected);
    }
    CHECK(std::equal(rows.begin(), rows.begin() + 1024, expected.begin()));
}

TEST(lengths_grow_where_rows_are_active) {
    std::vector<std::uint32_t> lengths = {5, 0, 7, 4000000000U};
    const std::uint32_t offsets[] = {0, 2, 2, 9, 10};
    const std::uint8_t active[] = {1, 1, 0, 7};
    std::vector<std::uint32_t> advanced(4);
    kvcore::advance_lengths(lengths.data(), offsets, active, advanced.data(), 4);
    CHECK(advanced == (std::vector<std::uint32_t>{7, 0, 7, 4000000001U}));
    kvcore::advance_lengths(lengths.data(), offsets, nullptr, lengths.data(), 4);
    CHECK(lengths == (std::vector<std::uint32_t>{7, 0, 14, 4000000001U}));
}

/// A batch in its own memory, with a gap after each row of its table.
struct Batch {
    Batch(Random& random, std::int64_t num_rows, std::int64_t width)
        : rows(num_rows), columns(width), stride(width + random.below(3)) {
        pages = numbers(random, rows * stride);
        lengths = numbers(random, rows);
        offsets = {0};
        for (std::int64_t row = 0; row < rows; ++row) {
            offsets.push_back(offsets.back() + static_cast<std::uint32_t>(random.below(4)));
        }
    }
    static std::vector<std::uint32_t> numbers(Random& random, std::int64_t n) {
        std::vector<std::uint32_t> found;
        for (std::int64_t i = 0; i < n; ++i) {
            found.push_back(static_cast<std::uint32_t>(random.next()));
        }
        return found;
    }
    [[nodiscard]] kvcore::BatchRows view() {
        return {pages.data(), stride, columns, rows, lengths.data(), offsets.data()};
    }
    /// Returns the batch with the kept rows, copied one by one.
    [[nodiscard]] Batch of(const std::vector<std::uint32_t>& kept) const {
        Batch found = *this;
        for (std::int64_t row = 0; row < rows; ++row) {
            const auto to = static_cast<std::size_t>(row);
            const bool is_kept = to < kept.size();
            const std::size_t from = is_kept ? kept[to] : 0;
            for (std::int64_t c = 0; c < columns; ++c) {
                const auto column = static_cast<std::size_t>(c);
                const auto step = static_cast<std::size_t>(stride);
                found.pages[to * step + column] =
                    is_kept ? pages[from * step + column] : 0xffffffffU;
            }
            found.lengths[to] = is_kept ? lengths[from] : 0;
            found.offsets[to + 1] =
                found.offsets[to] + (is_kept ? offsets[from + 1] - offsets[from] : 0);
        }
        return found;
    }
    [[nodiscard]] bool operator==(const Batch& other) const {
        return pages == other.pages && lengths == other.lengths && offsets == other.offsets;
    }

    std::int64_t rows;
    std::int64_t columns;
    std::int64_t stride;
    std::vector<std::uint32_t> pages, lengths, offsets;
};

TEST(kept_rows_move_to_the_front) {
    Random random(check::seed_or(13));
    for (int i = 0; i < 2000; ++i) {
        Batch batch(random, random.below(30), random.below(9));
        std::vector<std::uint32_t> kept;
        const std::int64_t stays = random.below(101);
        for (std::int64_t row = 0; row < batch.rows; ++row) {
            if (random.chance(static_cast<int>(stays))) {
                kept.push_back(static_cast<std::uint32_t>(row));
            }
        }
        const Batch expected = batch.of(kept);
        if (static_cast<std::int64_t>(kept.size()) < batch.rows && random.chance(50)) {
            kept.push_back(random.chance(50) || kept.empty() ? 0xffffffffU : kept.back());
        }
        kvcore::compact_table(batch.view(), kept.data(), static_cast<std::int64_t>(kept.size()),
                              static_cast<int>(random.between(1, 3)));
        CHECK(batch == expected);
    }
}

/// The table has enough columns for several threads. The batch has no lengths and offsets.
TEST(columns_of_a_table_are_shared_among_threads) {
    Random random(check::seed_or(13));
    std::vector<std::uint32_t> kept;
    for (std::uint32_t row = 1; row < 64; row += 2) kept.push_back(row);
    for (int threads = 1; threads <= 3; ++threads) {
        Batch batch(random, 64, 5000);
        Batch expected = batch.of(kept);
        expected.lengths = batch.lengths;
        expected.offsets = batch.offsets;
        kvcore::BatchRows view = batch.view();
        view.lengths = view.offsets = nullptr;
        kvcore::compact_table(view, kept.data(), static_cast<std::int64_t>(kept.size()), threads);
        CHECK(batch == expected);
    }
}

TEST(slots_are_page_times_size_plus_token) {
    Random random(check::seed_or(13));
    slots_are_page_times_size_plus_token<std::int64_t>(random);
    slots_are_page_times_size_plus_token<std::int32_t>(random);
}

TEST(tokens_go_to_their_slots) {
    Random random(check::seed_or(13));
    tokens_go_to_their_slots<std::int64_t>(random);
    tokens_go_to_their_slots<std::int32_t>(random);
}

}  // namespace

}  // namespace tests::data::slots
