// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <vector>

#include "kvcore/paged_batch.hpp"
#include "support/random.hpp"

namespace tests::data::paged_rows {

using kvcore::BlockId;
using kvcore::ceil_div;
using kvcore::PagedRows;
using kvcore::TokenRows;
using kvcore::TokenShape;

namespace {

using Bytes = std::vector<std::byte>;

std::byte& at(Bytes& bytes, std::int64_t index) { return bytes[static_cast<std::size_t>(index)]; }

/// Byte strides of the axes (outer, middle, head), in any nesting, with gaps.
struct Strides {
    std::int64_t outer;
    std::int64_t token;
    std::int64_t head;
    std::int64_t total;  // bytes spanned
};

/// [outer, token, head, bytes], or with heads before tokens; `gap` bytes after every run.
Strides strides_of(std::int64_t outer, std::int64_t tokens, TokenShape shape, bool heads_first,
                   std::int64_t gap) {
    const std::int64_t run = shape.head_bytes + gap;
    const std::int64_t inner = tokens * shape.heads * run;
    if (heads_first) return {inner, run, tokens * run, outer * inner};
    return {inner, shape.heads * run, run, outer * inner};
}

/// Sizes, layouts and a shuffled list of blocks, all drawn from the seed.
struct Case {
    explicit Case(Random& random)
        : shape{random.between(1, 4), random.between(1, 9)},
          block_size(random.between(1, 6)),
          first(random.below(12)),
          count(random.below(20)),
          num_blocks(ceil_div(first + count, block_size) + random.between(1, 4)),
          pool(strides_of(num_blocks, block_size, shape, random.chance(50), gap(random))),
          rows(strides_of(1, std::max<std::int64_t>(count, 1), shape, random.chance(50),
                          gap(random))) {
        for (BlockId id = 0; id < num_blocks; ++id) ids.push_back(id);
        for (std::int64_t i = num_blocks - 1; i > 0; --i) {
            std::swap(ids[static_cast<std::size_t>(i)],
                      ids[static_cast<std::size_t>(random.below(i + 1))]);
        }
    }

    static std::int64_t gap(Random& random) { return random.chance(50) ? 0 : random.between(1, 3); }

    // Returns the offset of a byte of a token of the sequence, by the definition of a page table.
    [[nodiscard]] std::int64_t in_pool(std::int64_t token, std::int64_t head,
                                       std::int64_t byte) const {
        const BlockId block = ids[static_cast<std::size_t>(token / block_size)];
        return block * pool.outer + token % block_size * pool.token + head * pool.head + byte;
    }
    [[nodiscard]] std::int64_t in_rows(std::int64_t token, std::int64_t head,
                                       std::int64_t byte) const {
        return token * rows.token + head * rows.head + byte;
    }
    template <class Byte>
    [[nodiscard]] PagedRows<Byte> paged(Byte* data) const {
        return {data, pool.outer, pool.token, pool.head, block_size, ids.data()};
    }
    template <class Byte>
    [[nodiscard]] TokenRows<Byte> tokens(Byte* data) const {
        return {data, rows.token, rows.head};
    }
    template <class Visit>
    void for_each_byte(Visit&& visit) const {
        for (std::int64_t token = 0; token < count; ++token) {
            for (std::int64_t head = 0; head < shape.heads; ++head) {
                for (std::int64_t byte = 0; byte < shape.head_bytes; ++byte) {
                    visit(in_pool(first + token, head, byte), in_rows(token, head, byte));
                }
            }
        }
    }

    TokenShape shape;
    std::int64_t block_size;
    std::int64_t first;
    std::int64_t count;
    std::int64_t num_blocks;
    Strides pool;
    Strides rows;
    std::vector<BlockId> ids;
};

Bytes random_bytes(Random& random, std::int64_t n) {
    Bytes bytes(static_cast<std::size_t>(n));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next() & 0xff);
    return bytes;
}

// Compares every byte of the memory: bytes between and after the rows must not change.
void rows_go_where_the_page_table_says(Random& random) {
    const Case c(random);
    const Bytes source = random_bytes(random, c.rows.total);
    Bytes pool = random_bytes(random, c.pool.total);
    Bytes expected = pool;
    Bytes rows = source;
    c.for_each_byte([&](std::int64_t to, std::int64_t from) { at(expected, to) = at(rows, from); });
    kvcore::append_rows(c.shape, c.paged(pool.data()), c.first, c.tokens(source.data()), c.count);
    CHECK(pool == expected);

    Bytes destination = random_bytes(random, c.rows.total);
    rows = destination;
    c.for_each_byte([&](std::int64_t from, std::int64_t to) { at(rows, to) = at(expected, from); });
    const Bytes& full = pool;
    kvcore::gather_rows(c.shape, c.paged(full.data()), c.first, c.tokens(destination.data()),
                        c.count);
    CHECK(destination == rows);
}

TEST(rows_may_run_backwards) {
    const std::vector<BlockId> ids = {0};
    const Bytes source = {std::byte{1}, std::byte{2}, std::byte{3}};
    Bytes pool(3);
    kvcore::append_rows({1, 1}, {pool.data(), 3, 1, 1, 3, ids.data()}, 0,
                        TokenRows<const std::byte>{source.data() + 2, -1, 1}, 3);
    CHECK((pool == Bytes{std::byte{3}, std::byte{2}, std::byte{1}}));
}

// The product of an id and a stride has 64 bits.
TEST(offsets_may_exceed_32_bits) {
    const std::vector<BlockId> ids = {1, 2, 1 << 20, 2147483647};
    const std::int64_t two_31 = std::int64_t{1} << 31;
    for (const std::int64_t stride : {two_31 - 1, two_31, 2 * two_31, std::int64_t{1} << 20}) {
        const PagedRows<const std::byte> rows{nullptr, stride, 7, 1, 2, ids.data()};
        CHECK_EQ(rows.offset(0), stride);
        CHECK_EQ(rows.offset(3), 2 * stride + 7);
        CHECK_EQ(rows.offset(4), (std::int64_t{1} << 20) * stride);
        CHECK_EQ(rows.offset(7), 2147483647 * stride + 7);
    }
}

TEST(rows_go_where_the_page_table_says) {
    Random random(check::seed_or(4));
    for (int i = 0; i < 20000; ++i) rows_go_where_the_page_table_says(random);
}

}  // namespace

}  // namespace tests::data::paged_rows
