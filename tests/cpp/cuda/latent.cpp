// SPDX-License-Identifier: Apache-2.0
// Latent rows by emulated lanes: joint rows, rows with a separate rope part, and rows of 656 bytes
// (FP8 codes, scales and bfloat16). The whole pool must have the bytes of the CPU.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "emulation/emulation.hpp"
#include "fakes/conversion_memory.hpp"
#include "kvcore/cuda.hpp"
#include "kvcore/layout.hpp"

namespace tests::cuda::latent {

namespace cuda = kvcore::cuda;
using conversion::Bytes;
using kvcore::CacheLayout;
using kvcore::CacheSizes;
using kvcore::DType;
using kvcore::LayoutName;
using kvcore::RowFormat;

namespace {

constexpr cuda::Stream kStream{0, nullptr};
constexpr std::int64_t kPages = 9;
constexpr std::int64_t kLayers = 2;

/// Latent rows in a cache, and a batch of two rows.
struct Case {
    std::int64_t rank;
    std::int64_t rope;
    DType stored;
    RowFormat format;
    bool is_apart;  // the rope part is stored separately
    std::int64_t page_size;

    [[nodiscard]] CacheLayout layout() const {
        const std::int64_t joint = format == RowFormat::kLatentFp8 || is_apart ? rank : rank + rope;
        const CacheSizes sizes{kPages, kLayers, page_size, 1, joint, is_apart ? rope : 0,
                               stored, format};
        return kvcore::layout_of(is_apart ? LayoutName::kLayerFirstNhd : LayoutName::kMax, sizes)
            .value_or(CacheLayout{});
    }
};

void one_case(Random& random, const Case& of, DType wide, DType back) {
    const CacheLayout layout = of.layout();
    std::vector<std::uint32_t> table(kPages);
    std::iota(table.rbegin(), table.rend(), 0U);  // descending page ids
    const std::vector<std::uint32_t> begin{1, 0};
    const auto n = static_cast<std::uint32_t>(3 * of.page_size - 1);
    const std::vector<std::uint32_t> offsets{2, 2 + n, 2 + 2 * n};
    const kvcore::PageTable pages{table.data(), 4, 4, 2};
    const kvcore::TokenRanges ranges{begin.data(), offsets.data()};
    const std::int64_t num_tokens = offsets.back() + 5;  // the last 5 tokens are padding
    const cuda::DeviceBatch batch{pages, ranges, num_tokens, kPages};

    const std::int64_t dim = of.rank + of.rope;
    const std::int64_t stride = (dim + 8) * kvcore::item_size(wide);  // rows with a gap
    Bytes source(static_cast<std::size_t>(num_tokens * stride), std::byte{0xff});
    for (std::int64_t token = 2; token < offsets.back(); ++token) {
        conversion::fill_elements(random, wide, source.data() + token * stride, dim);
    }
    const kvcore::TokenRows<const std::byte> rows{source.data(), stride, 0};

    Bytes expected(static_cast<std::size_t>(layout.bytes), std::byte{0xff});
    Bytes pool = expected;
    std::int32_t bad = 0;
    kvcore::append_latent(kvcore::latent_view(layout, expected.data(), 1, of.rank), pages, ranges,
                          rows, wide);
    CHECK(cuda::append_latent(kvcore::latent_view(layout, pool.data(), 1, of.rank), batch, rows,
                              wide, &bad, kStream) == cuda::kSuccess);
    CHECK(pool == expected);

    const std::int64_t back_stride = (dim + 3) * kvcore::item_size(back);
    Bytes values(static_cast<std::size_t>(num_tokens * back_stride), std::byte{0x5a});
    Bytes found = values;
    const auto seen = kvcore::latent_view<const std::byte>(layout, pool.data(), 1, of.rank);
    kvcore::gather_latent(seen, pages, ranges, {values.data(), back_stride, 0}, back);
    CHECK(cuda::gather_latent(seen, batch, {found.data(), back_stride, 0}, back, &bad, kStream) ==
          cuda::kSuccess);
    CHECK(found == values);
    CHECK_EQ(bad, 0);
}

TEST(latent_rows_have_the_cpu_s_bytes) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(64));
    const Case cases[] = {
        {512, 64, DType::kFloat8E4M3FN, RowFormat::kLatentFp8, false, 16},
        {512, 64, DType::kFloat8E4M3FN, RowFormat::kLatentFp8, false, 3},
        {512, 64, DType::kBFloat16, RowFormat::kPlain, false, 16},
        {256, 64, DType::kFloat16, RowFormat::kPlain, true, 1},
        {59, 7, DType::kFloat32, RowFormat::kPlain, false, 5},
        {59, 7, DType::kBFloat16, RowFormat::kPlain, true, 24},
    };
    for (const Case& of : cases) {
        for (const DType wide : conversion::kWide) {
            for (const DType back : conversion::kWide) one_case(random, of, wide, back);
        }
    }
}

