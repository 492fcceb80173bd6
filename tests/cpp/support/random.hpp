// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "support/check.hpp"

/// Scrambles all bits of a word (the finalizer of splitmix64, public domain, S. Vigna).
constexpr std::uint64_t scramble(std::uint64_t word) noexcept {
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ULL;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebULL;
    return word ^ (word >> 31);
}

/// Random numbers that are the same with every compiler and library.
class Random {
   public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    std::uint64_t next() noexcept { return scramble(state_ += 0x9e3779b97f4a7c15ULL); }

    /// Return 0 .. n - 1, for n >= 1.
    std::int64_t below(std::int64_t n) noexcept {
        return static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(n));
    }
    /// Return low .. high, both included.
    std::int64_t between(std::int64_t low, std::int64_t high) noexcept {
        return low + below(high - low + 1);
    }
    bool chance(int percent) noexcept { return below(100) < percent; }

    template <class Values>
    auto& pick(Values& values) noexcept {
        return values[static_cast<std::size_t>(below(static_cast<std::int64_t>(values.size())))];
    }

   private:
    std::uint64_t state_;
};
