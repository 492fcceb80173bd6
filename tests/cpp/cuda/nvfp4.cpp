// SPDX-License-Identifier: Apache-2.0
// NVFP4 by emulated lanes: the bytes of the CPU for every size and alignment. No other byte is
// written.
#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulation/emulation.hpp"
#include "fakes/conversion_memory.hpp"
#include "kvcore/cuda.hpp"

namespace tests::cuda::nvfp4 {

namespace cuda = kvcore::cuda;
using conversion::Bytes;
using conversion::Guarded;
using conversion::kWide;
using kvcore::DType;
using kvcore::GlobalScale;
using kvcore::kNvfp4Block;

namespace {

constexpr cuda::Stream kStream{0, nullptr};
constexpr float kGlobals[] = {1.0F, 0.37F, 5e4F, 1e-30F, 1e-44F, 5e37F, 3e38F};

std::int64_t shift(Random& random, DType dtype) {
    return random.chance(50) ? 0 : random.below(16) * kvcore::item_size(dtype);
}

TEST(blocks_have_the_cpu_s_bytes) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(12));
    for (int round = 0; round < 600; ++round) {
        const DType wide = random.pick(kWide);
        const DType back = random.pick(kWide);
        const std::int64_t blocks = random.below(50);
        const std::int64_t n = blocks * kNvfp4Block;
        const float global = kGlobals[random.below(7)];
        Guarded source(n * kvcore::item_size(wide), shift(random, wide));
        conversion::fill_elements(random, wide, source.data(), n);
        Guarded codes(blocks * 8, shift(random, DType::kInt8));
        Guarded scales(blocks, random.below(8));
        Bytes expected_codes(static_cast<std::size_t>(blocks * 8));
        Bytes expected_scales(static_cast<std::size_t>(blocks));
        kvcore::quantize_nvfp4(blocks, wide, source.data(), {global}, expected_codes.data(),
                               expected_scales.data());
        CHECK(cuda::quantize_nvfp4(blocks, wide, source.data(), GlobalScale{1.0F, &global},
                                   codes.data(), scales.data(), kStream) == cuda::kSuccess);
        CHECK(codes.taken() == expected_codes);
        CHECK(scales.taken() == expected_scales);

        // Scales with random bits, including NaN.
        for (std::int64_t i = 0; i < blocks; ++i) {
            if (random.chance(10)) scales.data()[i] = static_cast<std::byte>(random.next());
        }
        Guarded values(n * kvcore::item_size(back), shift(random, back));
        Bytes expected(static_cast<std::size_t>(n * kvcore::item_size(back)));
        kvcore::dequantize_nvfp4(blocks, codes.data(), scales.data(), {global}, back,
                                 expected.data());
        CHECK(cuda::dequantize_nvfp4(blocks, codes.data(), scales.data(), {global}, back,
                                     values.data(), kStream) == cuda::kSuccess);
        CHECK(values.taken() == expected);
        for (const Guarded* memory : {&source, &codes, &scales, &values}) memory->check();
    }
}

/// Pools of K and V, with or without gaps between heads.
struct Pools {
    static constexpr std::int64_t kPages = 6;
    static constexpr std::int64_t kPage = 3;

    Pools(std::int64_t num_heads, std::int64_t k_blocks, std::int64_t v_blocks, std::int64_t gap)
        : heads(num_heads), room(gap), blocks{k_blocks, v_blocks} {
        for (int i = 0; i < 2; ++i) {
            const std::int64_t runs = kPages * kPage * heads;
            codes[i].assign(static_cast<std::size_t>(runs * (blocks[i] * 8 + room)),
                            std::byte{0x5a});
            scales[i].assign(static_cast<std::size_t>(runs * blocks[i]), std::byte{0x5a});
        }
    }
    kvcore::Nvfp4Tensor<std::byte> tensor(int i, float global) {
        const auto bytes = [&](Bytes& memory, std::int64_t step) {
            return kvcore::HeadBytes<std::byte>{memory.data(), kPage * heads * step, heads * step,
                                                step};
        };
        return {blocks[i] * kNvfp4Block,
                bytes(codes[i], blocks[i] * 8 + room),
                bytes(scales[i], blocks[i]),
                {global}};
    }
    kvcore::Nvfp4Tensor<const std::byte> readable(int i, float global) {
        const auto from = tensor(i, global);
        const auto seen = [](const kvcore::HeadBytes<std::byte>& bytes) {
            return kvcore::HeadBytes<const std::byte>{bytes.data, bytes.page_stride,
                                                      bytes.token_stride, bytes.head_stride};
        };
        return {from.dim, seen(from.codes), seen(from.scales), from.global};
    }
    kvcore::Nvfp4Pool<std::byte> view() {
        return {kPages, {kPage, heads}, tensor(0, 0.5F), tensor(1, 2.0F)};
    }
    bool operator==(const Pools& other) const {
        return codes[0] == other.codes[0] && codes[1] == other.codes[1] &&
               scales[0] == other.scales[0] && scales[1] == other.scales[1];
    }

