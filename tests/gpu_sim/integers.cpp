// SPDX-License-Identifier: Apache-2.0
// Instructions on integers, bits and predicates.
#include <limits>

#include "apply.hpp"

namespace gpu_sim {

namespace {

// The same operation in unsigned numbers, which may wrap.
template <class T>
using Bits = std::make_unsigned_t<T>;
template <class T>
constexpr unsigned kBits = sizeof(T) * 8;

struct Add {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(std::uint64_t{Bits<T>(a)} + std::uint64_t{Bits<T>(b)});
    }
};
struct Subtract {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(std::uint64_t{Bits<T>(a)} - std::uint64_t{Bits<T>(b)});
    }
};
struct MultiplyLow {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(std::uint64_t{Bits<T>(a)} * std::uint64_t{Bits<T>(b)});
    }
};
struct MultiplyHigh {
    template <class T>
    T operator()(T a, T b) const {
        __extension__ using Signed = __int128;
        __extension__ using Unsigned = unsigned __int128;
        using Wide = std::conditional_t<std::is_signed_v<T>, Signed, Unsigned>;
        return static_cast<T>((Wide{a} * Wide{b}) >> kBits<T>);
    }
};
template <class Wide>
struct MultiplyWide {
    template <class T>
    Wide operator()(T a, T b) const {
        return static_cast<Wide>(Wide{a} * Wide{b});
    }
};
struct MultiplyAdd {
    template <class T>
    T operator()(T a, T b, T c) const {
        return Add{}(MultiplyLow{}(a, b), c);
    }
};
template <class Wide>
struct MultiplyWideAdd {
    template <class T>
    Wide operator()(T a, T b, Wide c) const {
        return Add{}(MultiplyWide<Wide>{}(a, b), c);
    }
};
// An undefined quotient or remainder is the hardware's result: all ones, or the dividend.
struct Divide {
    template <class T>
    T operator()(T a, T b) const {
        if (b == 0) return static_cast<T>(~T{0});
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Subtract{}(T{0}, a);
        return static_cast<T>(a / b);
    }
};
struct Remainder {
    template <class T>
    T operator()(T a, T b) const {
        return b == 0 ? a : Subtract{}(a, MultiplyLow{}(Divide{}(a, b), b));
    }
};
struct Negate {
    template <class T>
    T operator()(T a) const {
        return Subtract{}(T{0}, a);
    }
};
struct Magnitude {
    template <class T>
    T operator()(T a) const {
        return a < 0 ? Subtract{}(T{0}, a) : a;
    }
};
struct Least {
    template <class T>
    T operator()(T a, T b) const {
        return b < a ? b : a;
    }
};
struct Most {
    template <class T>
    T operator()(T a, T b) const {
        return a < b ? b : a;
    }
};
struct And {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(a & b);
    }
};
struct Or {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(a | b);
    }
};
struct Xor {
    template <class T>
    T operator()(T a, T b) const {
        return static_cast<T>(a ^ b);
    }
};
struct Not {
    template <class T>
    T operator()(T a) const {
        return static_cast<T>(~a);
    }
    bool operator()(bool a) const { return !a; }
};
// Shifts by more than all bits give zeros, or copies of the sign.
struct ShiftLeft {
    template <class T>
    T operator()(T a, std::uint32_t by) const {
        return by < kBits<T> ? static_cast<T>(std::uint64_t{a} << by) : T{0};
    }
};
struct ShiftRight {
    template <class T>
    T operator()(T a, std::uint32_t by) const {
        if constexpr (std::is_signed_v<T>) {
            return static_cast<T>(std::int64_t{a} >> (by < kBits<T> ? by : kBits<T> - 1));
        } else {
            return by < kBits<T> ? static_cast<T>(std::uint64_t{a} >> by) : T{0};
        }
    }
};
struct Same {
    std::uint64_t operator()(std::uint64_t a) const { return a; }
};
struct Select {
    std::uint64_t operator()(std::uint64_t a, std::uint64_t b, bool first) const {
        return first ? a : b;
    }
};
// Bytes of both operands, selected by nibbles; a nibble's highest bit selects copies of a sign.
struct Permute {
    std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t choice) const {
        const std::uint64_t both = a | std::uint64_t{b} << 32U;
        std::uint32_t found = 0;
        for (unsigned i = 0; i < 4; ++i) {
            const std::uint32_t nibble = choice >> 4 * i & 0xfU;
            auto byte = static_cast<std::uint32_t>(both >> 8 * (nibble & 7U) & 0xffU);
            if (nibble > 7) byte = (byte & 0x80U) != 0 ? 0xffU : 0U;
            found |= byte << 8 * i;
        }
        return found;
    }
};
// The upper word of two words after a left shift.
struct FunnelLeft {
    std::uint32_t operator()(std::uint32_t low, std::uint32_t high, std::uint32_t bits) const {
        const std::uint64_t both = low | std::uint64_t{high} << 32U;
        return static_cast<std::uint32_t>(both << (bits & 31U) >> 32U);
    }
};
template <class T>
[[nodiscard]] T ones(std::uint32_t length) {
    return length >= kBits<T> ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << length) - 1);
}
struct InsertField {
    template <class T>
    T operator()(T field, T into, std::uint32_t at, std::uint32_t length) const {
        at &= 0xffU;
        length &= 0xffU;
        if (at >= kBits<T>) return into;
        const T mask = static_cast<T>(ones<T>(length) << at);
        return static_cast<T>((into & ~mask) | (static_cast<T>(field << at) & mask));
    }
};
struct ExtractField {
    template <class T>
    T operator()(T from, std::uint32_t at, std::uint32_t length) const {
        at &= 0xffU;
        length &= 0xffU;
        const T shifted = ShiftRight{}(from, at);
        if constexpr (std::is_signed_v<T>) {
            if (length >= kBits<T>) return shifted;
            if (length == 0) return 0;
            const unsigned spare = kBits<T> - length;
            return static_cast<T>(static_cast<T>(Bits<T>(shifted) << spare) >> spare);
        } else {
            return static_cast<T>(shifted & ones<T>(length));
        }
    }
};
struct CountOnes {
    std::uint32_t operator()(std::uint64_t a) const {
        return static_cast<std::uint32_t>(__builtin_popcountll(a));
    }
    std::uint32_t operator()(std::uint32_t a) const { return (*this)(std::uint64_t{a}); }
};
struct LeadingZeros {
    template <class T>
    std::uint32_t operator()(T a) const {
        return a == 0 ? kBits<T> : static_cast<std::uint32_t>(__builtin_clzll(a)) - (64 - kBits<T>);
    }
};