// Computes codes, scales and rope part independently and compares them at the places of the format.
TEST(rows_of_656_bytes_follow_the_format) {
    cuda::emulation::reset(1);
    constexpr std::int64_t kDim = 576;
    std::vector<float> source(kDim);
    for (std::size_t i = 0; i < kDim; ++i) {
        const std::size_t tile = i / 128;
        source[i] = static_cast<float>(i % 17) - 8.0F + static_cast<float>(tile);
    }
    const std::uint32_t table[] = {0};
    const std::uint32_t offsets[] = {0, 1};
    const CacheSizes sizes{1, 1, 1, 1, 512, 0, DType::kFloat8E4M3FN, RowFormat::kLatentFp8};
    const CacheLayout layout = kvcore::layout_of(LayoutName::kMax, sizes).value_or(CacheLayout{});
    Bytes row(kvcore::kLatentFp8Bytes, std::byte{0xff});
    CHECK(cuda::append_latent(kvcore::latent_view(layout, row.data(), 0, 512),
                              {{table, 1, 1, 1}, {nullptr, offsets}, 1, 1},
                              {reinterpret_cast<const std::byte*>(source.data()), kDim * 4, 0},
                              DType::kFloat32, nullptr, kStream) == cuda::kSuccess);
    for (std::int64_t tile = 0; tile < 4; ++tile) {
        float most = 0;
        for (std::int64_t i = 0; i < 128; ++i) {
            most = std::max(most, std::fabs(source[static_cast<std::size_t>(tile * 128 + i)]));
        }
        const float scale = read_element(DType::kFloat32, row.data() + 512 + tile * 4);
        CHECK_EQ(scale, most / 448.0F);
        for (std::int64_t i = tile * 128; i < tile * 128 + 128; ++i) {
            const float value = read_element(DType::kFloat8E4M3FN, row.data() + i) * scale;
            CHECK(std::fabs(value - source[static_cast<std::size_t>(i)]) <= most / 28.0F);
        }
    }
    for (std::int64_t i = 0; i < 64; ++i) {
        CHECK_EQ(read_element(DType::kBFloat16, row.data() + 528 + i * 2),
                 source[static_cast<std::size_t>(512 + i)]);
    }
}

TEST(a_token_without_a_page_is_counted_once) {
    cuda::emulation::reset(1);
    const std::uint32_t table[] = {7};
    const std::uint32_t offsets[] = {0, 2};
    const CacheSizes sizes{1, 1, 1, 1, 512, 0, DType::kFloat8E4M3FN, RowFormat::kLatentFp8};
    const CacheLayout layout = kvcore::layout_of(LayoutName::kMax, sizes).value_or(CacheLayout{});
    Bytes row(kvcore::kLatentFp8Bytes, std::byte{0xff});
    const Bytes before = row;
    constexpr std::int64_t kRow = 576 * sizeof(std::uint16_t);
    Bytes source(2 * kRow);
    std::int32_t bad = 40;
    CHECK(cuda::append_latent(kvcore::latent_view(layout, row.data(), 0, 512),
                              {{table, 1, 1, 1}, {nullptr, offsets}, 2, 1},
                              {source.data(), kRow, 0}, DType::kBFloat16, &bad,
                              kStream) == cuda::kSuccess);
    CHECK_EQ(bad, 42);
    CHECK(row == before);
}

}  // namespace

}  // namespace tests::cuda::latent
