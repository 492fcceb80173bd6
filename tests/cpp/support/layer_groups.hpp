// SPDX-License-Identifier: Apache-2.0
// Groups of layers by the tokens that they keep, for the configurations of tests.
#pragma once

#include <cstdint>

#include "kvcore/cache_config.hpp"

constexpr kvcore::CacheGroup full(std::int32_t num_bundles = 1, std::int32_t page_size = 0) {
    return {kvcore::GroupKind::kFull, 0, num_bundles, page_size};
}
constexpr kvcore::CacheGroup sliding(std::int64_t window, std::int32_t num_bundles = 1,
                                     std::int32_t page_size = 0) {
    return {kvcore::GroupKind::kSliding, window, num_bundles, page_size};
}
constexpr kvcore::CacheGroup chunked(std::int64_t chunk, std::int32_t num_bundles = 1,
                                     std::int32_t page_size = 0) {
    return {kvcore::GroupKind::kChunked, chunk, num_bundles, page_size};
}
