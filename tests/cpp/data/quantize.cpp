// SPDX-License-Identifier: Apache-2.0
// Quantising and back: every instruction set and every number of threads gives the bytes of the
// scalar conversions, at odd sizes and offsets. No other byte is written.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "data/kernels/isa.hpp"
#include "fakes/conversion_memory.hpp"
#include "kvcore/quantize.hpp"
#include "oracle/elements.hpp"
#include "support/random.hpp"

namespace tests::data::quantize {

using kvcore::DType;
using Bytes = std::vector<std::byte>;

namespace {

using conversion::kNarrow;
using conversion::kWide;

Bytes random_bytes(Random& random, std::int64_t n) {
    Bytes bytes(static_cast<std::size_t>(n));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
    return bytes;
}

// Mostly moderate numbers, with some infinities, NaN and subnormals.
Bytes random_elements(Random& random, DType dtype, std::int64_t n) {
    Bytes bytes = random_bytes(random, n * kvcore::item_size(dtype));
    for (std::int64_t i = 0; i < n; ++i) {
        if (random.chance(5)) continue;
        const auto number = static_cast<float>(random.between(-100'000, 100'000));
        write_element(dtype, bytes.data() + i * kvcore::item_size(dtype), number / 7777.0F);
    }
    return bytes;
}

/// Memory with guard bytes on both sides and an unaligned start.
class Guarded {
   public:
    Guarded(Random& random, std::int64_t n)
        : offset_(1 + random.below(63)), size_(n), bytes_(static_cast<std::size_t>(n + 256)) {
        std::fill(bytes_.begin(), bytes_.end(), std::byte{0xa5});
    }
    std::byte* data() { return bytes_.data() + 64 + offset_; }
    void check() const {
        for (std::size_t i = 0; i < bytes_.size(); ++i) {
            const auto at = static_cast<std::int64_t>(i) - 64 - offset_;
            if (at < 0 || at >= size_) CHECK(bytes_[i] == std::byte{0xa5});
        }
    }

