// SPDX-License-Identifier: Apache-2.0
// Quantising and back by emulated lanes: the bytes of the CPU for every code, size and alignment.
// No other byte is written.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "emulation/emulation.hpp"
#include "fakes/conversion_memory.hpp"
#include "kvcore/cuda.hpp"

namespace tests::cuda::quantize {

namespace cuda = kvcore::cuda;
using conversion::Bytes;
using conversion::Guarded;
using conversion::kNarrow;
using conversion::kWide;
using kvcore::DType;
using kvcore::Groups;
using kvcore::HeadRows;

namespace {

constexpr cuda::Stream kStream{0, nullptr};

std::int64_t elements_of(Groups shape) { return shape.groups * shape.group; }
std::int64_t scales_of(Groups shape) { return shape.groups; }
std::int64_t elements_of(HeadRows shape) { return shape.rows * shape.heads * shape.dim; }
std::int64_t scales_of(HeadRows shape) { return shape.heads; }

/// The source and destination of a conversion, each unaligned or aligned to 64 bytes.
struct Sides {
    Sides(Random& random, DType wide, std::int64_t elements, std::int64_t num_scales)
        : source(elements * kvcore::item_size(wide), shift(random, wide)),
          codes(elements, shift(random, DType::kInt8)),
          scales(num_scales * 4, 0),
          back(elements * 4, shift(random, DType::kFloat32)) {
        conversion::fill_elements(random, wide, source.data(), elements);
    }
    static std::int64_t shift(Random& random, DType dtype) {
        return random.chance(50) ? 0 : random.below(16) * kvcore::item_size(dtype);
    }
    float* factors() { return reinterpret_cast<float*>(scales.data()); }
    void check() const {
        source.check();
        codes.check();
        scales.check();
        back.check();
    }

    Guarded source;
    Guarded codes;
    Guarded scales;
    Guarded back;
};

template <class Shape>
void one_conversion_has_the_cpu_s_bytes(Random& random, Shape shape) {
    const DType wide = random.pick(kWide);
    const DType narrow = random.pick(kNarrow);
    const DType back = random.pick(kWide);
    const auto n = static_cast<std::size_t>(elements_of(shape));
    Sides sides(random, wide, elements_of(shape), scales_of(shape));
    Bytes codes(n);
    std::vector<float> scales(static_cast<std::size_t>(scales_of(shape)), -1.0F);
    std::memset(sides.scales.data(), 0xff, scales.size() * 4);  // NaN: must not be read
    kvcore::quantize(shape, wide, sides.source.data(), narrow, codes.data(), scales.data());
    CHECK(cuda::quantize(shape, wide, sides.source.data(), narrow, sides.codes.data(),
                         sides.factors(), kStream) == cuda::kSuccess);
    for (std::size_t i = 0; n > 0 && i < scales.size(); ++i) {
        CHECK_EQ(sides.factors()[i], scales[i]);
    }
    CHECK(sides.codes.taken() == codes);

    Bytes values(n * static_cast<std::size_t>(kvcore::item_size(back)));
    kvcore::dequantize(shape, narrow, codes.data(), scales.data(), back, values.data());
    CHECK(cuda::dequantize(shape, narrow, sides.codes.data(), scales.data(), back,
                           sides.back.data(), kStream) == cuda::kSuccess);
    Bytes found = sides.back.taken();
    found.resize(values.size());
    CHECK(found == values);
    sides.check();
}

TEST(groups_have_the_cpu_s_bytes) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(61));
    for (int round = 0; round < 500; ++round) {
        constexpr std::int64_t kGroups[] = {1, 16, 59, 64, 80, 96, 112, 128, 512, 1024, 1500, 2048};
        const std::int64_t group =
            random.chance(50) ? kGroups[random.below(12)] : random.between(1, 300);
        one_conversion_has_the_cpu_s_bytes(random, Groups{random.below(40), group});
    }
}

