// SPDX-License-Identifier: Apache-2.0
// NVFP4 on the CPU: every instruction set and every number of threads gives the bytes of the scalar
// conversions. No other byte is written.
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "data/kernels/isa.hpp"
#include "fakes/conversion_memory.hpp"
#include "kvcore/quantize.hpp"

namespace tests::data::nvfp4 {

using conversion::Bytes;
using conversion::Guarded;
using conversion::kWide;
using kvcore::DType;
using kvcore::GlobalScale;
using kvcore::kNvfp4Block;

namespace {

constexpr float kGlobals[] = {1.0F, 0.37F, 0x1p-12F, 5e4F, 1e-30F, 1e-44F, 5e37F, 3e38F};

// ---- scalar conversions -------------------------------------------------------------------------

TEST(codes_are_rounded_to_the_nearest_and_ties_to_even) {
    constexpr float kValues[] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    for (std::uint8_t code = 0; code < 8; ++code) {
        CHECK(kvcore::from_e2m1(code) == kValues[code]);
        CHECK(kvcore::from_e2m1(static_cast<std::uint8_t>(code | 8U)) == -kValues[code]);
        CHECK_EQ(int{kvcore::to_e2m1(kValues[code])}, int{code});
        CHECK_EQ(int{kvcore::to_e2m1(-kValues[code])}, code | 8);
        if (code == 7) continue;
        const float middle = (kValues[code] + kValues[code + 1]) / 2;
        CHECK_EQ(int{kvcore::to_e2m1(middle)}, code + code % 2);
        CHECK_EQ(int{kvcore::to_e2m1(std::nextafter(middle, 0.0F))}, int{code});
        CHECK_EQ(int{kvcore::to_e2m1(std::nextafter(middle, 9.0F))}, code + 1);
    }
    CHECK(std::signbit(kvcore::from_e2m1(8)));
    for (const float beyond : {6.1F, 1e30F, kInfinity}) {
        CHECK_EQ(int{kvcore::to_e2m1(beyond)}, 7);
        CHECK_EQ(int{kvcore::to_e2m1(-beyond)}, 15);
    }
    const float nan = std::numeric_limits<float>::quiet_NaN();
    CHECK_EQ(int{kvcore::to_e2m1(nan)}, 0);
    CHECK_EQ(int{kvcore::to_e2m1(-nan)}, 0);
}

TEST(scales_are_above_zero_and_saturate) {
    CHECK_EQ(int{kvcore::nvfp4_scale(0.0F, 1.0F)}, 1);
    CHECK_EQ(int{kvcore::nvfp4_scale(6.0F, 1.0F)}, int{kvcore::to_e4m3fn(1.0F)});
    CHECK_EQ(int{kvcore::nvfp4_scale(6.0F, 0.5F)}, int{kvcore::to_e4m3fn(2.0F)});
    CHECK_EQ(int{kvcore::nvfp4_scale(3e38F, 1.0F)}, 0x7e);
    CHECK_EQ(int{kvcore::nvfp4_scale(1e-30F, 1.0F)}, 1);
}

// ---- blocks -------------------------------------------------------------------------------------

struct Coded {
    Bytes codes;
    Bytes scales;
};

// Follows the steps of kvcore/nvfp4.hpp, element by element.
Coded coded(DType wide, const std::byte* elements, std::int64_t blocks, float global) {
    Coded found;
    for (std::int64_t block = 0; block < blocks; ++block) {
        float values[kNvfp4Block];
        float most = 0;
        for (std::int64_t i = 0; i < kNvfp4Block; ++i) {
            values[i] =
                read_element(wide, elements + (block * kNvfp4Block + i) * kvcore::item_size(wide));
            if (std::isfinite(values[i])) most = std::fmax(most, std::fabs(values[i]));
        }
        const std::uint8_t scale = kvcore::nvfp4_scale(most, global);
        const float factor = 1.0F / (kvcore::from_e4m3fn(scale) * global);
        found.scales.push_back(static_cast<std::byte>(scale));
        for (std::int64_t i = 0; i < kNvfp4Block; i += 2) {
            const unsigned low = kvcore::to_e2m1(values[i] * factor);
            const unsigned high = kvcore::to_e2m1(values[i + 1] * factor);
            found.codes.push_back(static_cast<std::byte>(low | high << 4U));
        }
    }
    return found;
}

Bytes values_of(const Coded& given, DType wide, float global) {
    Bytes found(given.codes.size() * 2 * static_cast<std::size_t>(kvcore::item_size(wide)));
    for (std::size_t i = 0; i < given.codes.size() * 2; ++i) {
        const auto byte = std::to_integer<unsigned>(given.codes[i / 2]);
        const auto code = static_cast<std::uint8_t>(byte >> (i % 2 * 4) & 0xfU);
        const auto scale = std::to_integer<std::uint8_t>(given.scales[i / kNvfp4Block]);
        const float factor = kvcore::from_e4m3fn(scale) * global;
        write_element(wide, found.data() + i * static_cast<std::size_t>(kvcore::item_size(wide)),
                      kvcore::from_e2m1(code) * factor);
    }
    return found;
}

std::vector<const kvcore::cpu::KernelTable*> tables() {
    std::vector<const kvcore::cpu::KernelTable*> found{&kvcore::cpu::kBaselineKernels};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
        found.push_back(&kvcore::cpu::kV3Kernels);
    }
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
        found.push_back(&kvcore::cpu::kV4Kernels);
    }
#endif
    return found;
}

