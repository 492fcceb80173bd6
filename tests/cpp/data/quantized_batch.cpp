// SPDX-License-Identifier: Apache-2.0
// Tokens of a batch are converted into pools of another dtype and back. For every number of
// threads, they have the codes of a contiguous array at the places of single tokens. No other byte
// is written.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <vector>

#include "fakes/conversion_memory.hpp"
#include "kvcore/layout.hpp"
#include "kvcore/paged_batch.hpp"
#include "kvcore/quantize.hpp"
#include "oracle/elements.hpp"
#include "support/random.hpp"

namespace tests::data::quantized_batch {

using kvcore::DType;
using kvcore::PageTable;
using kvcore::TokenRanges;
using Bytes = std::vector<std::byte>;

namespace {

using conversion::kNarrow;
using conversion::kWide;

/// Numbers [tokens, heads, dim] with gaps between tokens and between heads.
struct Tokens {
    Tokens(Random& random, DType of, std::int64_t n, std::int64_t num_heads, std::int64_t dim)
        : dtype(of),
          heads(num_heads),
          head_bytes(dim * kvcore::item_size(of)),
          head_stride(head_bytes + random.below(9)),
          token_stride(heads * head_stride + random.below(9)),
          bytes(static_cast<std::size_t>(n * token_stride + 1), std::byte{0x5a}) {
        for (std::int64_t at = 0; at < n * heads * dim; ++at) {
            const std::int64_t run = at / dim;
            write_element(
                of,
                bytes.data() + place(run / heads, run % heads) + at % dim * kvcore::item_size(of),
                static_cast<float>(random.between(-9999, 9999)) / 777.0F);
        }
    }

    [[nodiscard]] std::int64_t place(std::int64_t token, std::int64_t head) const {
        return token * token_stride + head * head_stride;
    }
    [[nodiscard]] kvcore::TokenRows<std::byte> rows() {
        return {bytes.data(), token_stride, head_stride};
    }
    [[nodiscard]] kvcore::TokenRows<const std::byte> rows() const {
        return {bytes.data(), token_stride, head_stride};
    }
    /// Returns the numbers without gaps.
    [[nodiscard]] Bytes dense(std::int64_t n) const {
        Bytes found;
        for (std::int64_t run = 0; run < n * heads; ++run) {
            const auto at = bytes.begin() + place(run / heads, run % heads);
            found.insert(found.end(), at, at + head_bytes);
        }
        return found;
    }

