// SPDX-License-Identifier: Apache-2.0
// Instructions on floats of 32 bits. Their functions are IEEE 754's, so the host's own functions
// work if its compiler does not fuse them (-ffp-contract=off).
#include <cfenv>
#include <cmath>

#include "apply.hpp"

namespace gpu_sim {

namespace {

struct Sum {
    float operator()(float a, float b) const { return a + b; }
};
struct Difference {
    float operator()(float a, float b) const { return a - b; }
};
struct Product {
    float operator()(float a, float b) const { return a * b; }
};
struct Quotient {
    float operator()(float a, float b) const { return a / b; }
};
struct Reciprocal {
    float operator()(float a) const { return 1.0F / a; }
};
struct Root {
    float operator()(float a) const { return std::sqrt(a); }
};
struct ProductAndSum {
    float operator()(float a, float b, float c) const { return std::fma(a, b, c); }
};
// Rounds towards minus infinity; the compiler cannot move the volatile call out of the mode.
struct ProductAndSumDown {
    float operator()(float a, float b, float c) const {
        float (*volatile fused)(float, float, float) = std::fma;
        const int before = std::fegetround();
        std::fesetround(FE_DOWNWARD);
        const float found = fused(a, b, c);
        std::fesetround(before);
        return found;
    }
};
// Changes sign bits, also of NaN, as integer words.
template <std::uint32_t kAnd, std::uint32_t kXor>
struct Sign {
    std::uint32_t operator()(std::uint32_t a) const { return (a & kAnd) ^ kXor; }
};
// Given a number and a NaN, returns the number; -0 is less than 0.
struct Smaller {
    float operator()(float a, float b) const {
        if (a != a) return b;
        if (b != b) return a;
        if (a == b) return std::signbit(a) ? a : b;
        return a < b ? a : b;
    }
};
struct Larger {
    float operator()(float a, float b) const {
        if (a != a) return b;
        if (b != b) return a;
        if (a == b) return std::signbit(a) ? b : a;
        return a < b ? b : a;
    }
};
// GPUs approximate it to 2 units in the last place; a result below the smallest normal is 0.
struct PowerOfTwo {
    float operator()(float a) const {
        const auto found = static_cast<float>(std::exp2(static_cast<double>(a)));
        return std::fabs(found) < 1.17549435e-38F ? 0.0F : found;
    }
};

enum class Order { kEqual, kUnequal, kLess, kLessOrEqual, kGreater, kGreaterOrEqual };

// A comparison with NaN returns `kUnordered`.
template <Order kOrder, bool kUnordered>
struct Compare {
    bool operator()(float a, float b) const {
        if (a != a || b != b) return kUnordered;
        switch (kOrder) {
            case Order::kEqual:
                return a == b;
            case Order::kUnequal:
                return a != b;
            case Order::kLess:
                return a < b;
            case Order::kLessOrEqual:
                return a <= b;
            case Order::kGreater:
                return a > b;
            default:
                return a >= b;
        }
    }
};
struct BothNumbers {
    bool operator()(float a, float b) const { return a == a && b == b; }
};
struct AnyNan {
    bool operator()(float a, float b) const { return a != a || b != b; }
};

template <Order kOrder>
void add_order(Operations& table, const std::string& name) {
    table["setp." + name + ".f32"] = apply<Compare<kOrder, false>, float, float>;
    table["setp." + name + "u.f32"] = apply<Compare<kOrder, true>, float, float>;
}

}  // namespace

void add_floats(Operations& table) {
    for (const char* rounding : {"", ".rn"}) {
        const auto name = [rounding](const char* verb) {
            return std::string(verb) + rounding + ".f32";
        };
        table[name("add")] = apply<Sum, float, float>;
        table[name("sub")] = apply<Difference, float, float>;
        table[name("mul")] = apply<Product, float, float>;
    }
    table["div.rn.f32"] = apply<Quotient, float, float>;
    table["rcp.rn.f32"] = apply<Reciprocal, float>;
    table["sqrt.rn.f32"] = apply<Root, float>;
    table["fma.rn.f32"] = apply<ProductAndSum, float, float, float>;
    table["fma.rm.f32"] = apply<ProductAndSumDown, float, float, float>;
    table["neg.f32"] = apply<Sign<0xffffffffU, 0x80000000U>, std::uint32_t>;
    table["abs.f32"] = apply<Sign<0x7fffffffU, 0U>, std::uint32_t>;
    table["min.f32"] = apply<Smaller, float, float>;
    table["max.f32"] = apply<Larger, float, float>;
    table["ex2.approx.ftz.f32"] = apply<PowerOfTwo, float>;
    add_order<Order::kEqual>(table, "eq");
    add_order<Order::kUnequal>(table, "ne");
    add_order<Order::kLess>(table, "lt");
    add_order<Order::kLessOrEqual>(table, "le");
    add_order<Order::kGreater>(table, "gt");
    add_order<Order::kGreaterOrEqual>(table, "ge");
    table["setp.num.f32"] = apply<BothNumbers, float, float>;
    table["setp.nan.f32"] = apply<AnyNan, float, float>;
}

}  // namespace gpu_sim