kvcore::cpu::Tile line(std::int64_t blocks, const std::byte* source, std::byte* destination,
                       std::byte* scales) {
    kvcore::cpu::Tile tile{};
    tile.source = source;
    tile.destination = destination;
    tile.scales = tile.new_scales = scales;
    tile.tokens = tile.heads = 1;
    tile.dim = blocks * kNvfp4Block;
    return tile;
}

TEST(every_table_agrees_with_the_scalar_conversions) {
    Random random(check::seed_or(11));
    for (int i = 0; i < check::rounds(300); ++i) {
        const auto w = static_cast<std::size_t>(random.below(3));
        const DType wide = kWide[w];
        const std::int64_t blocks = random.below(40);
        const float global = kGlobals[random.below(8)];
        Guarded source(blocks * kNvfp4Block * kvcore::item_size(wide), random.below(64));
        conversion::fill_elements(random, wide, source.data(), blocks * kNvfp4Block);
        const Coded expected = coded(wide, source.data(), blocks, global);
        for (const kvcore::cpu::KernelTable* table : tables()) {
            Guarded codes(blocks * 8, random.below(64));
            Guarded scales(blocks, random.below(64));
            table->wide[w].quantize_nvfp4(line(blocks, source.data(), codes.data(), scales.data()),
                                          global);
            CHECK(codes.taken() == expected.codes);
            CHECK(scales.taken() == expected.scales);
            const auto back = static_cast<std::size_t>(random.below(3));
            Guarded values(blocks * kNvfp4Block * kvcore::item_size(kWide[back]), random.below(64));
            table->wide[back].dequantize_nvfp4(
                line(blocks, codes.data(), values.data(), scales.data()), global);
            CHECK(values.taken() == values_of(expected, kWide[back], global));
            for (const Guarded* memory : {&source, &codes, &scales, &values}) memory->check();
        }
    }
}

// All codes with all scales, including NaN.
TEST(every_code_and_scale_has_the_value_of_the_scalar_conversion) {
    Coded all;
    for (int scale = 0; scale < 256; ++scale) {
        all.scales.push_back(static_cast<std::byte>(scale));
        for (int i = 0; i < 8; ++i) {
            all.codes.push_back(static_cast<std::byte>((2 * i + 1) << 4 | 2 * i));
        }
    }
    for (const kvcore::cpu::KernelTable* table : tables()) {
        for (std::size_t w = 0; w < 3; ++w) {
            for (const float global : kGlobals) {
                Bytes values(static_cast<std::size_t>(4096 * kvcore::item_size(kWide[w])));
                table->wide[w].dequantize_nvfp4(
                    line(256, all.codes.data(), values.data(), all.scales.data()), global);
                CHECK(values == values_of(all, kWide[w], global));
            }
        }
    }
}

