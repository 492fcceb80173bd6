// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "request/sequence.hpp"

/// The number of claimed sequences.
inline std::int64_t num_claimed(const kvcore::SequenceTable& table) {
    const auto is_claimed = [](const kvcore::Sequence& each) { return each.replica >= 0; };
    return std::count_if(table.entries().begin(), table.entries().end(), is_claimed);
}
