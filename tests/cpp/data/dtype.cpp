// SPDX-License-Identifier: Apache-2.0
// Conversions between float and the dtypes of a cache: all codes back and forth, and the nearest
// code of a float, found by a search over all codes.
#include <cmath>
#include <limits>
#include <vector>

#include "fakes/conversion_memory.hpp"
#include "kvcore/dtype.hpp"
#include "support/random.hpp"

namespace tests::data::dtype {

using kvcore::DType;

namespace {

/// The finite values of a format in ascending order of their codes, without sign.
template <class Code, Code (*kTo)(float), float (*kFrom)(Code)>
struct Format {
    Format(std::uint32_t num_codes, bool saturates) : saturates(saturates) {
        for (std::uint32_t code = 0; code < num_codes; ++code) {
            values.push_back(kFrom(static_cast<Code>(code)));
        }
    }

    void check_codes(std::uint32_t sign) const {
        for (std::uint32_t code = 0; code < values.size(); ++code) {
            const float value = values[code];
            if (code > 0) CHECK(value > values[code - 1]);
            CHECK_EQ(kTo(value), static_cast<Code>(code));
            CHECK_EQ(kTo(-value), static_cast<Code>(code | sign));
            CHECK(kFrom(static_cast<Code>(code | sign)) == -value);
        }
    }

    // Finds the two neighbours by bisection and returns the nearer code; of a tie, the even code.
    std::uint32_t nearest(float magnitude) const {
        std::size_t low = 0;
        std::size_t high = values.size() - 1;
        if (magnitude >= values[high]) return static_cast<std::uint32_t>(high);
        while (high - low > 1) {
            const std::size_t middle = (low + high) / 2;
            (values[middle] <= magnitude ? low : high) = middle;
        }
        const double below = static_cast<double>(magnitude) - static_cast<double>(values[low]);
        const double above = static_cast<double>(values[high]) - static_cast<double>(magnitude);
        const bool is_low = below < above || (below == above && low % 2 == 0);
        return static_cast<std::uint32_t>(is_low ? low : high);
    }

    void check_nearest(float value, std::uint32_t sign) const {
        const float magnitude = std::fabs(value);
        const float step = values.back() - values[values.size() - 2];
        if (!saturates && magnitude >= values.back() + step / 2) return;  // infinity
        const std::uint32_t expected = nearest(magnitude) | (std::signbit(value) ? sign : 0);
        CHECK_EQ(kTo(value), static_cast<Code>(expected));
    }

    // Floats of all magnitudes, halfway points and their neighbours.
    void check_random(Random& random, std::uint32_t sign) const {
        for (int i = 0; i < 200'000; ++i) {
            const auto exponent = static_cast<std::uint32_t>(random.between(80, 160));
            const auto mantissa = static_cast<std::uint32_t>(random.next() & 0x7fffff);
            const float value = kvcore::float_of(exponent << 23 | mantissa);
            check_nearest(random.chance(50) ? -value : value, sign);
            const auto code = static_cast<std::size_t>(
                random.below(static_cast<std::int64_t>(values.size()) - 1));
            const float half = (values[code] + values[code + 1]) / 2;
            for (const float near :
                 {half, std::nextafter(half, 0.0F), std::nextafter(half, values[code + 1])}) {
                check_nearest(random.chance(50) ? -near : near, sign);
            }
        }
    }