    DType dtype;
    std::int64_t heads;
    std::int64_t head_bytes;
    std::int64_t head_stride;
    std::int64_t token_stride;
    Bytes bytes;
};

/// Rows whose pages are in random order in a pool [pages, page_size, heads, dim] with gaps.
struct Scene {
    explicit Scene(Random& random)
        : page_size(random.between(1, 9)),
          heads(random.between(1, 3)),
          group(random.between(1, 40)),
          groups(random.between(1, 4)) {
        offsets.push_back(0);
        std::uint32_t next = 0;
        for (std::int64_t row = random.below(4); row > 0; --row) {
            begin.push_back(static_cast<std::uint32_t>(random.below(2 * page_size)));
            offsets.push_back(offsets.back() +
                              static_cast<std::uint32_t>(random.below(3 * page_size)));
            for (std::int64_t column = 0; column < kWidth; ++column) table.push_back(next++);
        }
        for (std::size_t i = table.size(); i > 1; --i) {
            std::swap(table[i - 1],
                      table[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
        }
        head_stride = dim() + random.below(4);
        token_stride = heads * head_stride + random.below(4);
        page_stride = page_size * token_stride + random.below(4);
        pages = next + 1;
    }

    static constexpr std::int64_t kWidth = 6;

    [[nodiscard]] std::int64_t dim() const { return group * groups; }
    [[nodiscard]] std::int64_t total() const { return offsets.back(); }
    [[nodiscard]] PageTable page_table() const {
        return {table.data(), kWidth, kWidth, static_cast<std::int64_t>(begin.size())};
    }
    [[nodiscard]] TokenRanges ranges() const { return {begin.data(), offsets.data()}; }
    template <class Byte>
    [[nodiscard]] kvcore::PagedTensor<Byte> pool(DType dtype, Byte* codes, Byte* scales) const {
        const std::int64_t row = groups * 4;
        return {codes,
                dtype,
                dim(),
                page_stride,
                token_stride,
                head_stride,
                {scales, page_size * heads * row, heads * row, row, group}};
    }
    /// Calls visit(index of a code in the pool, index of a scale, run of the tokens) for all runs.
    template <class Visit>
    void for_each_run(const Visit& visit) const {
        for (std::size_t row = 0; row < begin.size(); ++row) {
            for (std::int64_t at = offsets[row]; at < offsets[row + 1]; ++at) {
                const std::int64_t token = begin[row] + at - offsets[row];
                const std::int64_t page =
                    table[row * kWidth + static_cast<std::size_t>(token / page_size)];
                const std::int64_t in_page = token % page_size;
                for (std::int64_t head = 0; head < heads; ++head) {
                    visit(page * page_stride + in_page * token_stride + head * head_stride,
                          ((page * page_size + in_page) * heads + head) * groups,
                          at * heads + head);
                }
            }
        }
    }

    std::int64_t page_size;
    std::int64_t heads;
    std::int64_t group;
    std::int64_t groups;
    std::int64_t head_stride = 0;
    std::int64_t token_stride = 0;
    std::int64_t page_stride = 0;
    std::int64_t pages = 0;
    std::vector<std::uint32_t> table;
    std::vector<std::uint32_t> begin;
    std::vector<std::uint32_t> offsets;
};

std::byte* bytes_of(std::vector<float>& floats) {
    return reinterpret_cast<std::byte*>(floats.data());
}

TEST(tokens_are_quantised_in_their_places) {
    Random random(check::seed_or(31));
    for (int i = 0; i < 600; ++i) {
        const Scene scene(random);
        const DType wide = random.pick(kWide);
        const DType narrow = random.pick(kNarrow);
        const Tokens source(random, wide, scene.total(), scene.heads, scene.dim());
        const auto threads = static_cast<int>(random.between(1, 4));
        const std::int64_t num_groups = scene.total() * scene.heads * scene.groups;
        Bytes codes(static_cast<std::size_t>(num_groups * scene.group));
        std::vector<float> scales(static_cast<std::size_t>(num_groups));
        kvcore::quantize(kvcore::Groups{num_groups, scene.group}, wide,
                         source.dense(scene.total()).data(), narrow, codes.data(), scales.data());

        Bytes pool(static_cast<std::size_t>(scene.pages * scene.page_stride), std::byte{0xa5});
        const std::int64_t tokens_of_pool = scene.pages * scene.page_size;
        std::vector<float> pool_scales(
            static_cast<std::size_t>(tokens_of_pool * scene.heads * scene.groups), -1);
        Bytes expected = pool;
        std::vector<float> expected_scales = pool_scales;
        scene.for_each_run([&](std::int64_t code, std::int64_t scale, std::int64_t run) {
            std::copy_n(codes.begin() + run * scene.dim(), scene.dim(), expected.begin() + code);
            std::copy_n(scales.begin() + run * scene.groups, scene.groups,
                        expected_scales.begin() + scale);
        });
        const kvcore::PageShape shape{scene.page_size, scene.heads};
        kvcore::append_batch(shape, scene.pool(narrow, pool.data(), bytes_of(pool_scales)),
                             scene.page_table(), scene.ranges(), source.rows(), wide,
                             kvcore::Scales::kFound, threads);
        CHECK(pool == expected);
        CHECK(pool_scales == expected_scales);

        const DType back = random.pick(kWide);
        Tokens read(random, back, scene.total(), scene.heads, scene.dim());
        Bytes values(static_cast<std::size_t>(num_groups * scene.group * kvcore::item_size(back)));
        kvcore::dequantize(kvcore::Groups{num_groups, scene.group}, narrow, codes.data(),
                           scales.data(), back, values.data());
        kvcore::gather_batch(
            shape, scene.pool<const std::byte>(narrow, pool.data(), bytes_of(pool_scales)),
            scene.page_table(), scene.ranges(), read.rows(), back, threads);
        CHECK(read.dense(scene.total()) == values);
    }
}

// A batch that is large enough for several threads, with a split inside a row; latent rows of 656
// bytes.
TEST(threads_do_not_change_a_byte) {
    Random random(check::seed_or(31));
    constexpr std::int64_t kTokens = 3001;
    std::vector<std::uint32_t> table(kTokens);
    std::iota(table.begin(), table.end(), 0U);
    const std::vector<std::uint32_t> offsets{0, 100, 100, kTokens};
    const PageTable pages{table.data(), 0, kTokens, 3};
    const std::vector<std::uint32_t> begin{0, 0, 100};
    const TokenRanges ranges{begin.data(), offsets.data()};
    const Tokens source(random, DType::kBFloat16, kTokens, 1, 576);
    constexpr kvcore::CacheSizes kSizes{
        kTokens, 1, 1, 1, 512, 0, DType::kFloat8E4M3FN, kvcore::RowFormat::kLatentFp8};
    const kvcore::CacheLayout layout =
        kvcore::layout_of(kvcore::LayoutName::kMax, kSizes).value_or(kvcore::CacheLayout{});
    constexpr std::int64_t kReadBytes = std::int64_t{576} * 4;
    Bytes rows[2];
    Bytes read[2];
    for (int i = 0; i < 2; ++i) {
        rows[i].assign(kTokens * kvcore::kLatentFp8Bytes, std::byte{0xff});
        const auto pool = kvcore::latent_view(layout, rows[i].data(), 0, 512);
        kvcore::append_latent(pool, pages, ranges, source.rows(), DType::kBFloat16, 1 + 3 * i);
        const auto seen = kvcore::latent_view<const std::byte>(layout, rows[i].data(), 0, 512);
        read[i].resize(kTokens * kReadBytes);
        kvcore::gather_latent(seen, pages, ranges, {read[i].data(), kReadBytes, 0}, DType::kFloat32,
                              1 + 3 * i);
    }
    CHECK(rows[0] == rows[1]);
    CHECK(read[0] == read[1]);
    const Bytes dense = source.dense(kTokens);
    for (std::int64_t token = 0; token < kTokens; ++token) {
        CHECK(std::memcmp(rows[0].data() + token * kvcore::kLatentFp8Bytes + 528,
                          dense.data() + token * 1152 + 1024, 128) == 0);
    }
}

}  // namespace

}  // namespace tests::data::quantized_batch
