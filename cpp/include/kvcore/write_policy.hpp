// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace kvcore {

/// When a cached page is copied to the tier below.
enum class WritePolicy : std::uint8_t {
    kWriteThrough,  // when it enters the cache
    kSelective,     // once it was used often enough
    kWriteBack,     // when it is about to be evicted
};

/// By its name: write_through, write_through_selective or write_back. Throws std::invalid_argument
/// for another one.
[[nodiscard]] WritePolicy write_policy(std::string_view name);

}  // namespace kvcore
