// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "kvcore/types.hpp"

using Tokens = std::vector<kvcore::TokenId>;

/// Return the `n` tokens first, first + 1, ...
inline Tokens count_up(kvcore::TokenId first, std::int64_t n) {
    Tokens tokens;
    for (std::int64_t i = 0; i < n; ++i) {
        tokens.push_back(first + static_cast<kvcore::TokenId>(i));
    }
    return tokens;
}

inline Tokens operator+(Tokens a, const Tokens& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}
