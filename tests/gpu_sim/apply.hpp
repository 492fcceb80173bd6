// SPDX-License-Identifier: Apache-2.0
// Applies a function of numbers to all lanes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "ptx.hpp"

namespace gpu_sim {

/// The number in the low bits of a register's word.
template <class T>
[[nodiscard]] T number_in(std::uint64_t word) {
    if constexpr (std::is_same_v<T, float>) {
        const auto bits = static_cast<std::uint32_t>(word);
        float value = 0;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    } else if constexpr (std::is_same_v<T, bool>) {
        return (word & 1U) != 0;
    } else {
        return static_cast<T>(word);
    }
}

/// A number as a word, sign-extended if signed. Every NaN result is the NaN of GPUs.
template <class T>
[[nodiscard]] std::uint64_t word_of(T value) {
    if constexpr (std::is_same_v<T, float>) {
        if (value != value) return 0x7fffffffU;
        std::uint32_t bits = 0;
        std::memcpy(&bits, &value, sizeof bits);
        return bits;
    } else if constexpr (std::is_signed_v<T>) {
        return static_cast<std::uint64_t>(static_cast<std::int64_t>(value));
    } else {
        return static_cast<std::uint64_t>(value);
    }
}

/// Lanes outside the mask are also computed, and their results dropped: loops without branches.
inline void blend(Register& to, const Register& found, Mask lanes) {
    if (lanes == kAllLanes) {
        to = found;
        return;
    }
    for (int lane = 0; lane < kWarp; ++lane) {
        to.of[lane] = (lanes >> lane & 1U) != 0 ? found.of[lane] : to.of[lane];
    }
}

template <class Function, class... In, std::size_t... kAt>
void apply_to(const Instruction& i, Register* r, Mask lanes, std::index_sequence<kAt...>) {
    Register found;
    for (int lane = 0; lane < kWarp; ++lane) {
        found.of[lane] = word_of(Function{}(number_in<In>(r[i.in[kAt]].of[lane])...));
    }
    blend(r[i.out[0]], found, lanes);
}

/// Function is a struct with a call operator, In are the types of its operands.
template <class Function, class... In>
void apply(const Instruction& i, Register* r, Mask lanes) {
    apply_to<Function, In...>(i, r, lanes, std::index_sequence_for<In...>{});
}

}  // namespace gpu_sim