TEST(threads_do_not_change_a_byte) {
    Random random(check::seed_or(11));
    constexpr std::int64_t kBlocks = 20'011;
    const float global = 0.25F;
    for (const DType wide : kWide) {
        Bytes source(static_cast<std::size_t>(kBlocks * kNvfp4Block * kvcore::item_size(wide)));
        conversion::fill_elements(random, wide, source.data(), kBlocks * kNvfp4Block);
        const Coded expected = coded(wide, source.data(), kBlocks, global);
        for (int threads = 1; threads <= 4; ++threads) {
            Coded found{Bytes(kBlocks * 8), Bytes(kBlocks)};
            Bytes back(source.size());
            kvcore::quantize_nvfp4(kBlocks, wide, source.data(), {global}, found.codes.data(),
                                   found.scales.data(), threads);
            kvcore::dequantize_nvfp4(kBlocks, found.codes.data(), found.scales.data(),
                                     GlobalScale{1.0F, &global}, wide, back.data(), threads);
            CHECK(found.codes == expected.codes);
            CHECK(found.scales == expected.scales);
            CHECK(back == values_of(expected, wide, global));
        }
    }
}

// ---- pools --------------------------------------------------------------------------------------

/// K in pages. A gap that must not be written follows each head.
struct Pool {
    static constexpr std::int64_t kPages = 9;
    static constexpr std::int64_t kPage = 4;
    static constexpr std::int64_t kHeads = 3;

    explicit Pool(std::int64_t blocks)
        : dim(blocks * kNvfp4Block),
          codes(static_cast<std::size_t>(kPages * kPage * kHeads * code_step()), std::byte{0x5a}),
          scales(static_cast<std::size_t>(kPages * kPage * kHeads * scale_step()),
                 std::byte{0x5a}) {}

    [[nodiscard]] std::int64_t code_step() const { return dim / 2 + 3; }
    [[nodiscard]] std::int64_t scale_step() const { return dim / 16 + 1; }
    // Heads before tokens: HND.
    [[nodiscard]] kvcore::Nvfp4Tensor<std::byte> tensor() {
        const auto bytes = [](Bytes& memory, std::int64_t step) {
            return kvcore::HeadBytes<std::byte>{memory.data(), kPage * kHeads * step, step,
                                                kPage * step};
        };
        return {dim, bytes(codes, code_step()), bytes(scales, scale_step()), {0.5F}};
    }
    void put(std::int64_t page, std::int64_t token, std::int64_t head, const Coded& given) {
        const auto at = (page * kHeads + head) * kPage + token;
        std::copy(given.codes.begin(), given.codes.end(), codes.begin() + at * code_step());
        std::copy(given.scales.begin(), given.scales.end(), scales.begin() + at * scale_step());
    }

    std::int64_t dim;
    Bytes codes;
    Bytes scales;
};