    std::int64_t heads;
    std::int64_t room;
    std::int64_t blocks[2];
    Bytes codes[2];
    Bytes scales[2];
};

struct Rows {
    Rows(Random& random, const Pools& pools, std::int64_t tokens, DType wide) {
        for (int i = 0; i < 2; ++i) {
            const std::int64_t dim = pools.blocks[i] * kNvfp4Block;
            memory[i].resize(
                static_cast<std::size_t>(tokens * pools.heads * dim * kvcore::item_size(wide)));
            conversion::fill_elements(random, wide, memory[i].data(), tokens * pools.heads * dim);
            steps[i] = dim * kvcore::item_size(wide);
            heads = pools.heads;
        }
    }
    [[nodiscard]] kvcore::TokenRows<const std::byte> source(int i) const {
        return {memory[i].data(), heads * steps[i], steps[i]};
    }
    [[nodiscard]] kvcore::TokenRows<std::byte> target(int i) {
        return {memory[i].data(), heads * steps[i], steps[i]};
    }

    Bytes memory[2];
    std::int64_t steps[2] = {};
    std::int64_t heads = 0;
};

Pools some_pools(Random& random) {
    const std::int64_t k = random.between(1, 9);
    const std::int64_t v = random.chance(30) ? random.between(1, 9) : k;
    return {random.between(1, 4), k, v, random.chance(50) ? 0 : random.below(9)};
}

TEST(slots_have_the_cpu_s_bytes) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(12));
    for (int round = 0; round < 200; ++round) {
        const DType wide = random.pick(kWide);
        Pools found = some_pools(random);
        Pools expected = found;
        const std::int64_t tokens = random.below(9);
        const Rows rows(random, found, tokens, wide);
        std::vector<std::int32_t> slots;
        for (std::int32_t i = 0; i < tokens; ++i) {
            slots.push_back(random.chance(20) ? -1 : random.chance(20) ? 18 + i : 2 * i);
        }
        std::int32_t bad = 0;
        const std::int64_t beyond = kvcore::append_slots(
            expected.view(), rows.source(0), rows.source(1), wide, slots.data(), tokens);
        CHECK(cuda::append_slots(found.view(), rows.source(0), rows.source(1), wide, slots.data(),
                                 tokens, &bad, kStream) == cuda::kSuccess);
        CHECK_EQ(std::int64_t{bad}, beyond);
        CHECK(found == expected);
    }
}

TEST(batches_have_the_cpu_s_bytes) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(12));
    constexpr std::uint32_t kTable[] = {3, 1, 5, 0, 4, 2};  // two rows of three pages
    constexpr std::uint32_t kBegin[] = {2, 5};
    constexpr std::uint32_t kOffsets[] = {0, 7, 9};
    const kvcore::PageTable table{kTable, 3, 3, 2};
    const kvcore::TokenRanges ranges{kBegin, kOffsets};
    // Two tokens after the last row are padding.
    const cuda::DeviceBatch batch{table, ranges, 11, Pools::kPages};
    for (int round = 0; round < 200; ++round) {
        const DType wide = random.pick(kWide);
        Pools found = some_pools(random);
        Pools expected = found;
        const kvcore::PageShape shape{Pools::kPage, found.heads};
        const Rows rows(random, found, 11, wide);
        for (int i = 0; i < 2; ++i) {
            kvcore::append_batch(shape, expected.tensor(i, i == 0 ? 0.5F : 2.0F), table, ranges,
                                 rows.source(i), wide);
        }
        CHECK(cuda::append_batch(shape, {found.tensor(0, 0.5F), found.tensor(1, 2.0F)}, batch,
                                 {rows.source(0), rows.source(1)}, wide, nullptr,
                                 kStream) == cuda::kSuccess);
        CHECK(found == expected);

        Rows back(random, found, 11, wide);
        Rows same = back;
        for (int i = 0; i < 2; ++i) {
            kvcore::gather_batch(shape, expected.readable(i, 0.5F), table, ranges, same.target(i),
                                 wide);
        }
        CHECK(cuda::gather_batch(shape, {found.readable(0, 0.5F), found.readable(1, 0.5F)}, batch,
                                 {back.target(0), back.target(1)}, wide, nullptr,
                                 kStream) == cuda::kSuccess);
        CHECK(back.memory[0] == same.memory[0]);
        CHECK(back.memory[1] == same.memory[1]);
    }
}

}  // namespace

}  // namespace tests::cuda::nvfp4