// setp: the comparisons of integers.
struct Equal {
    template <class T>
    bool operator()(T a, T b) const {
        return a == b;
    }
};
struct Unequal {
    template <class T>
    bool operator()(T a, T b) const {
        return a != b;
    }
};
struct Less {
    template <class T>
    bool operator()(T a, T b) const {
        return a < b;
    }
};
struct LessOrEqual {
    template <class T>
    bool operator()(T a, T b) const {
        return a <= b;
    }
};
struct Greater {
    template <class T>
    bool operator()(T a, T b) const {
        return a > b;
    }
};
struct GreaterOrEqual {
    template <class T>
    bool operator()(T a, T b) const {
        return a >= b;
    }
};

template <class T>
void add_arithmetic(Operations& table, const std::string& type) {
    table["add." + type] = apply<Add, T, T>;
    table["sub." + type] = apply<Subtract, T, T>;
    table["mul.lo." + type] = apply<MultiplyLow, T, T>;
    table["mul.hi." + type] = apply<MultiplyHigh, T, T>;
    table["mad.lo." + type] = apply<MultiplyAdd, T, T, T>;
    table["div." + type] = apply<Divide, T, T>;
    table["rem." + type] = apply<Remainder, T, T>;
    table["min." + type] = apply<Least, T, T>;
    table["max." + type] = apply<Most, T, T>;
    table["shr." + type] = apply<ShiftRight, T, std::uint32_t>;
    table["setp.eq." + type] = apply<Equal, T, T>;
    table["setp.ne." + type] = apply<Unequal, T, T>;
    table["setp.lt." + type] = apply<Less, T, T>;
    table["setp.le." + type] = apply<LessOrEqual, T, T>;
    table["setp.gt." + type] = apply<Greater, T, T>;
    table["setp.ge." + type] = apply<GreaterOrEqual, T, T>;
    if constexpr (std::is_signed_v<T>) {
        table["neg." + type] = apply<Negate, T>;
        table["abs." + type] = apply<Magnitude, T>;
    }
}