TEST(tokens_are_written_to_slots_and_read_from_pages) {
    Random random(check::seed_or(11));
    for (int round = 0; round < check::rounds(60); ++round) {
        const DType wide = random.pick(kWide);
        Pool pool(random.between(1, 9));
        Pool expected = pool;
        const std::int64_t head_bytes = pool.dim * kvcore::item_size(wide);
        const std::int64_t tokens = random.below(15);
        Bytes rows(static_cast<std::size_t>(tokens * Pool::kHeads * head_bytes));
        conversion::fill_elements(random, wide, rows.data(), tokens * Pool::kHeads * pool.dim);
        // Every second slot: some are padding, and one is past the end of the pool.
        std::vector<std::int64_t> slots;
        std::int64_t beyond = 0;
        for (std::int64_t i = 0; i < tokens; ++i) {
            const bool is_padding = random.chance(20);
            const bool is_beyond = !is_padding && random.chance(20);
            slots.push_back(is_padding ? -1 - i : is_beyond ? 36 + i : 2 * i);
            beyond += is_beyond ? 1 : 0;
            if (is_padding || is_beyond) continue;
            for (std::int64_t head = 0; head < Pool::kHeads; ++head) {
                const std::byte* at = rows.data() + (i * Pool::kHeads + head) * head_bytes;
                expected.put(2 * i / Pool::kPage, 2 * i % Pool::kPage, head,
                             coded(wide, at, pool.dim / kNvfp4Block, 0.5F));
            }
        }
        const kvcore::TokenRows<const std::byte> source{rows.data(), Pool::kHeads * head_bytes,
                                                        head_bytes};
        const kvcore::Nvfp4Pool<std::byte> view{
            Pool::kPages, {Pool::kPage, Pool::kHeads}, pool.tensor(), {}};
        const int threads = static_cast<int>(random.between(1, 4));
        CHECK_EQ(kvcore::append_slots(view, source, source, wide, slots.data(), tokens, threads),
                 beyond);
        CHECK(pool.codes == expected.codes);
        CHECK(pool.scales == expected.scales);
    }
}

TEST(batches_are_written_and_read) {
    Random random(check::seed_or(11));
    constexpr std::uint32_t kTable[] = {3, 1, 7, 5, 0, 8};  // two rows of three pages
    constexpr std::uint32_t kBegin[] = {2, 5};
    constexpr std::uint32_t kOffsets[] = {0, 7, 9};
    const kvcore::PageTable table{kTable, 3, 3, 2};
    const kvcore::TokenRanges ranges{kBegin, kOffsets};
    const kvcore::PageShape shape{Pool::kPage, Pool::kHeads};
    for (int round = 0; round < check::rounds(60); ++round) {
        const DType wide = random.pick(kWide);
        Pool pool(random.between(1, 9));
        Pool expected = pool;
        const std::int64_t head_bytes = pool.dim * kvcore::item_size(wide);
        Bytes rows(static_cast<std::size_t>(9 * Pool::kHeads * head_bytes));
        conversion::fill_elements(random, wide, rows.data(), 9 * Pool::kHeads * pool.dim);
        Bytes values;
        for (std::int64_t i = 0; i < 9; ++i) {
            const std::int64_t row = i < 7 ? 0 : 1;
            const std::int64_t token = kBegin[row] + i - kOffsets[row];
            for (std::int64_t head = 0; head < Pool::kHeads; ++head) {
                const std::byte* at = rows.data() + (i * Pool::kHeads + head) * head_bytes;
                const Coded one = coded(wide, at, pool.dim / kNvfp4Block, 0.5F);
                expected.put(kTable[3 * row + token / Pool::kPage], token % Pool::kPage, head, one);
                const Bytes back = values_of(one, wide, 0.5F);
                values.insert(values.end(), back.begin(), back.end());
            }
        }
        const int threads = static_cast<int>(random.between(1, 4));
        kvcore::append_batch(shape, pool.tensor(), table, ranges,
                             {rows.data(), Pool::kHeads * head_bytes, head_bytes}, wide, threads);
        CHECK(pool.codes == expected.codes);
        CHECK(pool.scales == expected.scales);
        const auto written = pool.tensor();
        const auto readable = [](const kvcore::HeadBytes<std::byte>& bytes) {
            return kvcore::HeadBytes<const std::byte>{bytes.data, bytes.page_stride,
                                                      bytes.token_stride, bytes.head_stride};
        };
        Bytes back(rows.size());
        kvcore::gather_batch(
            shape, {pool.dim, readable(written.codes), readable(written.scales), {0.5F}}, table,
            ranges, {back.data(), Pool::kHeads * head_bytes, head_bytes}, wide, threads);
        CHECK(back == values);
    }
}

}  // namespace

}  // namespace tests::data::nvfp4