TEST(heads_have_the_cpu_s_bytes) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(61));
    for (int round = 0; round < 300; ++round) {
        const std::int64_t dim =
            random.chance(50) ? 8 * random.between(1, 40) : random.between(1, 300);
        one_conversion_has_the_cpu_s_bytes(random,
                                           HeadRows{random.below(70), random.between(1, 5), dim});
    }
    one_conversion_has_the_cpu_s_bytes(random, HeadRows{1, 1, 100'003});
    one_conversion_has_the_cpu_s_bytes(random, HeadRows{9001, 1, 16});
}

TEST(given_scales_have_the_cpu_s_bytes) {
    cuda::emulation::reset(1);
    Random random(check::seed_or(61));
    for (int round = 0; round < 200; ++round) {
        const HeadRows shape{random.below(9), random.between(1, 4), random.between(1, 700)};
        const DType wide = random.pick(kWide);
        const DType narrow = random.pick(kNarrow);
        Sides sides(random, wide, elements_of(shape), shape.heads);
        std::vector<float> scales;
        for (std::int64_t head = 0; head < shape.heads; ++head) {
            constexpr float kScales[] = {1.0F, 0.01F, 1e-12F, 1e-42F, 3e38F, -2.0F};
            scales.push_back(kScales[random.below(6)]);
        }
        Bytes codes(static_cast<std::size_t>(elements_of(shape)));
        kvcore::quantize_by(shape, wide, sides.source.data(), narrow, codes.data(), scales.data());
        CHECK(cuda::quantize_by(shape, wide, sides.source.data(), narrow, sides.codes.data(),
                                scales.data(), kStream) == cuda::kSuccess);
        CHECK(sides.codes.taken() == codes);
        sides.check();
    }
}

// All elements of two bytes; for four bytes, a sample of every binade.
TEST(every_element_has_the_cpu_s_code) {
    cuda::emulation::reset(1);
    for (const DType wide : kWide) {
        const std::int64_t size = kvcore::item_size(wide);
        Bytes source;
        const std::uint64_t end = std::uint64_t{1} << (8 * size);
        for (std::uint64_t code = 0; code < end; code += size == 4 ? 40009 : 1) {
            std::byte element[8];
            std::memcpy(element, &code, sizeof element);
            source.insert(source.end(), element, element + size);
        }
        const auto n = static_cast<std::int64_t>(source.size()) / size;
        const float one = 1.0F;
        for (const DType narrow : kNarrow) {
            Bytes codes(static_cast<std::size_t>(n));
            Bytes found = codes;
            kvcore::quantize_by({n, 1, 1}, wide, source.data(), narrow, codes.data(), &one);
            CHECK(cuda::quantize_by({1, 1, n}, wide, source.data(), narrow, found.data(), &one,
                                    kStream) == cuda::kSuccess);
            CHECK(found == codes);
        }
    }
}

TEST(every_code_has_the_cpu_s_value) {
    cuda::emulation::reset(1);
    Bytes codes;
    for (int code = 0; code < 256; ++code) codes.push_back(static_cast<std::byte>(code));
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    for (const DType wide : kWide) {
        for (const DType narrow : kNarrow) {
            for (const float scale :
                 {1.0F, 0.3F, 1e-12F, 1e-42F, 7e35F, 3e38F, -2.0F, 0.0F, kInfinity}) {
                const auto bytes = static_cast<std::size_t>(256 * kvcore::item_size(wide));
                Bytes values(bytes);
                Bytes found(bytes);
                kvcore::dequantize(HeadRows{1, 1, 256}, narrow, codes.data(), &scale, wide,
                                   values.data());
                CHECK(cuda::dequantize(HeadRows{1, 1, 256}, narrow, codes.data(), &scale, wide,
                                       found.data(), kStream) == cuda::kSuccess);
                CHECK(found == values);
            }
        }
    }
}

TEST(empty_calls_are_not_enqueued) {
    cuda::emulation::reset(1);
    cuda::emulation::set_order(cuda::emulation::Order::kAny);
    std::byte source[64] = {};
    std::byte codes[64];
    float scale = 7;
    constexpr DType kBFloat16 = DType::kBFloat16;
    constexpr DType kInt8 = DType::kInt8;
    for (const Groups shape : {Groups{0, 8}, Groups{8, 0}}) {
        CHECK(cuda::quantize(shape, kBFloat16, source, kInt8, codes, &scale, kStream) == 0);
        CHECK(cuda::dequantize(shape, kInt8, codes, &scale, kBFloat16, source, kStream) == 0);
    }
    CHECK(cuda::quantize(HeadRows{3, 0, 8}, kBFloat16, source, kInt8, codes, &scale, kStream) == 0);
    CHECK_EQ(cuda::emulation::num_waiting(), 0);
    CHECK_EQ(scale, 7.0F);
    // Heads without rows get the smallest scale, as on the CPU.
    CHECK(cuda::quantize(HeadRows{0, 1, 8}, kBFloat16, source, kInt8, codes, &scale, kStream) == 0);
    CHECK(cuda::synchronize(kStream) == cuda::kSuccess);
    CHECK_EQ(scale, 1e-12F);
    cuda::emulation::set_order(cuda::emulation::Order::kAtOnce);
}

TEST(devices_that_do_not_exist_are_refused) {
    cuda::emulation::reset(1);
    std::byte bytes[64] = {};
    float scale = 7;
    const cuda::Stream elsewhere{1, nullptr};
    CHECK_EQ(cuda::quantize(Groups{1, 8}, DType::kFloat16, bytes, DType::kInt8, bytes + 32, &scale,
                            elsewhere),
             101);
    CHECK_EQ(cuda::quantize(HeadRows{1, 1, 8}, DType::kFloat16, bytes, DType::kInt8, bytes + 32,
                            &scale, elsewhere),
             101);
    CHECK_EQ(scale, 7.0F);
}

}  // namespace

}  // namespace tests::cuda::quantize
