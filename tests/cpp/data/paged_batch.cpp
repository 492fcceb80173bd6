// SPDX-License-Identifier: Apache-2.0
// Batches against single tokens, for every number of threads, and missing pages.
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "kvcore/paged_batch.hpp"
#include "support/random.hpp"

namespace tests::data::paged_batch {

using kvcore::PageTable;
using kvcore::TokenRanges;
using Bytes = std::vector<std::byte>;

namespace {

constexpr std::uint32_t kNoPage = 1000;

/// A pool [pages, page_size, heads, head_bytes] with gaps, and a batch with pages in random order.
struct Scene {
    explicit Scene(Random& random)
        : page_size(random.between(1, 9)),
          shape{random.between(1, 3), random.between(1, 20)},
          batch(random.below(5)) {
        std::uint32_t next = 0;
        offsets.push_back(0);
        for (std::int64_t row = 0; row < batch; ++row) {
            begin.push_back(static_cast<std::uint32_t>(random.below(3 * page_size)));
            const auto added = static_cast<std::uint32_t>(random.below(4 * page_size));
            offsets.push_back(offsets.back() + added);
            const std::int64_t columns = kvcore::ceil_div(begin.back() + added, page_size);
            for (std::int64_t column = 0; column < kWidth; ++column) {
                table.push_back(column < columns ? next++ : kNoPage);
            }
        }
        num_pages = next + 1;
        head_stride = shape.head_bytes + random.below(4);
        token_stride = head_stride * shape.heads + random.below(4);
        page_stride = token_stride * page_size + random.below(4);
        std::vector<std::uint32_t> renamed(static_cast<std::size_t>(num_pages));
        std::iota(renamed.begin(), renamed.end(), 0U);
        for (std::size_t i = renamed.size(); i > 1; --i) {
            std::swap(
                renamed[i - 1],
                renamed[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
        }
        for (std::uint32_t& page : table) {
            if (page != kNoPage) page = renamed[page];
        }
    }

    static constexpr std::int64_t kWidth = 9;

    [[nodiscard]] std::int64_t total() const { return offsets.back(); }
    [[nodiscard]] PageTable pages() const { return {table.data(), kWidth, kWidth, batch}; }
    [[nodiscard]] TokenRanges ranges() const { return {begin.data(), offsets.data()}; }
    [[nodiscard]] Bytes random_pool(Random& random) const {
        Bytes pool(static_cast<std::size_t>(num_pages * page_stride));
        for (std::byte& byte : pool) byte = static_cast<std::byte>(random.next());
        return pool;
    }
    // Returns the offset in the pool of token `at` of the contiguous memory.
    [[nodiscard]] std::int64_t place(std::int64_t row, std::int64_t at) const {
        const std::int64_t token =
            begin[static_cast<std::size_t>(row)] + at - offsets[static_cast<std::size_t>(row)];
        const std::uint32_t page =
            table[static_cast<std::size_t>(row * kWidth + token / page_size)];
        return page * page_stride + token % page_size * token_stride;
    }
    template <class Visit>
    void for_each_byte(Visit&& visit) const {
        std::int64_t row = 0;
        for (std::int64_t at = 0; at < total(); ++at) {
            while (at >= offsets[static_cast<std::size_t>(row) + 1]) ++row;
            for (std::int64_t head = 0; head < shape.heads; ++head) {
                for (std::int64_t i = 0; i < shape.head_bytes; ++i) {
                    visit(place(row, at) + head * head_stride + i,
                          (at * shape.heads + head) * shape.head_bytes + i);
                }
            }
        }
    }

    std::int64_t page_size;
    kvcore::TokenShape shape;
    std::int64_t batch;
    std::int64_t num_pages = 0;
    std::int64_t head_stride = 0;
    std::int64_t token_stride = 0;
    std::int64_t page_stride = 0;
    std::vector<std::uint32_t> table;
    std::vector<std::uint32_t> begin;
    std::vector<std::uint32_t> offsets;
};

TEST(batches_write_where_single_tokens_write) {
    Random random(check::seed_or(21));
    for (int i = 0; i < 2000; ++i) {
        const Scene scene(random);
        CHECK_EQ(kvcore::find_missing_page(scene.pages(), scene.ranges(), scene.page_size,
                                           scene.num_pages)
                     .row,
                 -1);
        const Bytes before = scene.random_pool(random);
        Bytes tokens(
            static_cast<std::size_t>(scene.total() * scene.shape.heads * scene.shape.head_bytes));
        for (std::byte& byte : tokens) byte = static_cast<std::byte>(random.next());
        const std::int64_t row_bytes = scene.shape.heads * scene.shape.head_bytes;
        const auto threads = static_cast<int>(random.between(1, 4));

        Bytes pool = before;
        kvcore::append_batch(scene.shape,
                             {pool.data(), scene.page_stride, scene.token_stride, scene.head_stride,
                              scene.page_size, nullptr},
                             scene.pages(), scene.ranges(),
                             {tokens.data(), row_bytes, scene.shape.head_bytes}, threads);
        Bytes expected = before;
        scene.for_each_byte([&](std::int64_t in_pool, std::int64_t in_tokens) {
            expected[static_cast<std::size_t>(in_pool)] =
                tokens[static_cast<std::size_t>(in_tokens)];
        });
        CHECK(pool == expected);

        Bytes read(tokens.size());
        kvcore::gather_batch(scene.shape,
                             {pool.data(), scene.page_stride, scene.token_stride, scene.head_stride,
                              scene.page_size, nullptr},
                             scene.pages(), scene.ranges(),
                             {read.data(), row_bytes, scene.shape.head_bytes}, threads);
        CHECK(read == tokens);
    }
}

// A batch that is large enough for several threads, with a split inside a row and with empty rows.
TEST(threads_do_not_change_a_byte) {
    constexpr std::int64_t kTokens = 6000;
    std::vector<std::uint32_t> table(3 * kTokens);
    std::iota(table.begin(), table.end(), 0U);
    const PageTable pages{table.data(), kTokens, kTokens, 3};
    const std::vector<std::uint32_t> offsets{0, 100, 100, kTokens};
    const TokenRanges ranges{nullptr, offsets.data()};
    const kvcore::TokenShape shape{2, 256};
    Bytes tokens(kTokens * 512);
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::byte>(i * 7);
    Bytes pools[2];
    for (int i = 0; i < 2; ++i) {
        pools[i].resize(3 * kTokens * 512);
        kvcore::append_batch(shape, {pools[i].data(), 512, 512, 256, 1, nullptr}, pages, ranges,
                             {tokens.data(), 512, 256}, 1 + 4 * i);
    }
    CHECK(pools[0] == pools[1]);
}

TEST(the_error_names_the_first_missing_page) {
    Random random(check::seed_or(21));
    for (int i = 0; i < 2000; ++i) {
        Scene scene(random);
        if (scene.total() == 0) continue;
        // A random page that a range uses.
        std::int64_t row = 0;
        const std::int64_t at = random.below(scene.total());
        while (at >= scene.offsets[static_cast<std::size_t>(row) + 1]) ++row;
        const auto r = static_cast<std::size_t>(row);
        const std::int64_t column = (scene.begin[r] + at - scene.offsets[r]) / scene.page_size;
        const auto lost = static_cast<std::uint32_t>(random.between(scene.num_pages, 1 << 30));
        scene.table[static_cast<std::size_t>(row * Scene::kWidth + column)] = lost;
        const kvcore::MissingPage missing = kvcore::find_missing_page(
            scene.pages(), scene.ranges(), scene.page_size, scene.num_pages);
        CHECK_EQ(missing.row, row);
        CHECK_EQ(missing.token, std::max<std::int64_t>(scene.begin[r], column * scene.page_size));
        CHECK_EQ(missing.entry, lost);
        PageTable narrow = scene.pages();
        narrow.width = column;
        CHECK_EQ(kvcore::find_missing_page(narrow, scene.ranges(), scene.page_size,
                                           std::int64_t{1} << 40)
                         .row >= 0,
                 true);
    }
}

}  // namespace

}  // namespace tests::data::paged_batch