   private:
    std::int64_t offset_;
    std::int64_t size_;
    Bytes bytes_;
};

float expected_scale(DType wide, const std::byte* elements, std::int64_t n, DType narrow) {
    float most = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        const float magnitude =
            std::fabs(read_element(wide, elements + i * kvcore::item_size(wide)));
        if (std::isfinite(magnitude)) most = std::max(most, magnitude);
    }
    return std::max(most / kvcore::largest(narrow), 1e-12F);
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

// Groups in consecutive memory.
kvcore::cpu::Tile line(DType in, const std::byte* source, DType out, std::byte* destination,
                       std::vector<float>& scales, std::int64_t group) {
    kvcore::cpu::Tile tile{};
    tile.source = source;
    tile.destination = destination;
    tile.source_head = group * kvcore::item_size(in);
    tile.destination_head = group * kvcore::item_size(out);
    tile.scales = tile.new_scales = reinterpret_cast<std::byte*>(scales.data());
    tile.scale_head = sizeof(float);
    tile.tokens = 1;
    tile.heads = static_cast<std::int64_t>(scales.size());
    tile.dim = tile.group = group;
    return tile;
}

TEST(every_table_agrees_with_the_scalar_conversions) {
    Random random(check::seed_or(9));
    for (int i = 0; i < 300; ++i) {
        const int w = static_cast<int>(random.below(3));
        const int q = static_cast<int>(random.below(3));
        const DType wide = kWide[w];
        const DType narrow = kNarrow[q];
        const std::int64_t groups = random.between(0, 5);
        const std::int64_t group = random.between(1, 90);
        const std::int64_t n = groups * group;
        const Bytes elements = random_elements(random, wide, n);
        for (const kvcore::cpu::KernelTable* table : tables()) {
            Guarded source(random, n * kvcore::item_size(wide));
            std::copy(elements.begin(), elements.end(), source.data());
            Guarded codes(random, n);
            Guarded back(random, n * kvcore::item_size(wide));
            std::vector<float> scales(static_cast<std::size_t>(groups), -1);
            const kvcore::cpu::WideKernels& kernels = table->wide[w];
            kernels.quantize[q](line(wide, source.data(), narrow, codes.data(), scales, group));
            kernels.dequantize[q](line(narrow, codes.data(), wide, back.data(), scales, group));
            for (std::int64_t at = 0; at < n; ++at) {
                const float scale = scales[static_cast<std::size_t>(at / group)];
                const std::int64_t begin = at / group * group * kvcore::item_size(wide);
                CHECK(scale == expected_scale(wide, elements.data() + begin, group, narrow));
                const std::int64_t byte = at * kvcore::item_size(wide);
                std::byte expected[4] = {};
                write_element(narrow, expected,
                              read_element(wide, elements.data() + byte) * (1.0F / scale));
                CHECK(expected[0] == codes.data()[at]);
                write_element(wide, expected, read_element(narrow, expected) * scale);
                const auto size = static_cast<std::size_t>(kvcore::item_size(wide));
                const bool is_nan = std::isnan(read_element(wide, expected));
                CHECK(is_nan ? std::isnan(read_element(wide, back.data() + byte))
                             : std::memcmp(expected, back.data() + byte, size) == 0);
            }
            source.check();
            codes.check();
            back.check();
        }
    }
}

// All elements of two bytes; for four bytes, a sample of every binade.
Bytes all_elements(DType dtype, float largest_magnitude) {
    Bytes found;
    const std::int64_t size = kvcore::item_size(dtype);
    const std::uint64_t end = std::uint64_t{1} << (8 * size);
    for (std::uint64_t code = 0; code < end; code += size == 4 ? 40009 : 1) {
        std::byte element[4];
        const auto code_bits = static_cast<std::uint32_t>(code);
        std::memcpy(element, &code_bits, sizeof element);
        if (!(std::fabs(read_element(dtype, element)) <= largest_magnitude)) continue;
        found.insert(found.end(), element, element + size);
    }
    return found;
}

// One group with all elements that the dtype can represent, and one group with NaN and elements
// that saturate.
TEST(every_element_has_the_code_of_the_scalar_conversion) {
    for (const kvcore::cpu::KernelTable* table : tables()) {
        for (int w = 0; w < 3; ++w) {
            for (int q = 0; q < 3; ++q) {
                for (const bool saturates : {false, true}) {
                    Bytes source =
                        all_elements(kWide[w], saturates ? 3e38F : kvcore::largest(kNarrow[q]));
                    const std::int64_t size = kvcore::item_size(kWide[w]);
                    if (saturates) source.insert(source.end(), 64, std::byte{0xff});
                    const auto n = static_cast<std::int64_t>(source.size()) / size;
                    Bytes codes(static_cast<std::size_t>(n));
                    std::vector<float> one{1.0F};
                    kvcore::cpu::Tile tile =
                        line(kWide[w], source.data(), kNarrow[q], codes.data(), one, n);
                    table->wide[w].quantize_by[q](tile);
                    for (std::int64_t i = 0; i < n; ++i) {
                        std::byte expected[4] = {};
                        write_element(kNarrow[q], expected,
                                      read_element(kWide[w], source.data() + i * size));
                        CHECK(codes[static_cast<std::size_t>(i)] == expected[0]);
                    }
                }
            }
        }
    }
}

// In blocks with NaN, in blocks without NaN, and after the last whole block.
TEST(every_code_has_the_value_of_the_scalar_conversion) {
    Bytes codes;
    for (int code = 0; code < 256; ++code) codes.push_back(static_cast<std::byte>(code));
    codes.insert(codes.end(), codes.begin(), codes.begin() + 251);
    const auto n = static_cast<std::int64_t>(codes.size());
    for (const kvcore::cpu::KernelTable* table : tables()) {
        for (int w = 0; w < 3; ++w) {
            for (int q = 0; q < 3; ++q) {
                for (const float scale : {1.0F, 0.3F, 1e-12F, 1e-42F, 7e35F, 3e38F, -2.0F}) {
                    Bytes values(static_cast<std::size_t>(n * kvcore::item_size(kWide[w])));
                    std::vector<float> scales{scale};
                    table->wide[w].dequantize[q](
                        line(kNarrow[q], codes.data(), kWide[w], values.data(), scales, n));
                    for (std::int64_t i = 0; i < n; ++i) {
                        const auto size = static_cast<std::size_t>(kvcore::item_size(kWide[w]));
                        const std::byte* value =
                            values.data() + i * static_cast<std::int64_t>(size);
                        std::byte expected[4] = {};
                        write_element(kWide[w], expected,
                                      read_element(kNarrow[q], codes.data() + i) * scale);
                        CHECK(std::memcmp(expected, value, size) == 0);
                    }
                }
            }
        }
    }
}

TEST(threads_do_not_change_a_byte) {
    Random random(check::seed_or(9));
    const kvcore::HeadRows shape{1031, 3, 80};
    const std::int64_t n = shape.rows * shape.heads * shape.dim;
    for (const DType wide : kWide) {
        for (const DType narrow : kNarrow) {
            const Bytes source = random_elements(random, wide, n);
            Bytes codes[2];
            Bytes back[2];
            std::vector<float> scales[2];
            for (int i = 0; i < 2; ++i) {
                codes[i].resize(static_cast<std::size_t>(n));
                back[i].resize(static_cast<std::size_t>(n * kvcore::item_size(wide)));
                scales[i].resize(static_cast<std::size_t>(shape.heads));
                kvcore::quantize(shape, wide, source.data(), narrow, codes[i].data(),
                                 scales[i].data(), 1 + 3 * i);
                kvcore::dequantize(shape, narrow, codes[i].data(), scales[i].data(), wide,
                                   back[i].data(), 1 + 3 * i);
            }
            CHECK(codes[0] == codes[1]);
            CHECK(scales[0] == scales[1]);
            CHECK(back[0] == back[1]);
            for (std::int64_t head = 0; head < shape.heads; ++head) {
                Bytes of_head;
                for (std::int64_t row = 0; row < shape.rows; ++row) {
                    const std::byte* at = source.data() + (row * shape.heads + head) * shape.dim *
                                                              kvcore::item_size(wide);
                    of_head.insert(of_head.end(), at, at + shape.dim * kvcore::item_size(wide));
                }
                CHECK(scales[0][static_cast<std::size_t>(head)] ==
                      expected_scale(wide, of_head.data(), shape.rows * shape.dim, narrow));
            }
        }
    }
}

}  // namespace

}  // namespace tests::data::quantize
