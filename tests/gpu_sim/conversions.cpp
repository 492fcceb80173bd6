// SPDX-License-Identifier: Apache-2.0
// cvt, and mov between registers and their parts.
#include <cmath>
#include <limits>

#include "apply.hpp"

namespace gpu_sim {

namespace {

// ---- floats of few bits -------------------------------------------------------------------------

/// A format of sign, exponent and fraction, with subnormal numbers.
struct Format {
    int bits;
    int fraction;
    int bias;
    std::uint32_t largest;   // code of the largest finite number
    std::uint32_t infinity;  // code, 0 if the format has no infinity
    std::uint32_t nan;       // code of results that are not numbers
};
constexpr Format kHalf{16, 10, 15, 0x7bff, 0x7c00, 0x7fff};
constexpr Format kBrain{16, 7, 127, 0x7f7f, 0x7f80, 0x7fff};
constexpr Format kE4M3{8, 3, 7, 0x7e, 0, 0x7f};
constexpr Format kE5M2{8, 2, 15, 0x7b, 0x7c, 0x7f};

[[nodiscard]] double decoded(const Format& format, std::uint32_t code) {
    const bool is_negative = (code >> (format.bits - 1) & 1U) != 0;
    const std::uint32_t magnitude = code & ((1U << (format.bits - 1)) - 1);
    if (magnitude > format.largest) {
        if (magnitude != format.infinity) return std::numeric_limits<double>::quiet_NaN();
        return is_negative ? -HUGE_VAL : HUGE_VAL;
    }
    const auto exponent = static_cast<int>(magnitude >> format.fraction);
    const std::uint32_t fraction = magnitude & ((1U << format.fraction) - 1);
    const double value = exponent == 0 ? std::ldexp(fraction, 1 - format.bias - format.fraction)
                                       : std::ldexp(fraction + (1U << format.fraction),
                                                    exponent - format.bias - format.fraction);
    return is_negative ? -value : value;
}

// Rounds to the nearest code, ties to even.
[[nodiscard]] std::uint32_t encoded(const Format& format, double value, bool saturates) {
    if (value != value) return format.nan;
    const std::uint32_t sign = std::signbit(value) ? 1U << (format.bits - 1) : 0U;
    const double size = std::fabs(value);
    const std::uint32_t too_large = saturates ? format.largest : format.infinity;
    if (size == HUGE_VAL) return sign | too_large;
    int exponent = size == 0 ? 1 - format.bias : std::ilogb(size);
    if (exponent < 1 - format.bias) exponent = 1 - format.bias;
    // The codes of an exponent follow the codes of the next lower exponent, so a carry is correct.
    const auto units =
        static_cast<std::uint32_t>(std::nearbyint(std::ldexp(size, format.fraction - exponent)));
    const std::uint32_t code =
        units + (static_cast<std::uint32_t>(exponent + format.bias - 1) << format.fraction);
    return sign | (exponent > 2 * format.bias + 1 || code > format.largest ? too_large : code);
}

template <const Format& kFormat>
struct FromSmall {
    float operator()(std::uint16_t code) const {
        return static_cast<float>(decoded(kFormat, code));
    }
};
template <const Format& kFormat>
struct ToSmall {
    std::uint32_t operator()(float value) const { return encoded(kFormat, value, false); }
};
// Converts two numbers at once: the first operand becomes the upper part.
template <const Format& kFormat, bool kSaturates>
struct ToPair {
    std::uint32_t operator()(float upper, float lower) const {
        return encoded(kFormat, upper, kSaturates) << kFormat.bits |
               encoded(kFormat, lower, kSaturates);
    }
};
template <const Format& kTo, const Format& kFrom, bool kSaturates>
struct PairToPair {
    std::uint32_t operator()(std::uint32_t both) const {
        const std::uint32_t mask = (1U << kFrom.bits) - 1;
        const auto convert = [mask](std::uint32_t code) {
            return encoded(kTo, decoded(kFrom, code & mask), kSaturates);
        };
        return convert(both >> kFrom.bits) << kTo.bits | convert(both);
    }
};

// ---- arithmetic of pairs ------------------------------------------------------------------------

// Differences and products of two halves are exact in double precision.
struct PairDifference {
    double operator()(double a, double b) const { return a - b; }
};
struct PairProduct {
    double operator()(double a, double b) const { return a * b; }
};
// Given a number and a NaN, returns the number; -0 is less than 0.
struct PairLarger {
    double operator()(double a, double b) const {
        if (a != a) return b;
        if (b != b) return a;
        if (a == b) return std::signbit(a) ? b : a;
        return a < b ? b : a;
    }
};
struct PairLargerOrNan {
    double operator()(double a, double b) const {
        if (a != a || b != b) return std::numeric_limits<double>::quiet_NaN();
        return PairLarger{}(a, b);
    }
};
template <const Format& kFormat, class Function>
struct OfPairs {
    std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const {
        const auto one = [](std::uint32_t x, std::uint32_t y) {
            return encoded(kFormat, Function{}(decoded(kFormat, x), decoded(kFormat, y)), false);
        };
        return one(a >> 16, b >> 16) << 16 | one(a & 0xffffU, b & 0xffffU);
    }
};

// Packs two integers, saturated to bytes, before the already packed bytes.
struct PackBytes {
    std::uint32_t operator()(std::int32_t a, std::int32_t b, std::uint32_t before) const {
        const auto byte = [](std::int32_t x) {
            return static_cast<std::uint32_t>(x < -128 ? -128 : x > 127 ? 127 : x) & 0xffU;
        };
        return before << 16 | byte(a) << 8 | byte(b);
    }
};

// ---- between numbers ----------------------------------------------------------------------------

template <class To>
struct ToInteger {
    template <class From>
    To operator()(From value) const {
        return static_cast<To>(value);
    }
};
struct ToFloat {
    template <class From>
    float operator()(From value) const {
        return static_cast<float>(value);
    }
};
// Numbers outside the integer range saturate, NaN becomes 0.
template <class To, bool kNearest>
struct FloatToInteger {
    To operator()(float value) const {
        if (value != value) return 0;
        const double whole = kNearest ? std::nearbyint(static_cast<double>(value))
                                      : std::trunc(static_cast<double>(value));
        constexpr auto kLow = static_cast<double>(std::numeric_limits<To>::min());
        constexpr auto kHigh = static_cast<double>(std::numeric_limits<To>::max());
        if (whole <= kLow) return std::numeric_limits<To>::min();
        if (whole >= kHigh) return std::numeric_limits<To>::max();
        return static_cast<To>(whole);
    }
};
struct ToUnitRange {
    float operator()(float value) const {
        return value > 0 ? (value < 1 ? value : 1.0F) : 0.0F;  // NaN gives 0
    }
};
struct Nearest {
    float operator()(float value) const { return std::nearbyint(value); }
};

template <class To>
void add_to(Operations& table, const std::string& to) {
    table["cvt." + to + ".u8"] = apply<ToInteger<To>, std::uint8_t>;
    table["cvt." + to + ".s8"] = apply<ToInteger<To>, std::int8_t>;
    table["cvt." + to + ".u16"] = apply<ToInteger<To>, std::uint16_t>;
    table["cvt." + to + ".s16"] = apply<ToInteger<To>, std::int16_t>;
    table["cvt." + to + ".u32"] = apply<ToInteger<To>, std::uint32_t>;
    table["cvt." + to + ".s32"] = apply<ToInteger<To>, std::int32_t>;
    table["cvt." + to + ".u64"] = apply<ToInteger<To>, std::uint64_t>;
    table["cvt." + to + ".s64"] = apply<ToInteger<To>, std::int64_t>;
}
template <class Integer>
void add_float(Operations& table, const std::string& type) {
    table["cvt.rn.f32." + type] = apply<ToFloat, Integer>;
    table["cvt.rzi." + type + ".f32"] = apply<FloatToInteger<Integer, false>, float>;
    table["cvt.rni." + type + ".f32"] = apply<FloatToInteger<Integer, true>, float>;
}

// ---- parts of registers -------------------------------------------------------------------------

// Packs {low, high} registers into one register, and unpacks one into these.
template <class Part, class Whole>
void move_parts(const Instruction& i, Register* r, Mask lanes) {
    constexpr unsigned kBits = sizeof(Part) * 8;
    Register found[2];
    for (int lane = 0; lane < kWarp; ++lane) {
        if (i.in.size() == 2) {
            found[0].of[lane] = static_cast<Part>(r[i.in[0]].of[lane]) |
                                Whole{static_cast<Part>(r[i.in[1]].of[lane])} << kBits;
        } else {
            const auto whole = static_cast<Whole>(r[i.in[0]].of[lane]);
            found[0].of[lane] = i.out.size() == 2 ? static_cast<Part>(whole) : r[i.in[0]].of[lane];
            found[1].of[lane] = static_cast<Part>(whole >> kBits);
        }
    }
    for (std::size_t at = 0; at < i.out.size(); ++at) blend(r[i.out[at]], found[at], lanes);
}

}  // namespace

void add_conversions(Operations& table) {
    add_to<std::uint8_t>(table, "u8");
    add_to<std::int8_t>(table, "s8");
    add_to<std::uint16_t>(table, "u16");
    add_to<std::int16_t>(table, "s16");
    add_to<std::uint32_t>(table, "u32");
    add_to<std::int32_t>(table, "s32");
    add_to<std::uint64_t>(table, "u64");
    add_to<std::int64_t>(table, "s64");
    add_float<std::uint8_t>(table, "u8");
    add_float<std::int8_t>(table, "s8");
    add_float<std::uint16_t>(table, "u16");
    add_float<std::int16_t>(table, "s16");
    add_float<std::uint32_t>(table, "u32");
    add_float<std::int32_t>(table, "s32");
    add_float<std::uint64_t>(table, "u64");
    add_float<std::int64_t>(table, "s64");
    table["cvt.f32.f16"] = apply<FromSmall<kHalf>, std::uint16_t>;
    table["cvt.f32.bf16"] = apply<FromSmall<kBrain>, std::uint16_t>;
    table["cvt.rn.f16.f32"] = apply<ToSmall<kHalf>, float>;
    table["cvt.rn.bf16.f32"] = apply<ToSmall<kBrain>, float>;
    table["cvt.rn.f16x2.f32"] = apply<ToPair<kHalf, false>, float, float>;
    table["cvt.rn.bf16x2.f32"] = apply<ToPair<kBrain, false>, float, float>;
    table["cvt.rn.satfinite.e4m3x2.f32"] = apply<ToPair<kE4M3, true>, float, float>;
    table["cvt.rn.satfinite.e5m2x2.f32"] = apply<ToPair<kE5M2, true>, float, float>;
    table["cvt.rn.satfinite.e4m3x2.f16x2"] = apply<PairToPair<kE4M3, kHalf, true>, std::uint32_t>;
    table["cvt.rn.satfinite.e5m2x2.f16x2"] = apply<PairToPair<kE5M2, kHalf, true>, std::uint32_t>;
    table["cvt.rn.f16x2.e4m3x2"] = apply<PairToPair<kHalf, kE4M3, false>, std::uint16_t>;
    table["cvt.rn.f16x2.e5m2x2"] = apply<PairToPair<kHalf, kE5M2, false>, std::uint16_t>;
    table["sub.rn.f16x2"] = apply<OfPairs<kHalf, PairDifference>, std::uint32_t, std::uint32_t>;
    table["mul.rn.f16x2"] = apply<OfPairs<kHalf, PairProduct>, std::uint32_t, std::uint32_t>;
    table["max.f16x2"] = apply<OfPairs<kHalf, PairLarger>, std::uint32_t, std::uint32_t>;
    table["max.bf16x2"] = apply<OfPairs<kBrain, PairLarger>, std::uint32_t, std::uint32_t>;
    table["max.NaN.f16x2"] = apply<OfPairs<kHalf, PairLargerOrNan>, std::uint32_t, std::uint32_t>;
    table["max.NaN.bf16x2"] = apply<OfPairs<kBrain, PairLargerOrNan>, std::uint32_t, std::uint32_t>;
    table["cvt.pack.sat.s8.s32.b32"] = apply<PackBytes, std::int32_t, std::int32_t, std::uint32_t>;
    table["cvt.sat.f32.f32"] = apply<ToUnitRange, float>;
    table["cvt.rni.f32.f32"] = apply<Nearest, float>;
    table["mov.b32"] = move_parts<std::uint16_t, std::uint32_t>;
    table["mov.b64"] = move_parts<std::uint32_t, std::uint64_t>;
}

}  // namespace gpu_sim