template <class T, class Wide>
void add_wide(Operations& table, const std::string& type) {
    table["mul.wide." + type] = apply<MultiplyWide<Wide>, T, T>;
    table["mad.wide." + type] = apply<MultiplyWideAdd<Wide>, T, T, Wide>;
}

template <class T>
void add_bits(Operations& table, const std::string& type) {
    table["and." + type] = apply<And, T, T>;
    table["or." + type] = apply<Or, T, T>;
    table["xor." + type] = apply<Xor, T, T>;
    table["not." + type] = apply<Not, T>;
    if constexpr (!std::is_same_v<T, bool>) {
        table["shl." + type] = apply<ShiftLeft, T, std::uint32_t>;
        table["shr." + type] = apply<ShiftRight, T, std::uint32_t>;
        table["setp.eq." + type] = apply<Equal, T, T>;
        table["setp.ne." + type] = apply<Unequal, T, T>;
    }
}

template <class T>
void add_fields(Operations& table, const std::string& bits) {
    table["bfi.b" + bits] = apply<InsertField, T, T, std::uint32_t, std::uint32_t>;
    table["bfe.u" + bits] = apply<ExtractField, T, std::uint32_t, std::uint32_t>;
    table["bfe.s" + bits] =
        apply<ExtractField, std::make_signed_t<T>, std::uint32_t, std::uint32_t>;
    table["popc.b" + bits] = apply<CountOnes, T>;
    table["clz.b" + bits] = apply<LeadingZeros, T>;
}

}  // namespace

void add_integers(Operations& table) {
    add_arithmetic<std::uint16_t>(table, "u16");
    add_arithmetic<std::int16_t>(table, "s16");
    add_arithmetic<std::uint32_t>(table, "u32");
    add_arithmetic<std::int32_t>(table, "s32");
    add_arithmetic<std::uint64_t>(table, "u64");
    add_arithmetic<std::int64_t>(table, "s64");
    add_wide<std::uint16_t, std::uint32_t>(table, "u16");
    add_wide<std::int16_t, std::int32_t>(table, "s16");
    add_wide<std::uint32_t, std::uint64_t>(table, "u32");
    add_wide<std::int32_t, std::int64_t>(table, "s32");
    add_bits<bool>(table, "pred");
    add_bits<std::uint16_t>(table, "b16");
    add_bits<std::uint32_t>(table, "b32");
    add_bits<std::uint64_t>(table, "b64");
    add_fields<std::uint32_t>(table, "32");
    add_fields<std::uint64_t>(table, "64");
    table["prmt.b32"] = apply<Permute, std::uint32_t, std::uint32_t, std::uint32_t>;
    table["shf.l.wrap.b32"] = apply<FunnelLeft, std::uint32_t, std::uint32_t, std::uint32_t>;
    for (const char* type :
         {"b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"}) {
        table[std::string("mov.") + type] = apply<Same, std::uint64_t>;
        table[std::string("selp.") + type] = apply<Select, std::uint64_t, std::uint64_t, bool>;
    }
    table["mov.pred"] = apply<Same, std::uint64_t>;
    // One address space holds all addresses.
    for (const char* space : {"global", "shared", "local", "param", "const"}) {
        table[std::string("cvta.to.") + space + ".u64"] = apply<Same, std::uint64_t>;
        table[std::string("cvta.") + space + ".u64"] = apply<Same, std::uint64_t>;
    }
}

}  // namespace gpu_sim