    bool saturates;
    std::vector<float> values;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST(half_is_ieee) {
    Random random(check::seed_or(5));
    const Format<std::uint16_t, kvcore::to_half, kvcore::from_half> half(0x7c00, false);
    half.check_codes(0x8000);
    half.check_random(random, 0x8000);
    CHECK_EQ(kvcore::to_half(65520.0F), 0x7c00);  // halfway to the next value: infinity
    CHECK_EQ(kvcore::to_half(65519.0F), 0x7bff);
    CHECK_EQ(kvcore::to_half(-kInfinity), 0xfc00);
    CHECK(kvcore::from_half(0x7c00) == kInfinity);
    CHECK(std::isnan(kvcore::from_half(0x7c01)));
    CHECK(std::isnan(kvcore::from_half(kvcore::to_half(kNaN))));
}

TEST(bfloat16_is_the_upper_half_of_a_float) {
    Random random(check::seed_or(5));
    const Format<std::uint16_t, kvcore::to_bfloat16, kvcore::from_bfloat16> bfloat(0x7f80, false);
    bfloat.check_codes(0x8000);
    bfloat.check_random(random, 0x8000);
    CHECK_EQ(kvcore::to_bfloat16(kInfinity), 0x7f80);
    CHECK_EQ(kvcore::to_bfloat16(std::numeric_limits<float>::max()), 0x7f80);
    // A NaN with bits only in the lower half.
    CHECK(std::isnan(kvcore::from_bfloat16(kvcore::to_bfloat16(kvcore::float_of(0x7f800001)))));
}

TEST(fp8_saturates_and_keeps_nan) {
    Random random(check::seed_or(5));
    const Format<std::uint8_t, kvcore::to_e4m3fn, kvcore::from_e4m3fn> e4m3(0x7f, true);
    e4m3.check_codes(0x80);
    e4m3.check_random(random, 0x80);
    const Format<std::uint8_t, kvcore::to_e5m2, kvcore::from_e5m2> e5m2(0x7c, true);
    e5m2.check_codes(0x80);
    e5m2.check_random(random, 0x80);
    for (const float huge : {449.0F, 1e9F, kInfinity}) {
        CHECK_EQ(kvcore::to_e4m3fn(huge), 0x7e);
        CHECK_EQ(kvcore::to_e4m3fn(-huge), 0xfe);
    }
    for (const float huge : {57345.0F, 1e9F, kInfinity}) {
        CHECK_EQ(kvcore::to_e5m2(huge), 0x7b);
        CHECK_EQ(kvcore::to_e5m2(-huge), 0xfb);
    }
    for (const float nan : {kNaN, -kNaN, kvcore::float_of(0x7f800001)}) {
        CHECK_EQ(kvcore::to_e4m3fn(nan), 0x7f);
        CHECK_EQ(kvcore::to_e5m2(nan), 0x7f);
    }
    for (const int nan : {0x7f, 0xff}) {
        const auto code = static_cast<std::uint8_t>(nan);
        CHECK(std::isnan(kvcore::from_e4m3fn(code)));
        CHECK(std::isnan(kvcore::from_e5m2(code)));
    }
    CHECK(kvcore::from_e5m2(0xfc) == -kInfinity);
}

TEST(int8_rounds_to_even_and_saturates) {
    for (int i = -600; i <= 600; ++i) {
        const float value = static_cast<float>(i) / 4;
        const float expected = std::fmax(-128.0F, std::fmin(127.0F, std::nearbyint(value)));
        CHECK_EQ(kvcore::to_int8(value), static_cast<int>(expected));
    }
    CHECK_EQ(kvcore::to_int8(kInfinity), 127);
    CHECK_EQ(kvcore::to_int8(-1e30F), -128);
    CHECK_EQ(kvcore::to_int8(kNaN), 0);
}

TEST(sizes_and_largest_values) {
    CHECK_EQ(kvcore::item_size(DType::kFloat32), 4);
    CHECK_EQ(kvcore::item_size(DType::kFloat16), 2);
    CHECK_EQ(kvcore::item_size(DType::kBFloat16), 2);
    for (const DType dtype : conversion::kNarrow) {
        CHECK_EQ(kvcore::item_size(dtype), 1);
    }
    CHECK(kvcore::largest(DType::kFloat32) == std::numeric_limits<float>::max());
    CHECK(kvcore::largest(DType::kFloat16) == kvcore::from_half(0x7bff));
    CHECK(kvcore::largest(DType::kBFloat16) == kvcore::from_bfloat16(0x7f7f));
    CHECK(kvcore::largest(DType::kFloat8E4M3FN) == kvcore::from_e4m3fn(0x7e));
    CHECK(kvcore::largest(DType::kFloat8E5M2) == kvcore::from_e5m2(0x7b));
}

}  // namespace

}  // namespace tests::data::dtype
